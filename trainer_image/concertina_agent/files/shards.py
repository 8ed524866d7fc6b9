"""One shard file: its bytes, and how it is filled. Beside it lies its sidecar, without which it is not there.

A gigabyte takes a second, so `fill`, `chunks` and `verify` belong in threads.
"""

from __future__ import annotations

import collections
import concurrent.futures
import dataclasses
import os
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO, Optional

import concertina_protocol as p
from concertina_protocol.sidecar import Damaged, Sidecar, read_sidecar, write_sidecar

CHUNK = 1 << 18
"""Bytes that are read at a time, of a shard that leaves or is checked."""
PIECE, BUFFERS = 1 << 20, 4
"""Bytes that go from one thread to the next at a time, of a shard that arrives, and how many such pieces there are."""
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
        """Its bytes, each chunk good until the next. Raises Damaged where there are too few."""
        left, buffer = self.size, memoryview(bytearray(CHUNK))
        with self.path.open("rb", buffering=0) as file:
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


def fill(path: Path, header: p.ShardHeader, read_into: Callable[[memoryview], int]) -> None:
    """Write what `read_into` brings, which counts once it is committed; a thread checks and writes what has come while
    more comes. Raises OSError where the volume has no room, Damaged where the bytes are not those that the header
    announced."""
    if not 0 <= header.size < LARGEST:
        raise Damaged(f"shard {header.shard} can't be of {str(header.size)[:20]} bytes")
    path.parent.mkdir(parents=True, exist_ok=True)
    left = header.size
    with open(os.open(path, os.O_RDWR | os.O_CREAT, 0o600), "r+b", buffering=0) as file, _Arriving(file) as arriving:
        if left:  # at once or not at all: whoever shares the volume needs what room there is
            os.posix_fallocate(file.fileno(), 0, left)
        while left:
            buffer = arriving.buffer()
            filled = 0
            while filled < min(left, PIECE):  # TLS brings 16 KiB at a time
                count = read_into(buffer[filled : min(left, PIECE)])
                if not count:
                    raise Damaged(f"shard {header.shard} broke off")
                filled += count
            left -= filled
            arriving.keep(buffer[:filled])
        if arriving.checksum() != header.checksum:
            raise Damaged(f"shard {header.shard} of step {header.id.step} did not arrive whole")
        if os.fstat(file.fileno()).st_size > header.size:  # the slot held a longer one
            file.truncate(header.size)


class _Arriving:
    """What has arrived, on its way into a file."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._checksum = file, 0
        self._free = [memoryview(bytearray(PIECE)) for _ in range(BUFFERS)]
        self._thread = concurrent.futures.ThreadPoolExecutor(1, "fill")
        self._kept: collections.deque[concurrent.futures.Future[None]] = collections.deque()

    def __enter__(self) -> _Arriving:
        return self

    def __exit__(self, *error: object) -> None:
        self._thread.shutdown()

    def buffer(self) -> memoryview:
        """The next one to fill. Raises OSError where what was in it could not be written."""
        if len(self._kept) == BUFFERS:
            self._kept.popleft().result()
        self._free.append(self._free.pop(0))
        return self._free[-1]

    def keep(self, data: memoryview) -> None:
        self._kept.append(self._thread.submit(self._keep, data))

    def _keep(self, data: memoryview) -> None:
        self._checksum = zlib.crc32(data, self._checksum)
        while data:
            data = data[self._file.write(data) :]

    def checksum(self) -> int:
        """Of everything. Raises OSError."""
        while self._kept:
            self._kept.popleft().result()
        return self._checksum


def commit(path: Path, header: p.ShardHeader) -> Shard:
    """The file that has been filled is there from now on."""
    write_sidecar(path, Sidecar(header.id, header.shard, header.size, header.checksum))
    return Shard(path, header.id, header.shard, header.size, header.checksum)


def committed_shard(path: Path) -> Optional[Shard]:
    """What the sidecar of this file says of it, if the file is there."""
    found = read_sidecar(path)
    return Shard(path, found.id, found.shard, found.size, found.crc32) if found is not None else None
