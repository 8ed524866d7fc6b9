"""Many names in a sentence."""

from __future__ import annotations

from collections.abc import Sequence


def first_of(names: Sequence[str], most: int) -> str:
    """The first few, and how many there are besides."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
