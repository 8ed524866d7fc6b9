"""Helpers for amounts and lists in sentences."""

from __future__ import annotations

from collections.abc import Sequence


def amount(number: int, noun: str) -> str:
    """Return the number followed by the noun, in the plural unless the number is 1.

    Args:
        number: Number of things.
        noun: Noun in the singular whose plural ends in `s`.
    """
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def are(number: int) -> str:
    """Return the verb that agrees with the number: `is` or `are`."""
    return "is" if number == 1 else "are"


def first_of(names: Sequence[str], most: int) -> str:
    """Return the first names and how many more there are: `a, b and 3 more`."""
    suffix = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + suffix
