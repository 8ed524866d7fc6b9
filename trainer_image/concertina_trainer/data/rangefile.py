"""Seekable files for pyarrow and line readers, whether the file is in a store or on this machine."""

from __future__ import annotations

import io
from pathlib import Path
from typing import BinaryIO, cast

from concertina_state.errors import InvalidInput
from concertina_state.objects.prefix import ObjectPrefix

CHUNK = 4 * 2**20
"""Minimum number of bytes to request from a store at once."""


class RangeFile(io.RawIOBase):
    """Object in a store, as a file that is read by byte ranges."""

    def __init__(self, folder: ObjectPrefix, key: str, size: int) -> None:
        self._folder, self._key, self._size, self._at = folder, key, size, 0

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
        end = min(self._at + len(buffer), self._size)
        if end <= self._at:
            return 0
        [data] = self._folder.get_ranges(self._key, [(self._at, end)])
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
    folder, key = split(location)
    return cast(BinaryIO, io.BufferedReader(RangeFile(ObjectPrefix(folder), key, size), CHUNK))


def read_whole(location: str) -> bytes:
    """Return the contents of a small file.

    Raises:
        InvalidInput: When there is no such file.
    """
    if "://" not in location:
        with open_range(location, 0) as file:
            return file.read()
    folder, key = split(location)
    content = ObjectPrefix(folder).get(key)
    if content is None:
        raise InvalidInput(f"{location} does not exist.")
    return content
