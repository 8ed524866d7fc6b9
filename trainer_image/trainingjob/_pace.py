"""How many commits lie between two snapshots: so many that they take no more than a small part of the time. Pure."""

from __future__ import annotations

import math

SMOOTH = 0.5
"""Weight of what was measured last."""
LEAP = 2.0
"""Times its usual length that a snapshot counts as at most: one alone may meet a collection of Python's garbage (95 ms
with torch), and would keep those after it away for as long as a hundred usual ones take."""


class Pace:
    """Rank 0's; the others follow what it says."""

    def __init__(self, overhead: float) -> None:
        """`overhead`: part of the time."""
        self._overhead = overhead
        self._stall = self._step = 0.0

    def took(self, stall: float, step: float) -> None:
        """Seconds that a snapshot has kept the loop, and that a step has taken without it."""
        known = self._stall
        self._stall = known + SMOOTH * (min(stall, LEAP * known) - known) if known else stall
        self._step = step if not self._step else self._step + SMOOTH * (step - self._step)

    @property
    def every(self) -> int:
        """Commits from one snapshot to the next; each one until something is measured."""
        if not self._step:
            return 1
        return max(1, math.ceil(self._stall / (self._overhead * self._step)))
