"""The crc32 of a whole from those of its parts, which threads compute side by side. Python offers zlib's own from 3.15.

A crc32 is a polynomial of degree 31 over bits, its highest bit that of x^0.
"""

from __future__ import annotations

POLYNOMIAL = 0xEDB88320
ONE, BYTE = 1 << 31, 1 << 23
"""x^0 and x^8: bytes that follow multiply what stood before by x^8 each."""


def followed_by(first: int, second: int, length: int) -> int:
    """Of some bytes and `length` more behind them, from the crc32 of each."""
    shift, power = ONE, BYTE
    while length:
        if length & 1:
            shift = _product(shift, power)
        power, length = _product(power, power), length >> 1
    return _product(first, shift) ^ second


def _product(a: int, b: int) -> int:
    found = 0
    for bit in range(31, -1, -1):
        if a >> bit & 1:
            found ^= b
        b = b >> 1 ^ (POLYNOMIAL if b & 1 else 0)
    return found
