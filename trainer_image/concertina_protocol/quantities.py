"""Quantities of Kubernetes, such as 500m, 2, 1.5Gi or 1e3."""

from __future__ import annotations

import decimal
import re
from decimal import Decimal

MOST = 2**63 - 1
"""Largest quantity. Kubernetes replaces larger ones by this value, and so does `parse_quantity`."""
_UNITS = {
    **{suffix: Decimal(10) ** power for suffix, power in (("n", -9), ("u", -6), ("m", -3), ("", 0))},
    **{suffix: Decimal(1000) ** power for power, suffix in enumerate("kMGTPE", start=1)},
    **{f"{suffix}i": Decimal(1024) ** power for power, suffix in enumerate("KMGTPE", start=1)},
}
_QUANTITY = re.compile(
    r"(?P<number>[+-]?(?:[0-9]{1,40}(?:\.[0-9]{0,40})?|\.[0-9]{1,40}))"
    r"(?:(?P<exponent>[eE][+-]?[0-9]{1,2})|(?P<unit>[numkMGTPE]|[KMGTPE]i)?)"
)
_EXACT = decimal.Context(prec=200)
"""Decimal context whose precision suffices for the longest accepted number times the largest unit."""


def parse_quantity(quantity: object) -> Decimal:
    """Return the exact value of a quantity. Values above MOST become MOST, as in Kubernetes.

    Raises:
        ValueError: If the text is not a quantity.
    """
    match = _QUANTITY.fullmatch(str(quantity))
    if match is None:
        raise ValueError(f"not a quantity: {str(quantity)[:80]!r}")
    number = Decimal(match["number"] + (match["exponent"] or ""))
    value = _EXACT.multiply(number, _UNITS[match["unit"] or ""])
    return max(Decimal(-MOST), min(value, Decimal(MOST)))
