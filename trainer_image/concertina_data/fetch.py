"""Transfer of an object from a store by concurrent requests, each for one piece of the object."""

from __future__ import annotations

import concurrent.futures
import functools
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Optional

from concertina_data.threads import Threads, one_per_process
from concertina_protocol.checksums import followed_by
from concertina_state.objects.prefix import ObjectPart

PIECE = 8 << 20
"""Size in bytes of the pieces. A piece is in memory until it is written."""
MOST_REQUESTS = 8
"""Maximum number of pieces that a process requests at the same time, for all of its data sets together."""
GetPart = Callable[[tuple[int, int]], Optional[ObjectPart]]
"""Function that requests the bytes [begin, end) of an object. Threads call it at the same time."""
Put = Callable[[int, memoryview], None]
"""Function that writes bytes at an offset. Threads call it at the same time, for different pieces."""


@dataclass(frozen=True)
class Transfer:
    """Result of a transfer by `fetch`."""

    size: int
    """Size of the object in bytes, or the number of bytes that arrived if fewer arrived."""
    crc32: Optional[int]
    """crc32 of the bytes that were written, or None if they are not the whole object."""


@dataclass(frozen=True)
class _Piece:
    object_size: int
    """Size of the whole object in bytes."""
    size: int
    """Number of bytes that arrived."""
    crc32: Optional[int]
    """crc32 of the written bytes, or None if nothing was written.

    Nothing is written unless exactly the requested bytes of an object of the expected size arrive.
    """


def requesters() -> Threads:
    """Return the threads that send the requests of this process."""
    return _requesters(MOST_REQUESTS)


_requesters = one_per_process(Threads)


def fetch(get_part: GetPart, size: int, put: Put, threads: Threads) -> Optional[Transfer]:
    """Fetch an object that should have `size` bytes, and write it with `put`. Return None if it does not exist.

    Each thread computes the checksum of a piece and writes the piece as soon as it has arrived. No thread writes after
    this function has returned or raised an error.

    Raises:
        Exception: When `get_part` or `put` raises it.
    """
    work = functools.partial(_fetch_piece, get_part, size, put)
    futures = [threads.submit(functools.partial(work, begin)) for begin in range(0, max(1, size), PIECE)]
    try:
        pieces = [future.result() for future in futures]
    finally:
        concurrent.futures.wait([future for future in futures if not future.cancel()])
    crc = 0
    for piece in pieces:
        if piece is None:
            return None
        if piece.crc32 is None:
            arrived = sum(other.size for other in pieces if other is not None)
            return Transfer(arrived if piece.object_size == size else piece.object_size, None)
        crc = followed_by(crc, piece.crc32, piece.size)
    return Transfer(size, crc)


def _fetch_piece(get_part: GetPart, size: int, put: Put, begin: int) -> Optional[_Piece]:
    """Fetch and write the piece that begins at `begin`. Return None if the object does not exist.

    The request ends at the expected size of the object, because a wrong object can be larger than the memory.
    """
    end = min(size, begin + PIECE)
    part = get_part((begin, max(end, begin + 1)))
    if part is None:
        return None
    if part.object_size != size or len(part.data) != end - begin:
        return _Piece(part.object_size, len(part.data), None)
    put(begin, part.data)
    return _Piece(size, len(part.data), zlib.crc32(part.data))
