"""What data are built from: files found, cut into pieces by their sizes alone, and read document by document."""

from __future__ import annotations

import contextlib
import gzip
import itertools
import json
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, BinaryIO

from concertina_state.errors import BadInput
from concertina_state.objects.prefix import Entry, ObjectPrefix
from concertina_trainer.data.build.splits import TRAINING, split_of
from concertina_trainer.data.rangefile import open_range, split

FRAMES = "frames"
SUFFIXES = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".jsonl.gz": "jsonl.gz",
    ".json.gz": "jsonl.gz",
    ".json": "jsonl",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".npy": FRAMES,
    ".npz": FRAMES,
}
"""Format by the end of a file's name; any other file is one document of text."""
_BATCH = 1024
"""Rows of a Parquet file that are read at once."""


@dataclass(frozen=True)
class Source:
    location: str
    """A path, or a URI."""
    size: int
    """Bytes."""
    changed: int = 0
    """Nanoseconds since the epoch, where it is known."""

    @property
    def format(self) -> str:
        return next((kind for end, kind in SUFFIXES.items() if self.location.endswith(end)), "text")


@dataclass(frozen=True)
class Piece:
    """The documents of one source that begin in [begin, end): bytes of JSON lines, else row groups or batches."""

    source: Source
    begin: int
    end: int
    size: int
    """Bytes, about, of its text."""


def find(places: Sequence[str], pattern: str = "", warn: Callable[[str], None] = lambda message: None) -> list[Source]:
    """Files in a fixed order. A folder gives those that match `pattern`; without one, those of the formats above that
    it holds (where they are splits: the split `train`), else all. `warn`: of what was left out. Raises BadInput where
    there is none, or no telling which of several splits is meant."""
    found = [source for place in places for source in _below(place, pattern, warn)]
    if not found:
        raise BadInput(f"no file matches {pattern or '**/*'} in {', '.join(places)}.")
    return found


def _below(place: str, pattern: str, warn: Callable[[str], None]) -> list[Source]:
    place = place.removeprefix("file://").rstrip("/") or "/"
    if "://" in place:
        sources = _stored(place, pattern)
    else:
        root = Path(place)
        if not root.exists():
            raise BadInput(f"{place} does not exist.")
        if root.is_file():
            return [_local(root)]
        place = str(root.absolute())
        files = sorted(file for file in root.glob(pattern or "**/*") if file.is_file() and not _hidden(file, root))
        sources = [_local(file) for file in files]
    return sources if pattern else _training(place, sources, warn)


def _hidden(file: Path, root: Path) -> bool:
    return any(part.startswith(".") for part in file.relative_to(root).parts)


def _local(file: Path) -> Source:
    status = file.stat()
    return Source(str(file.absolute()), status.st_size, status.st_mtime_ns)


def _stored(uri: str, pattern: str) -> list[Source]:
    listed = ObjectPrefix(uri).entries()
    if not listed:
        folder, name = split(uri)
        return [_object(uri, entry) for key, entry in ObjectPrefix(folder).entries().items() if key == name]
    keys = [key for key in sorted(listed) if fnmatch(key, pattern or "*")]
    return [_object(f"{uri}/{key}", listed[key]) for key in keys]


def _object(uri: str, entry: Entry) -> Source:
    return Source(uri, entry.size, int(entry.at.timestamp()) * 10**9)


def _training(place: str, sources: list[Source], warn: Callable[[str], None]) -> list[Source]:
    """Of a folder's files those to train on: beside data, a folder of Hugging Face holds files that describe it (some
    of them JSON), and what is to be kept from training."""
    data = [source for source in sources if source.format != "text" and not source.location.endswith(".json")]
    names = [source.location.removeprefix(f"{place}/") for source in data]
    whole = any(source.location == f"{place}/dataset_dict.json" for source in sources)
    splits = [name.partition("/")[0] if whole else split_of(name) for name in names]
    kinds = sorted(set(splits))
    if len(kinds) < 2 or "" in kinds:
        return data or sources
    if TRAINING not in kinds:
        raise BadInput(f"{place} holds the splits {', '.join(kinds)}, and no {TRAINING}: choose files by --pattern.")
    warn(f"{place}: of its splits {', '.join(kinds)}, {TRAINING} is taken; --pattern chooses others")
    return [source for source, split in zip(data, splits, strict=True) if split == TRAINING]


def cut(source: Source, piece_bytes: int, column: str) -> list[Piece]:
    """Pieces of about `piece_bytes` each where the format can be entered in its middle."""
    if source.format == "jsonl":
        edges = [*range(0, source.size, piece_bytes), source.size]
        return [Piece(source, begin, end, end - begin) for begin, end in itertools.pairwise(edges)]
    if source.format == "parquet":
        return _grouped(source, _row_group_sizes(source, column), piece_bytes)
    if source.format == "arrow":
        return _grouped(source, _batch_sizes(source), piece_bytes)
    return [Piece(source, 0, 1, source.size)]


def _grouped(source: Source, sizes: Sequence[int], piece_bytes: int) -> list[Piece]:
    pieces: list[Piece] = []
    begin = size = 0
    for index, more in enumerate(sizes):
        if size and size + more > piece_bytes:
            pieces.append(Piece(source, begin, index, size))
            begin, size = index, 0
        size += more
    return [*pieces, Piece(source, begin, len(sizes), size)] if sizes else pieces


