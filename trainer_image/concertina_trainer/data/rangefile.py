"""Seekable files, in a store or on this machine, for pyarrow and for readers of lines."""

from __future__ import annotations

import functools
import io
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, cast

from concertina_state.errors import InvalidInput
from concertina_state.objects.prefix import ObjectEntry, ObjectPrefix, StorageError
from concertina_state.objects.stores import KINDS

CHUNK = 4 * 2**20
"""Minimum number of bytes to request from a store at once."""


class RangeFile(io.RawIOBase):
    """File of `size` bytes at a URI, which the function `read` reads by byte ranges [begin, end)."""

    def __init__(self, uri: str, size: int, read: Callable[[int, int], bytes | memoryview]) -> None:
        self._uri, self._size, self._read, self._at = uri, size, read, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        self._at = max(0, base + offset)
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]
        """Fill the buffer with the next bytes.

        Raises:
            StorageError: When the server returns another number of bytes.
        """
        end = min(self._at + len(buffer), self._size)
        if end <= self._at:
            return 0
        data = self._read(self._at, end)
        if len(data) != end - self._at:
            raise StorageError(
                f"{self._uri} can't be read: its server returned {len(data)} bytes instead of {end - self._at}. The "
                "file was changed, or the server does not support byte ranges."
            )
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)


def split(location: str) -> tuple[str, str]:
    """Return the folder and the file name of a path or URI."""
    head, _, name = location.rpartition("/")
    return head or ("/" if location.startswith("/") else "."), name


def open_range(location: str, size: int) -> BinaryIO:
    """Open a path, or an object of `size` bytes at a URI, for reading.

    Raises:
        InvalidInput: When there is no such file.
    """
    if "://" not in location:
        try:
            return Path(location).open("rb")
        except OSError as error:
            raise InvalidInput(f"{location} can't be read: {error.strerror}.") from error
    return cast(BinaryIO, io.BufferedReader(RangeFile(location, size, _ranges(location)), CHUNK))


def _ranges(location: str) -> Callable[[int, int], bytes | memoryview]:
    """Return the function that reads a byte range of the file at a URI."""
    if _by_obstore(location):
        folder, key = split(location)
        prefix = ObjectPrefix(folder)
        return lambda begin, end: prefix.get_ranges(key, [(begin, end)])[0]
    from concertina_trainer.data import drivers

    return functools.partial(drivers.read_range, location)


def _by_obstore(location: str) -> bool:
    return location.partition("://")[0] in (*KINDS, "file")


def listed(uri: str) -> dict[str, ObjectEntry]:
    """Return the size and time of each file below a URI, keyed by the file's path relative to the URI.

    The key is "" if the URI is itself a file. If there is nothing at the URI, the result is empty.
    """
    if not _by_obstore(uri):
        from concertina_trainer.data import drivers

        return drivers.listed(uri)
    if objects := ObjectPrefix(uri).entries():
        return objects
    folder, key = split(uri)
    entries = ObjectPrefix(folder).entries()
    return {"": entries[key]} if key in entries else {}


def read_whole(location: str) -> bytes:
    """Return the contents of a small file.

    Raises:
        InvalidInput: When there is no such file.
    """
    if "://" in location and _by_obstore(location):
        folder, key = split(location)
        content = ObjectPrefix(folder).get(key)
        if content is None:
            raise InvalidInput(f"{location} does not exist.")
        return content
    size = listed(location)[""].size if "://" in location else 0
    with open_range(location, size) as file:
        return file.read()
