"""crc32 computed by several threads. Each thread computes the checksum of a part, and the results are combined."""

from __future__ import annotations

import zlib
from concurrent.futures import ThreadPoolExecutor

from concertina_protocol.checksums import followed_by

LEAST = 4 << 20
"""Minimum size of a part in bytes. For a smaller part, starting a thread takes longer than the checksum."""


def crc32(data: memoryview, threads: int) -> int:
    if threads == 1:
        return zlib.crc32(data)
    part = max(LEAST, -(-len(data) // threads))
    parts = [data[begin : begin + part] for begin in range(0, len(data), part)]
    with ThreadPoolExecutor(threads, "checksum") as pool:
        whole = 0
        for value, size in zip(pool.map(zlib.crc32, parts), map(len, parts)):
            whole = followed_by(whole, value, size)
        return whole
