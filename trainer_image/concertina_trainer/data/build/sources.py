"""Source files of a build, which are divided into pieces by their sizes alone and read record by record."""

from __future__ import annotations

import codecs
import contextlib
import functools
import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

from concertina_state.errors import InvalidInput
from concertina_trainer.data.build import content
from concertina_trainer.data.build.file_names import (
    ARROW,
    FRAMES,
    JSON_LINES,
    PARQUET,
    TEXT,
    TFRECORD,
    WEBDATASET,
    kind_of,
)
from concertina_trainer.data.build.records import Record, kind
from concertina_trainer.data.rangefile import open_range

_BATCH = 1024
"""Number of rows of a Parquet file to read at once."""
_BLOCK_BYTES = 2**20


@dataclass(frozen=True)
class DataSource:
    """Source file of a build."""

    location: str
    """Path or URI of the file."""
    size: int
    """Size in bytes."""
    changed: int = 0
    """Time of the last change in nanoseconds since the epoch, or 0 if it is unknown."""

    @property
    def format(self) -> str:
        return kind_of(self.location).format

    @property
    def compression(self) -> str:
        return kind_of(self.location).compression


@dataclass(frozen=True)
class Piece:
    """Part of a source file: the documents that begin at the positions from `begin` to `end` - 1.

    The unit is bytes in a file of JSON lines, row groups in a Parquet file, and batches in an Arrow file. Compressed
    files and all other formats are not divided: such a file is one piece.
    """

    source: DataSource
    begin: int
    end: int
    size: int
    """Approximate size of the piece's text in bytes."""


def cut(source: DataSource, piece_bytes: int, columns: Sequence[str]) -> list[Piece]:
    """Return pieces of about `piece_bytes` each, or one piece if the file can only be read from its beginning."""
    if source.format == JSON_LINES and not source.compression:
        edges = [*range(0, source.size, piece_bytes), source.size]
        return [Piece(source, begin, end, end - begin) for begin, end in itertools.pairwise(edges)]
    if source.format == PARQUET:
        return _grouped(source, _row_group_sizes(source, columns), piece_bytes)
    if source.format == ARROW:
        return _grouped(source, _batch_sizes(source), piece_bytes)
    return [Piece(source, 0, 1, source.size)]


def _grouped(source: DataSource, sizes: Sequence[int], piece_bytes: int) -> list[Piece]:
    pieces: list[Piece] = []
    begin = size = 0
    for index, more in enumerate(sizes):
        if size and size + more > piece_bytes:
            pieces.append(Piece(source, begin, index, size))
            begin, size = index, 0
        size += more
    return [*pieces, Piece(source, begin, len(sizes), size)] if sizes else pieces


def _row_group_sizes(source: DataSource, columns: Sequence[str]) -> list[int]:
    """Return the size in bytes of `columns` in each row group."""
    import pyarrow.parquet as parquet

    with open_range(source.location, source.size) as file, _as_input(source):
        opened = parquet.ParquetFile(file)
        metadata = opened.metadata
        for column in columns:
            _check_column(source, column, opened.schema_arrow.names)
        paths = [metadata.schema.column(i).path for i in range(metadata.num_columns)]
        chosen = [i for i, path in enumerate(paths) if any(f"{path}.".startswith(f"{name}.") for name in columns)]
        groups = map(metadata.row_group, range(metadata.num_row_groups))
        return [sum(int(group.column(i).total_uncompressed_size) for i in chosen) for group in groups]


def _check_column(source: DataSource, column: str, names: Sequence[str]) -> None:
    if column not in names:
        raise InvalidInput(
            f"{source.location} has no column {column}, but {', '.join(names[:20])[:300]}: name the column "
            "with --column."
        )


@contextlib.contextmanager
def _as_input(source: DataSource) -> Iterator[None]:
    """Convert errors that pyarrow raises in the `with` block into InvalidInput about `source`.

    Raises:
        InvalidInput: When the source can't be read.
    """
    import pyarrow

    try:
        yield
    except (pyarrow.ArrowException, OSError, EOFError, ValueError, MemoryError) as error:
        container = content.container_of(_head(source))
        reason = (
            f"it holds {container}"
            if container and container.lower() != source.format
            else str(error)[:300].rstrip(".")
        )
        raise InvalidInput(f"{source.location} can't be read as {source.format}: {reason}.") from error