def _row_group_sizes(source: Source, column: str) -> list[int]:
    import pyarrow.parquet as parquet

    with open_range(source.location, source.size) as file, _as_input(source):
        opened = parquet.ParquetFile(file)
        metadata = opened.metadata
        _column(source, column, opened.schema_arrow.names)
        paths = [metadata.schema.column(i).path for i in range(metadata.num_columns)]
        if column not in paths:
            raise _not_text(source, column, str(opened.schema_arrow.field(column).type))
        index = paths.index(column)
        groups = [metadata.row_group(i).column(index) for i in range(metadata.num_row_groups)]
        return [int(group.total_uncompressed_size) for group in groups]


def _column(source: Source, column: str, names: Sequence[str]) -> int:
    if column not in names:
        raise BadInput(
            f"{source.location} has no column {column}, but {', '.join(names[:20])[:300]}: name one by --column."
        )
    return names.index(column)


@contextlib.contextmanager
def _as_input(source: Source) -> Iterator[None]:
    """pyarrow's errors as sentences."""
    import pyarrow

    try:
        yield
    except (pyarrow.ArrowException, OSError, EOFError, ValueError, MemoryError) as error:
        raise BadInput(
            f"{source.location} can't be read as {source.format}: {str(error)[:300].rstrip('.')}."
        ) from error


def _batch_sizes(source: Source) -> list[int]:
    with open_range(source.location, source.size) as file, _as_input(source):
        return [int(batch.nbytes) for batch in _batches(file)]


def _batches(file: BinaryIO) -> Iterator[Any]:
    """Of an Arrow file in either of its forms (`datasets` writes streams)."""
    from pyarrow import ipc

    head = file.read(6)
    file.seek(0)
    if head != b"ARROW1":
        batches: Iterator[Any] = iter(ipc.open_stream(file))
    else:
        reader = ipc.open_file(file)
        batches = map(reader.get_batch, range(reader.num_record_batches))
    for batch in batches:
        batch.validate()
        yield batch


def read_documents(piece: Piece, column: str) -> Iterator[bytes]:
    """The text of each document (UTF-8, or as it is in a text file); empty ones are left out."""
    with open_range(piece.source.location, piece.source.size) as file:
        yield from (text for text in _FORMATS[piece.source.format](piece, file, column) if text)


def _text(piece: Piece, file: BinaryIO, column: str) -> Iterator[bytes]:
    yield file.read()


def _json_lines(piece: Piece, file: BinaryIO, column: str) -> Iterator[bytes]:
    """A line belongs to the piece that its first byte is in."""
    at = piece.begin
    if at:
        file.seek(at - 1)
        at += len(file.readline()) - 1
    while at < piece.end and (line := file.readline()):
        yield _parsed(line, piece.source, at, column)
        at += len(line)


def _zipped_lines(piece: Piece, file: BinaryIO, column: str) -> Iterator[bytes]:
    at = 0
    try:
        with gzip.open(file) as unpacked:
            for line in unpacked:
                yield _parsed(line, piece.source, at, column)
                at += len(line)
    except (OSError, EOFError, zlib.error) as error:
        raise BadInput(f"{piece.source.location} can't be unpacked: {error}.") from error


def _parsed(line: bytes, source: Source, at: int, column: str) -> bytes:
    if not line.strip():
        return b""
    where = f"{source.location}, the line at byte {at}"
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise BadInput(f"{where} can't be read as JSON ({error}): correct it; each line holds one object.") from error
    if not isinstance(record, dict):
        raise BadInput(f"{where} holds a {_kind(record)}, not an object: write each document as an object a line.")
    if column not in record:
        raise BadInput(
            f"{where} has no {column}, but {', '.join([*record][:20])[:300] or 'nothing'}: name one by --column."
        )
    text = record[column]
    if not isinstance(text, str | None):
        raise BadInput(f"{where}: its {column} is a {_kind(text)}, not text: name another by --column.")
    return (text or "").encode(errors="replace")


def _kind(value: object) -> str:
    """As JSON calls it."""
    names = {dict: "object", list: "list", str: "string", bool: "boolean", type(None): "null"}
    return names.get(type(value), "number")


def _parquet(piece: Piece, file: BinaryIO, column: str) -> Iterator[bytes]:
    import pyarrow.parquet as parquet

    with _as_input(piece.source):
        groups = list(range(piece.begin, piece.end))
        for batch in parquet.ParquetFile(file).iter_batches(_BATCH, row_groups=groups, columns=[column]):
            yield from _texts(batch.column(0), piece.source, column)


def _arrow(piece: Piece, file: BinaryIO, column: str) -> Iterator[bytes]:
    with _as_input(piece.source):
        for index, batch in enumerate(_batches(file)):
            if piece.begin <= index < piece.end:
                batch.validate(full=True)  # pyarrow takes offsets on trust, wherever they point
                place = _column(piece.source, column, batch.schema.names)
                yield from _texts(batch.column(place), piece.source, column)


def _texts(values: Any, source: Source, column: str) -> Iterator[bytes]:
    for value in values.to_pylist():
        if not isinstance(value, str | None):
            raise _not_text(source, column, type(value).__name__)
        yield (value or "").encode(errors="replace")


def _not_text(source: Source, column: str, kind: str) -> BadInput:
    advice = "name another by --column, or write each document's text into a column of its own first"
    return BadInput(f"{source.location}: column {column} holds {kind}, not text: {advice}.")


_FORMATS: dict[str, Callable[[Piece, BinaryIO, str], Iterator[bytes]]] = {
    "text": _text,
    "jsonl": _json_lines,
    "jsonl.gz": _zipped_lines,
    "parquet": _parquet,
    "arrow": _arrow,
}
