"""Amounts as Kubernetes writes them."""

from __future__ import annotations

import re
from decimal import Decimal

_UNITS = {"m": -3, "": 0, "k": 3, "M": 6, "G": 9, "T": 12, "P": 15, "E": 18}
_BINARY = {"Ki": 10, "Mi": 20, "Gi": 30, "Ti": 40, "Pi": 50, "Ei": 60}


def bytes_of(quantity: object) -> int:
    """A quantity as Kubernetes writes it (500M, 1.5Gi, 1e9), rounded down; 0 for none, or for what is not one."""
    match = _QUANTITY.fullmatch(str(quantity or ""))
    if match is None:
        return 0
    number, unit = Decimal(match[1]), match[2]
    return int(number * 2 ** _BINARY[unit] if unit in _BINARY else number.scaleb(_UNITS[unit]))


_QUANTITY = re.compile(r"(\d+(?:\.\d*)?(?:[eE][+-]?\d{1,2})?)(|m|[kMGTPE]|[KMGTPE]i)")