def _batch_sizes(source: DataSource) -> list[int]:
    with open_range(source.location, source.size) as file, _as_input(source):
        return [int(batch.nbytes) for batch in _batches(file)]


def _batches(file: BinaryIO) -> Iterator[Any]:
    """Yield the batches of an Arrow file.

    The file may have Arrow's file format or its stream format, which `datasets` writes.
    """
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


def check(source: DataSource) -> None:
    """Check that the first bytes of a text source match the format in its name.

    Raises:
        InvalidInput: When the first bytes do not match that format.
    """
    if source.format not in (JSON_LINES, TEXT):
        return  # readers of other formats raise an error before anything is written
    head = _head(source)
    if reason := content.why_not_text(head, complete=len(head) < content.HEAD_BYTES):
        raise InvalidInput(f"{source.location} {reason}")


def _head(source: DataSource) -> bytes:
    if source.compression:
        with _opened(source) as stream:
            return stream.read(content.HEAD_BYTES)
    with open_range(source.location, min(source.size, content.HEAD_BYTES)) as file:
        return file.read(content.HEAD_BYTES)


def read_records(piece: Piece, columns: Sequence[str]) -> Iterator[Record]:
    """Yield the records of a piece, with the values of `columns`.

    A text file has one value, under the first column's name.
    """
    with _opened(piece.source) as file:
        yield from _FORMATS[piece.source.format](piece, file, columns)


def read_documents(piece: Piece, column: str) -> Iterator[bytes]:
    """Yield the text of each document of a piece in UTF-8. Empty documents are left out."""
    for record in read_records(piece, (column,)):
        if text := record.text(column):
            yield text


@contextlib.contextmanager
def _opened(source: DataSource) -> Iterator[BinaryIO]:
    """Open a source, and decompress it if it is compressed."""
    with open_range(source.location, source.size) as file:
        if not source.compression:
            yield file
            return
        with content.unpacked(file, source.compression, source.location) as stream:
            yield stream


def _text(piece: Piece, file: BinaryIO, columns: Sequence[str]) -> Iterator[Record]:
    whole = file.read()
    if reason := content.why_not_text(whole, complete=True):
        raise InvalidInput(f"{piece.source.location} {reason}")
    text = whole.removeprefix(codecs.BOM_UTF8).decode()
    yield Record({columns[0]: text}, functools.partial(str, piece.source.location))


@dataclass(frozen=True)
class Line:
    """Line of a file of JSON lines."""

    source: DataSource
    offset: int
    """Offset of the line in the unpacked file, in bytes."""
    content: bytes

    def locate(self) -> str:
        """Return the file and the line number, for an error message.

        To count lines, the file is read up to this line.
        """
        number, rest = 1, self.offset
        with _opened(self.source) as file:
            while rest and (block := file.read(min(rest, _BLOCK_BYTES))):
                number, rest = number + block.count(b"\n"), rest - len(block)
        return f"{self.source.location}, line {number}"

    def record(self) -> dict[str, Any] | None:
        """Parse the line. The result is None if the line is blank.

        Raises:
            InvalidInput: When the line is not a JSON object.
        """
        if b"\0" in self.content:
            raise InvalidInput(
                f"{self.locate()} holds NUL bytes, like a file after a crash: restore the file, or remove the NUL "
                "bytes and everything after them."
            )
        try:
            text = self.content.decode("utf-8-sig")
            record = json.loads(text) if text.strip() else None
        except (ValueError, RecursionError) as error:
            raise InvalidInput(
                f"{self.locate()} can't be read as JSON ({error}): correct the line. Each line must be one JSON object."
            ) from error
        if not isinstance(record, dict) and text.strip():
            raise InvalidInput(
                f"{self.locate()} holds a {kind(record)}, not an object: write each document as one JSON object on a "
                "line."
            )
        return record


def read_lines(piece: Piece) -> Iterator[Line]:
    """Yield the lines of a piece of a file of JSON lines."""
    with _opened(piece.source) as file:
        yield from _lines(piece, file)


