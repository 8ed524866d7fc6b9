"""Reader of WebDataset archives: tar files in which consecutive members with the same key form a sample.

The key of a member is its name up to the first dot of the base name. The rest of the name, in lower case, is the name
of the member's value: `web/0001.txt` and `web/0001.ids.npy` are the values `txt` and `ids` of the sample `web/0001`
(https://github.com/webdataset/webdataset). The fields of the object in a member `web/0001.json` are the values
`json.FIELD`.

The standard library treats a damaged header as the end of an archive. This reader refuses such an archive, because
samples would be missing without notice.
"""

from __future__ import annotations

import functools
import io
import json
import tarfile
from collections.abc import Collection, Iterator
from typing import BinaryIO, Self

from concertina_state.errors import InvalidInput
from concertina_trainer.data.build.arrays import DAMAGE, load
from concertina_trainer.data.build.records import MOST_BYTES, Record, kind

_MOST_HEADER_BYTES = 2**20
"""Maximum size in bytes of an extended header, which contains for example a long name."""
_EXTENDED = (tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK)
_JSON = "json"
"""Name of the member with a JSON object, whose fields can be columns too."""
_ADVICE = "restore the archive, or write it again with webdataset.TarWriter"


class _Header(tarfile.TarInfo):
    """Header of a member. It raises an error for damage that the standard library treats as the archive's end."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> Self:
        """Parse a header block.

        Raises:
            HeaderError: When the block marks the end of the archive.
            ReadError: When the block is cut off or damaged, or announces a very long extended header.
        """
        try:
            header = super().frombuf(buf, encoding, errors)
        except tarfile.HeaderError as error:
            if len(buf) == tarfile.BLOCKSIZE and not any(buf):
                raise  # the mark of the archive's end
            raise tarfile.ReadError("it is cut off" if len(buf) < tarfile.BLOCKSIZE else str(error)) from error
        if header.type in _EXTENDED and header.size > _MOST_HEADER_BYTES:
            raise tarfile.ReadError(f"an extended header has {header.size} bytes")
        return header


def read_samples(location: str, file: BinaryIO, columns: Collection[str]) -> Iterator[Record]:
    """Yield the samples of an archive, with the values of `columns`. Other members are not read.

    Raises:
        InvalidInput: When the archive is damaged, or a member can't be used.
    """
    try:
        with tarfile.open(fileobj=file, mode="r|", tarinfo=_Header) as archive:
            yield from _samples(location, archive, columns)
            _check_end(location, archive)
    except (tarfile.TarError, ValueError, OverflowError) as error:
        raise InvalidInput(f"{location} can't be read as a tar archive ({error}): {_ADVICE}.") from error


def _samples(location: str, archive: tarfile.TarFile, columns: Collection[str]) -> Iterator[Record]:
    key, values = "", dict[str, object]()
    for member in archive:
        archive.members.clear()  # type: ignore[attr-defined] # otherwise all headers stay in memory
        if _is_no_data(member):
            continue
        if problem := _problem(member):
            raise InvalidInput(f"{location}: the member {_shown(member.name)} {problem}.")
        folder, _, base = member.name.rpartition("/")
        stem, _, name = base.partition(".")
        if values and f"{folder}/{stem}" != key:
            yield _record(location, key, values)
            values = {}
        key, name = f"{folder}/{stem}", name.lower().removesuffix(".npy")
        if name in values:
            raise InvalidInput(f"{location}: the sample {_shown(key)} has {_shown(name)} twice: {_ADVICE}.")
        is_read = name in columns or (name == _JSON and any(column.startswith(f"{_JSON}.") for column in columns))
        values[name] = _value(location, archive, member) if is_read else None
        if name == _JSON and values[name] is not None:
            fields = _fields(location, member, values[name], columns)
            if twice := fields.keys() & values.keys():
                raise InvalidInput(f"{location}: the sample {_shown(key)} has {_shown(min(twice))} twice: {_ADVICE}.")
            values |= fields
    if values:
        yield _record(location, key, values)


def _record(location: str, key: str, values: dict[str, object]) -> Record:
    return Record(values, functools.partial("{}, sample {}".format, location, _shown(key.lstrip("/"))))


def _is_no_data(member: tarfile.TarInfo) -> bool:
    """Return whether a member is a folder, a hidden file, or a description of the archive such as `__meta__`."""
    base = member.name.rpartition("/")[2]
    return member.isdir() or base.startswith(".") or (base.startswith("__") and base.endswith("__"))


def _problem(member: tarfile.TarInfo) -> str:
    """Return the reason why a member can't be used, as the end of a sentence, or "" if it can."""
    if not member.isreg() or member.issparse():
        return "is a link, a device or a sparse file: write its content into the archive"
    if "." not in member.name.rpartition("/")[2]:
        return "has no suffix, so it is no value of a sample: add a suffix, such as .txt"
    if member.size > MOST_BYTES:
        return f"has {member.size} bytes, and at most {MOST_BYTES} are read: divide it into several documents"
    return ""


def _value(location: str, archive: tarfile.TarFile, member: tarfile.TarInfo) -> object:
    opened = archive.extractfile(member)
    assert opened is not None  # regular files have content
    content = opened.read()
    if not member.name.lower().endswith(".npy"):
        return content
    try:
        return load(io.BytesIO(content))
    except DAMAGE as error:
        raise InvalidInput(
            f"{location}: the member {_shown(member.name)} can't be read: {str(error)[:300].rstrip('.')}."
        ) from error


def _fields(location: str, member: tarfile.TarInfo, content: object, columns: Collection[str]) -> dict[str, object]:
    """Return the fields of a JSON member that are columns, keyed by the column's name.

    Raises:
        InvalidInput: When `columns` requires a field, and the member is not a JSON object.
    """
    names = {column: column.removeprefix(f"{_JSON}.") for column in columns if column.startswith(f"{_JSON}.")}
    if not names:
        return {}
    try:
        found = json.loads(content) if isinstance(content, bytes) else content
    except (ValueError, RecursionError) as error:
        raise InvalidInput(f"{location}: the member {_shown(member.name)} can't be read as JSON ({error}).") from error
    if not isinstance(found, dict):
        raise InvalidInput(f"{location}: the member {_shown(member.name)} holds a {kind(found)}, not an object.")
    return {column: found[name] for column, name in names.items() if name in found}


def _check_end(location: str, archive: tarfile.TarFile) -> None:
    """Check that nothing but padding follows the archive.

    Raises:
        InvalidInput: When other data follow. Otherwise these data would be left out without notice.
    """
    stream = archive.fileobj
    assert stream is not None
    while block := stream.read(2**20):
        if any(block):
            raise InvalidInput(
                f"{location} continues after the mark of its end, as archives do that were put together with cat: "
                "keep each archive in its own file."
            )


def _shown(name: str) -> str:
    return name[:200]
