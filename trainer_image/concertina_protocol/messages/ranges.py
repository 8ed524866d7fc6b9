"""Sets of positions in the order of the training data, as sorted tuples of half-open ranges [begin, end).

The ranges of a set never touch or overlap. For example, a job stores the samples that it has skipped in this form.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Tuple

Ranges = Tuple[Tuple[int, int], ...]
MOST_RANGES = 32
"""Maximum number of ranges of skipped samples. A state's header and the job's status have space for no more."""


def united(*several: Iterable[tuple[int, int]]) -> Ranges:
    """Return the union of several sets of ranges."""
    joined: list[tuple[int, int]] = []
    for begin, end in sorted((begin, end) for ranges in several for begin, end in ranges if end > begin):
        if joined and begin <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], end))
        else:
            joined.append((begin, end))
    return tuple(joined)


def words(ranges: Ranges) -> str:
    """Return the ranges in words. The ends are inclusive: 'samples 7 to 13'."""
    return "samples " + ", ".join(f"{begin} to {end - 1}" for begin, end in ranges)
