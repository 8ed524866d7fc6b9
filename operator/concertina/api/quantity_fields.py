"""Amounts of resources in a container, as the CRD keeps them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from concertina_protocol.quantities import parse_quantity


def amounts_of(container: Mapping[str, Any], kind: str) -> Mapping[str, Any]:
    """Its `limits` or `requests`, by resource; none where anything else than a mapping stands there: the CRD keeps the
    resources of a template as they were written."""
    resources = container.get("resources")
    found = resources.get(kind) if isinstance(resources, Mapping) else None
    return found if isinstance(found, Mapping) else {}


def bytes_of(quantity: object) -> int:
    """A quantity in whole bytes, rounded down; 0 where it is absent, negative or not a quantity."""
    try:
        return max(0, int(parse_quantity(quantity)))
    except ValueError:
        return 0
