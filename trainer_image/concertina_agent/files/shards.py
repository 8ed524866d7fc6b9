"""One shard file: its bytes, and how it is filled. Beside it lies its sidecar, without which it is not there.

Room for a gigabyte alone takes 0.3 s, so `fill`, `chunks` and `verify` belong in threads.
"""

from __future__ import annotations

import dataclasses
import os
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Optional

import concertina_protocol as p
from concertina_protocol.sidecar import Damaged, Sidecar, read_sidecar, write_sidecar

CHUNK = 1 << 18
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

    def chunks(self) -> Iterator[memoryview]:
        """Its bytes, each chunk good until the next; raises Damaged behind them where they are not those that were
        committed, and before where there are too few."""
        left, checksum, buffer = self.size, 0, memoryview(bytearray(CHUNK))
        with self.path.open("rb", buffering=0) as file:
            while left:
                count = file.readinto(buffer[: min(left, CHUNK)])
                if not count:
                    raise Damaged(f"{self.path} ends {left} bytes early")
                left, checksum = left - count, zlib.crc32(buffer[:count], checksum)
                yield buffer[:count]
        if checksum != self.checksum:
            raise Damaged(f"{self.path} has crc32 {checksum:08x} instead of {self.checksum:08x}")

    def verify(self) -> None:
        """Raises Damaged where the bytes are not those that were committed."""
        for _ in self.chunks():
            pass


def fill(path: Path, header: p.ShardHeader, read_into: Callable[[memoryview], int]) -> None:
    """Write what `read_into` brings, which counts once it is committed. Raises OSError where the volume has no room,
    Damaged where the bytes are not those that the header announced."""
    if not 0 <= header.size < LARGEST:
        raise Damaged(f"shard {header.shard} can't be of {str(header.size)[:20]} bytes")
    path.parent.mkdir(parents=True, exist_ok=True)
    left, checksum, buffer = header.size, 0, memoryview(bytearray(CHUNK))
    with open(os.open(path, os.O_RDWR | os.O_CREAT, 0o600), "r+b", buffering=0) as file:
        file.truncate(left)
        if left:
            os.posix_fallocate(file.fileno(), 0, left)
        while left:
            filled = 0
            while filled < min(left, CHUNK):  # TLS brings 16 KiB at a time
                count = read_into(buffer[filled : min(left, CHUNK)])
                if not count:
                    raise Damaged(f"shard {header.shard} broke off")
                filled += count
            checksum, left = zlib.crc32(buffer[:filled], checksum), left - filled
            file.write(buffer[:filled])
    if checksum != header.checksum:
        raise Damaged(f"shard {header.shard} of step {header.id.step} did not arrive whole")


def commit(path: Path, header: p.ShardHeader) -> Shard:
    """The file that has been filled is there from now on."""
    write_sidecar(path, Sidecar(header.id, header.shard, header.size, header.checksum))
    return Shard(path, header.id, header.shard, header.size, header.checksum)


def committed_shard(path: Path) -> Optional[Shard]:
    """What the sidecar of this file says of it, if the file is there."""
    found = read_sidecar(path)
    return Shard(path, found.id, found.shard, found.size, found.crc32) if found is not None else None
