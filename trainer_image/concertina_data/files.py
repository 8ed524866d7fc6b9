"""Files that a manifest names, and verification of their contents."""

from __future__ import annotations

import contextlib
import hashlib
import mmap
import os
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Union

from concertina_data.data_manifest import TokenShard
from concertina_state.errors import DamagedInput, InvalidInput

Content = Union[mmap.mmap, bytes]


@dataclass(frozen=True)
class ManifestFile:
    """File as the manifest of a data set describes it."""

    file: str
    size: int
    sha256: str
    crc32: int | None = None
    """crc32 of the contents, or None if it is unknown. Comparing crc32 is twice as fast as comparing SHA-256."""

    def matches(self, content: Content) -> bool:
        """Return whether `content` is the content of this file."""
        if len(content) != self.size:
            return False
        if self.crc32 is not None:
            return zlib.crc32(content) == self.crc32
        return hashlib.sha256(content).hexdigest() == self.sha256

    def damaged(self, place: str, size: int) -> InvalidInput:
        return DamagedInput(
            f"{place}/{self.file} is damaged: the manifest says {self.size} bytes with sha256 "
            f"{self.sha256}, but the file has {size} bytes with another checksum. Copy it again, or build "
            "the data again."
        )

    def missing(self, place: str) -> InvalidInput:
        return InvalidInput(
            f"{place}/{self.file} is missing, but the manifest names it: restore the file, or build the data again."
        )


def tokens_file(shard: TokenShard) -> ManifestFile:
    return ManifestFile(shard.file, shard.size, shard.sha256, shard.crc32)


def documents_file(shard: TokenShard) -> ManifestFile:
    return ManifestFile(shard.documents_file, 8 * shard.documents, shard.documents_sha256)


def mapped(path: Path) -> Content | None:
    """Return a memory mapping of the file, or None if the file does not exist."""
    with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
        return map_of(file.fileno())
    return None


def map_of(descriptor: int) -> Content:
    """Return a mapping of an open file."""
    # A private mapping, because torch warns about read-only memory even if it is never written.
    return mmap.mmap(descriptor, 0, access=mmap.ACCESS_COPY) if os.fstat(descriptor).st_size else b""
