"""Amounts in sentences."""

from __future__ import annotations


def amount(number: int, noun: str) -> str:
    """The number and the noun, in the plural unless there is one. `noun`: one that takes an s."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def are(number: int) -> str:
    """The verb for that many."""
    return "is" if number == 1 else "are"
