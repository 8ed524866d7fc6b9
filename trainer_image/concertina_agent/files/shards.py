"""Functions that read and write one shard file.

The functions `fill`, `chunks` and `verify` take about a second per gigabyte, so call them in threads.

A file counts as a shard only if it has a sidecar: a second file, which contains the size and checksum of the first.
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
"""Number of bytes to read or write at a time."""
LARGEST = 1 << 63
"""Upper limit on the size of a shard in bytes. No file is that large."""
LARGEST_HEADER = p.MAX_LINE // 2
"""Maximum size in bytes of a safetensors header.

A header of this size, encoded as a JSON string, still fits into a line of the protocol.
"""


@dataclasses.dataclass(frozen=True)
class Shard:
    """Complete shard file, which has a sidecar with its size and checksum."""

    path: Path
    id: p.SnapshotId
    number: int
    size: int
    checksum: int

    @property
    def header(self) -> p.ShardHeader:
        return p.ShardHeader(self.id, self.number, self.size, self.checksum)

    def tensors_header(self) -> str:
        """Return the file's safetensors header as JSON.

        Raises:
            Damaged: If the file does not begin with a valid header.
            OSError: If the file cannot be read.
        """
        with self.path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if length > min(self.size, LARGEST_HEADER):
                raise Damaged(f"{self.path} does not begin with a safetensors header of {LARGEST_HEADER} bytes at most")
            try:
                return file.read(length).decode()
            except UnicodeDecodeError as error:
                raise Damaged(f"{self.path} does not begin with a safetensors header: {error}") from error

    def chunks(self, number: int = 0, parts: int = 1) -> Iterator[memoryview]:
        """Yield the bytes of part `number` of the shard in chunks. A chunk is valid until the next one is yielded.

        Raises:
            Damaged: If the file is too short.
        """
        part, buffer = part_of(self.size, number, parts), memoryview(bytearray(CHUNK))
        remaining_bytes = part.stop - part.start
        with self.path.open("rb", buffering=0) as file:
            file.seek(part.start)
            while remaining_bytes:
                count = file.readinto(buffer[: min(remaining_bytes, CHUNK)])
                if not count:
                    raise Damaged(f"{self.path} ends {remaining_bytes} bytes early")
                remaining_bytes -= count
                yield buffer[:count]

    def verify(self) -> None:
        """Check the file's bytes against the checksum in its sidecar.

        Raises:
            Damaged: If the bytes differ from those that were committed.
        """
        checksum = 0
        for chunk in self.chunks():
            checksum = zlib.crc32(chunk, checksum)
        if checksum != self.checksum:
            raise Damaged(f"{self.path} has crc32 {checksum:08x} instead of {self.checksum:08x}")


def part_of(size: int, number: int, parts: int) -> range:
    """Return the byte range of part `number` of a shard of `size` bytes that is divided into `parts` parts.

    The lengths of the parts differ by at most one byte.
    """
    return range(size * number // parts, size * (number + 1) // parts)


def fill(path: Path, header: p.ShardHeader, read_into: Callable[[memoryview], int], number: int = 0) -> int:
    """Write part `number` of a shard into the file at `path`, and return the part's crc32.

    The shard counts as present only after `commit`, when all its parts are written.

    Raises:
        OSError: If the volume has too little space.
        Damaged: If `read_into` delivers too few bytes, or the size in `header` is invalid.
    """
    if not 0 <= header.size < LARGEST:
        raise Damaged(f"shard {header.shard} can't be of {str(header.size)[:20]} bytes")
    path.parent.mkdir(parents=True, exist_ok=True)
    part, buffer, checksum = part_of(header.size, number, header.parts), memoryview(bytearray(CHUNK)), 0
    with open(os.open(path, os.O_RDWR | os.O_CREAT, 0o600), "r+b", buffering=0) as file:
        if os.fstat(file.fileno()).st_size > header.size:  # the slot contained a longer shard before
            file.truncate(header.size)
        if part:  # reserve all space now or fail, because other processes use the volume too
            os.posix_fallocate(file.fileno(), part.start, part.stop - part.start)
        file.seek(part.start)
        for start in range(part.start, part.stop, CHUNK):
            chunk = buffer[: min(CHUNK, part.stop - start)]
            filled = 0
            while filled < len(chunk):  # TLS delivers at most 16 KiB at a time
                count = read_into(chunk[filled:])
                if not count:
                    raise Damaged(f"shard {header.shard} was cut off")
                filled += count
            checksum = zlib.crc32(chunk, checksum)
            while chunk:
                chunk = chunk[file.write(chunk) :]
    return checksum


def commit(path: Path, header: p.ShardHeader, checksums: Iterable[int]) -> Shard:
    """Commit a file whose parts are all written, so that the file counts as present.

    Raises:
        Damaged: If the bytes differ from those that the header announced.
    """
    checksum = 0
    for number, part_checksum in enumerate(checksums):
        part = part_of(header.size, number, header.parts)
        checksum = followed_by(checksum, part_checksum, part.stop - part.start)
    if checksum != header.checksum:
        raise Damaged(f"shard {header.shard} of step {header.id.step} did not arrive completely")
    write_sidecar(path, Sidecar(header.id, header.shard, header.size, header.checksum))
    return Shard(path, header.id, header.shard, header.size, header.checksum)


def committed_shard(path: Path) -> Optional[Shard]:
    """Return the shard as its sidecar describes it, or None if the file has no valid sidecar."""
    sidecar = read_sidecar(path)
    return Shard(path, sidecar.id, sidecar.shard, sidecar.size, sidecar.crc32) if sidecar is not None else None
