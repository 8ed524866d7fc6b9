"""crc32 by several threads: one part each, put together as if it were of the whole."""

from __future__ import annotations

import functools
import zlib
from concurrent.futures import ThreadPoolExecutor

LEAST = 4 << 20
"""Bytes of a part: a thread's start costs as much as some of them."""
_POLYNOMIAL = 0xEDB88320
"""The highest bit of a number is the factor of x to the 0 here, as in zlib."""


def crc32(data: memoryview, threads: int) -> int:
    if threads == 1:
        return zlib.crc32(data)
    part = max(LEAST, -(-len(data) // threads))
    parts = [data[begin : begin + part] for begin in range(0, len(data), part)]
    with ThreadPoolExecutor(threads, "checksum") as pool:
        whole = 0
        for value, size in zip(pool.map(zlib.crc32, parts), map(len, parts), strict=True):
            whole = crc32_of_both(whole, value, size)
        return whole


def crc32_of_both(first: int, second: int, size: int) -> int:
    """Of what lies one behind the other, `size`: bytes of the second; as zlib's crc32_combine, which Python has from
    3.15 on."""
    return _product(first, _moved(size)) ^ second


@functools.lru_cache(maxsize=4)
def _moved(size: int) -> int:
    """x to the 8 * size."""
    moved, power = 1 << 31, 1 << 23
    while size:
        if size & 1:
            moved = _product(moved, power)
        power = _product(power, power)
        size >>= 1
    return moved


def _product(one: int, other: int) -> int:
    """Of polynomials, modulo crc32's."""
    product = 0
    for bit in range(31, -1, -1):
        if one >> bit & 1:
            product ^= other
        other = other >> 1 ^ (_POLYNOMIAL if other & 1 else 0)
    return product
