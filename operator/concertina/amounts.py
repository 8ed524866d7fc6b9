"""Amounts and lists in sentences."""

from __future__ import annotations

from collections.abc import Sequence


def amount(number: int, noun: str) -> str:
    """The number and the noun, in the plural unless there is one. `noun`: one that takes an s."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def are(number: int) -> str:
    """The verb for that many."""
    return "is" if number == 1 else "are"


def first_of(names: Sequence[str], most: int) -> str:
    """Return the first names and how many more there are: `a, b and 3 more`."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
