"""One shard file: its bytes, and how it is filled. Beside it lies its sidecar, without which it is not there.

A gigabyte takes a second, so `fill`, `chunks` and `verify` belong in threads.
"""

from __future__ import annotations

import dataclasses
import os
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Optional

import concertina_protocol as p
from concertina_protocol.checksums import followed_by
from concertina_protocol.sidecar import Damaged, Sidecar, read_sidecar, write_sidecar

CHUNK = 1 << 18
"""Bytes that are read or written at a time."""
LARGEST = 1 << 63
"""Bytes: no file has as many."""
LARGEST_HEADER = p.MAX_LINE // 2
"""Bytes, of what names the tensors: quoted, it fits a line of the protocol."""


@dataclasses.dataclass(frozen=True)
class Shard:
    """One whole shard file."""

    path: Path
    id: p.SnapshotId
    number: int
    size: int
    checksum: int

    @property
    def header(self) -> p.ShardHeader:
        return p.ShardHeader(self.id, self.number, self.size, self.checksum)

    def tensors_header(self) -> str:
        """The safetensors header: JSON behind its length in 8 bytes. Raises Damaged, OSError."""
        with self.path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if length > min(self.size, LARGEST_HEADER):
                raise Damaged(f"{self.path} does not begin with a safetensors header of {LARGEST_HEADER} bytes at most")
            try:
                return file.read(length).decode()
            except UnicodeDecodeError as error:
                raise Damaged(f"{self.path} does not begin with a safetensors header: {error}") from error

    def chunks(self, number: int = 0, parts: int = 1) -> Iterator[memoryview]:
        """The bytes of a part, each chunk good until the next. Raises Damaged where there are too few."""
        part, buffer = part_of(self.size, number, parts), memoryview(bytearray(CHUNK))
        left = part.stop - part.start
        with self.path.open("rb", buffering=0) as file:
            file.seek(part.start)
            while left:
                count = file.readinto(buffer[: min(left, CHUNK)])
                if not count:
                    raise Damaged(f"{self.path} ends {left} bytes early")
                left -= count
                yield buffer[:count]

    def verify(self) -> None:
        """Raises Damaged where the bytes are not those that were committed."""
        checksum = 0
        for chunk in self.chunks():
            checksum = zlib.crc32(chunk, checksum)
        if checksum != self.checksum:
            raise Damaged(f"{self.path} has crc32 {checksum:08x} instead of {self.checksum:08x}")


def part_of(size: int, number: int, parts: int) -> range:
    """The bytes of one part of a shard, of which all are equally long but for a byte."""
    return range(size * number // parts, size * (number + 1) // parts)


def fill(path: Path, header: p.ShardHeader, read_into: Callable[[memoryview], int], number: int = 0) -> int:
    """Write a part of a shard, which counts once all of them are committed; its crc32. Raises OSError where the volume
    has no room, Damaged where there are too few bytes."""
    if not 0 <= header.size < LARGEST:
        raise Damaged(f"shard {header.shard} can't be of {str(header.size)[:20]} bytes")
    path.parent.mkdir(parents=True, exist_ok=True)
    part, buffer, checksum = part_of(header.size, number, header.parts), memoryview(bytearray(CHUNK)), 0
    with open(os.open(path, os.O_RDWR | os.O_CREAT, 0o600), "r+b", buffering=0) as file:
        if os.fstat(file.fileno()).st_size > header.size:  # the slot held a longer one
            file.truncate(header.size)
        if part:  # at once or not at all: whoever shares the volume needs what room there is
            os.posix_fallocate(file.fileno(), part.start, part.stop - part.start)
        file.seek(part.start)
        for start in range(part.start, part.stop, CHUNK):
            chunk = buffer[: min(CHUNK, part.stop - start)]
            filled = 0
            while filled < len(chunk):  # TLS brings 16 KiB at a time
                count = read_into(chunk[filled:])
                if not count:
                    raise Damaged(f"shard {header.shard} broke off")
                filled += count
            checksum = zlib.crc32(chunk, checksum)
            while chunk:
                chunk = chunk[file.write(chunk) :]
    return checksum


def commit(path: Path, header: p.ShardHeader, checksums: Iterable[int]) -> Shard:
    """The file whose parts have been filled is there from now on. Raises Damaged where its bytes are not those that the
    header announced."""
    checksum = 0
    for number, of_part in enumerate(checksums):
        part = part_of(header.size, number, header.parts)
        checksum = followed_by(checksum, of_part, part.stop - part.start)
    if checksum != header.checksum:
        raise Damaged(f"shard {header.shard} of step {header.id.step} did not arrive whole")
    write_sidecar(path, Sidecar(header.id, header.shard, header.size, header.checksum))
    return Shard(path, header.id, header.shard, header.size, header.checksum)


def committed_shard(path: Path) -> Optional[Shard]:
    """What the sidecar of this file says of it, if the file is there."""
    found = read_sidecar(path)
    return Shard(path, found.id, found.shard, found.size, found.crc32) if found is not None else None