def _lines(piece: Piece, file: BinaryIO) -> Iterator[Line]:
    """Yield the lines of a piece. A line belongs to the piece that contains its first byte."""
    whole = bool(piece.source.compression)
    offset = piece.begin
    if offset:
        file.seek(offset - 1)
        offset += len(file.readline()) - 1
    while (whole or offset < piece.end) and (content := file.readline()):
        yield Line(piece.source, offset, content)
        offset += len(content)


def _json_lines(piece: Piece, file: BinaryIO, columns: Sequence[str]) -> Iterator[Record]:
    for line in _lines(piece, file):
        if (values := line.record()) is not None:
            yield Record(values, line.locate)


def _parquet(piece: Piece, file: BinaryIO, columns: Sequence[str]) -> Iterator[Record]:
    import pyarrow.parquet as parquet

    with _as_input(piece.source):
        opened = parquet.ParquetFile(file)
        groups = list(range(piece.begin, piece.end))
        row = sum(opened.metadata.row_group(group).num_rows for group in range(piece.begin))
        for batch in opened.iter_batches(_BATCH, row_groups=groups, columns=list(columns)):
            yield from rows(batch, columns, piece.source.location, row)
            row += batch.num_rows


def _arrow(piece: Piece, file: BinaryIO, columns: Sequence[str]) -> Iterator[Record]:
    row = 0
    with _as_input(piece.source):
        for index, batch in enumerate(_batches(file)):
            if piece.begin <= index < piece.end:
                batch.validate(full=True)  # pyarrow itself does not check that offsets are within the buffer
                for column in columns:
                    _check_column(piece.source, column, batch.schema.names)
                yield from rows(batch, columns, piece.source.location, row)
            row += batch.num_rows


def rows(batch: Any, columns: Sequence[str], location: str, first: int = 0) -> Iterator[Record]:
    """Yield the rows of a pyarrow RecordBatch. Error messages number the rows from `first` + 1."""
    columns = [name for name in columns if name in batch.schema.names]
    values = [column_values(batch.column(name)) for name in columns]
    for number, row in enumerate(zip(*values, strict=True), first + 1):
        yield Record(dict(zip(columns, row, strict=True)), functools.partial("{}, row {}".format, location, number))


def column_values(column: Any) -> Iterator[object]:
    """Yield the values of a column.

    A list of numbers is yielded as an array, and a list of lists of equal length as a matrix.
    """
    import pyarrow

    is_list = pyarrow.types.is_list, pyarrow.types.is_large_list, pyarrow.types.is_fixed_size_list
    if not any(check(column.type) for check in is_list):
        yield from column.to_pylist()
        return
    for scalar in column:
        yield scalar.as_py() if not scalar.is_valid else _array(scalar.values, is_list)


def _array(values: Any, is_list: Sequence[Callable[[Any], bool]]) -> object:
    if not any(check(values.type) for check in is_list):
        return values.to_numpy(zero_copy_only=False)
    inner = values.flatten()
    lengths = set(values.value_lengths().to_pylist()) if len(values) else {0}
    if len(lengths) > 1 or None in lengths or any(check(inner.type) for check in is_list):
        return values.to_pylist()
    return inner.to_numpy(zero_copy_only=False).reshape(len(values), *lengths)


def _webdataset(piece: Piece, file: BinaryIO, columns: Sequence[str]) -> Iterator[Record]:
    from concertina_trainer.data.build.webdataset import read_samples

    return read_samples(piece.source.location, file, columns)


def _tfrecord(piece: Piece, file: BinaryIO, columns: Sequence[str]) -> Iterator[Record]:
    from concertina_trainer.data.build.tfrecord import read_examples  # needs protobuf

    return read_examples(piece.source.location, file, columns)


def _arrays(piece: Piece, file: BinaryIO, columns: Sequence[str]) -> Iterator[Record]:
    from concertina_trainer.data.build.arrays import read_arrays  # needs numpy

    return read_arrays(piece.source.location, file, columns)


_FORMATS: dict[str, Callable[[Piece, BinaryIO, Sequence[str]], Iterator[Record]]] = {
    TEXT: _text,
    JSON_LINES: _json_lines,
    PARQUET: _parquet,
    ARROW: _arrow,
    WEBDATASET: _webdataset,
    TFRECORD: _tfrecord,
    FRAMES: _arrays,
}
