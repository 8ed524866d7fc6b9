"""Functions for numbers and lists in sentences."""

from __future__ import annotations

from collections.abc import Sequence


def amount(number: int, noun: str) -> str:
    """Return a number and a noun. The noun is plural unless the number is 1.

    Args:
        number: Number of things.
        noun: Singular of a noun whose plural ends in `s`.
    """
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def are(number: int) -> str:
    """Return the form of the verb for a number: `is` or `are`."""
    return "is" if number == 1 else "are"


def first_of(names: Sequence[str], most: int) -> str:
    """Return at most `most` names and the number of remaining names, such as `a, b and 3 more`."""
    suffix = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + suffix
