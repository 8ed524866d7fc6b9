"""Read the resource amounts of a container from a stored pod template, in which they can be invalid."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from concertina_protocol.quantities import parse_quantity


def amounts_of(container: Mapping[str, Any], kind: str) -> Mapping[str, Any]:
    """Return the container's `limits` or `requests`, keyed by resource. The result is empty if the field is invalid.

    The CRD has no types for the resources in a template, so any value may be stored there.
    """
    resources = container.get("resources")
    amounts = resources.get(kind) if isinstance(resources, Mapping) else None
    return amounts if isinstance(amounts, Mapping) else {}


def bytes_of(quantity: object) -> int:
    """Return a Kubernetes quantity in whole bytes, rounded down; 0 if it is absent, negative or invalid."""
    try:
        return max(0, int(parse_quantity(quantity)))
    except ValueError:
        return 0
