"""Kubernetes quantities: 500m, 2, 1Gi, 1e3."""

import math
from fractions import Fraction

_SUFFIXES = {"n": Fraction(1, 10**9), "u": Fraction(1, 10**6), "m": Fraction(1, 1000), "": Fraction(1)}
_SUFFIXES |= {suffix: Fraction(1000**power) for power, suffix in enumerate(("k", "M", "G", "T", "P", "E"), start=1)}
_SUFFIXES |= {
    suffix: Fraction(1024**power) for power, suffix in enumerate(("Ki", "Mi", "Gi", "Ti", "Pi", "Ei"), start=1)
}


def parse(text: str) -> Fraction:
    """The exact value of a quantity. Raises ValueError for what is none."""
    for suffix in sorted(_SUFFIXES, key=len, reverse=True):
        if suffix and text.endswith(suffix):
            return Fraction(text[: -len(suffix)]) * _SUFFIXES[suffix]
    return Fraction(text)


def in_units(text: str, divisor: str) -> str:
    """A quantity as a whole number of divisors, rounded up, as the downward API gives it ("0" means 1)."""
    unit = parse(divisor)
    return str(math.ceil(parse(text) / (unit or 1)))
