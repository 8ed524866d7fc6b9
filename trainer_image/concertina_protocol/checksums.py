"""Computation of the crc32 of a byte string from the crc32 values of its two parts.

Threads can therefore compute the checksums of parts in parallel. From Python 3.15 on, zlib has a function for this. A
crc32 is a polynomial of degree 31 over bits. Its highest bit is the coefficient of x^0.
"""

from __future__ import annotations

POLYNOMIAL = 0xEDB88320
ONE, BYTE = 1 << 31, 1 << 23
"""The polynomials x^0 and x^8. Appending a byte to a byte string multiplies the string's polynomial by x^8."""


def followed_by(first: int, second: int, length: int) -> int:
    """Return the crc32 of two adjacent byte strings, given the crc32 of each and the length of the second in bytes."""
    shift, power = ONE, BYTE
    while length:
        if length & 1:
            shift = _product(shift, power)
        power, length = _product(power, power), length >> 1
    return _product(first, shift) ^ second


def _product(a: int, b: int) -> int:
    """Return the product of two polynomials, modulo the crc32 polynomial."""
    product = 0
    for bit in range(31, -1, -1):
        if a >> bit & 1:
            product ^= b
        b = b >> 1 ^ (POLYNOMIAL if b & 1 else 0)
    return product
