"""Ranges of positions: sorted tuples of ranges [begin, end) that do not touch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Tuple

Ranges = Tuple[Tuple[int, int], ...]
MOST_RANGES = 32
"""Maximum number of ranges of skipped samples, for which a state's header and the status have room."""


def united(*several: Iterable[tuple[int, int]]) -> Ranges:
    """Return the union of the ranges, sorted and joined."""
    joined: list[tuple[int, int]] = []
    for begin, end in sorted((begin, end) for ranges in several for begin, end in ranges if end > begin):
        if joined and begin <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], end))
        else:
            joined.append((begin, end))
    return tuple(joined)


def words(ranges: Ranges) -> str:
    """Return the ranges in words, with inclusive ends: 'samples 7 to 13'."""
    return "samples " + ", ".join(f"{begin} to {end - 1}" for begin, end in ranges)
