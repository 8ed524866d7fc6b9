"""Amounts as Kubernetes writes them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

_UNITS = {"m": -3, "": 0, "k": 3, "M": 6, "G": 9, "T": 12, "P": 15, "E": 18}
_BINARY = {"Ki": 10, "Mi": 20, "Gi": 30, "Ti": 40, "Pi": 50, "Ei": 60}
MOST = 2**63 - 1
"""Kubernetes caps what is more."""


def amounts_of(container: Mapping[str, Any], kind: str) -> Mapping[str, Any]:
    """Its `limits` or `requests`, by resource; none where anything else than a mapping stands there: the CRD keeps the
    resources of a template as they were written."""
    resources = container.get("resources")
    found = resources.get(kind) if isinstance(resources, Mapping) else None
    return found if isinstance(found, Mapping) else {}


def bytes_of(quantity: object) -> int:
    """A quantity as Kubernetes writes it (500M, 1.5Gi, 1e9), rounded down; 0 for none, or for what is not one."""
    match = _QUANTITY.fullmatch(str(quantity or ""))
    if match is None:
        return 0
    number, unit = Decimal(match[1]), match[2]
    return min(int(number * 2 ** _BINARY[unit] if unit in _BINARY else number.scaleb(_UNITS[unit])), MOST)


_QUANTITY = re.compile(r"([0-9]{1,40}(?:\.[0-9]{0,40})?(?:[eE][+-]?[0-9]{1,2})?)(|m|[kMGTPE]|[KMGTPE]i)")
