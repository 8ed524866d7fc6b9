"""crc32 by several threads: one part each, put together as if it were of the whole."""

from __future__ import annotations

import zlib
from concurrent.futures import ThreadPoolExecutor

from concertina_protocol.checksums import followed_by

LEAST = 4 << 20
"""Bytes of a part: a thread's start costs as much as some of them."""


def crc32(data: memoryview, threads: int) -> int:
    if threads == 1:
        return zlib.crc32(data)
    part = max(LEAST, -(-len(data) // threads))
    parts = [data[begin : begin + part] for begin in range(0, len(data), part)]
    with ThreadPoolExecutor(threads, "checksum") as pool:
        whole = 0
        for value, size in zip(pool.map(zlib.crc32, parts), map(len, parts), strict=True):
            whole = followed_by(whole, value, size)
        return whole
