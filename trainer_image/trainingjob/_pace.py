"""How many commits lie between two snapshots: so many that they take no more than a small part of the time. Pure."""

from __future__ import annotations

import math

SMOOTH = 0.5
"""Weight of what a snapshot took last."""
LEAP = 2.0
"""Times its usual length that a snapshot counts as at most: one alone may meet a collection of Python's garbage (95 ms
with torch), and would keep those after it away for as long as a hundred usual ones take. Likewise a step."""
FADES = 0.97
"""Of what was compared, with each step since: the rarer snapshots are, the more the last one says, and the less it
matters."""
ENOUGH = 20
"""Comparisons before they count."""
IN_A_ROW = 15
"""Snapshots, one with each step: then a step goes without, to compare."""


class Pace:
    """Rank 0's; the others follow what it says.

    A snapshot costs what the loop waits for, and what the threads behind it (its checksum, its copy to a peer) take
    from the step that follows: nothing where there are cores for them, several times as much where there are none. So
    each step with one is compared with those without that came before it."""

    def __init__(self, overhead: float) -> None:
        """`overhead`: part of the time."""
        self._overhead = overhead
        self._stall = self._step = 0.0
        self._plain, self._plain_seconds = 0, 0.0
        """Steps without one since the last snapshot's, and what they took."""
        self._compared, self._slower, self._in_a_row = 0, 0.0, 0

    def stepped(self, seconds: float, behind_snapshot: bool) -> None:
        """From the beginning of one commit, which was a snapshot or not, to that of the next."""
        usual = min(seconds, LEAP * self._step) if self._step else seconds
        self._step += (SMOOTH if self._step else 1.0) * (usual - self._step)
        if not behind_snapshot:
            self._plain, self._plain_seconds, self._in_a_row = self._plain + 1, self._plain_seconds + usual, 0
        elif self._plain:
            slower = usual - self._plain_seconds / self._plain
            self._compared += 1
            weight = max(1 - FADES ** (self._plain + 1), 1 / self._compared)
            self._slower += weight * (slower - self._slower)
            self._plain, self._plain_seconds = 0, 0.0
        else:
            self._in_a_row += 1

    def took(self, stall: float) -> None:
        """Seconds that a snapshot has kept the loop, at least."""
        known = self._stall
        self._stall = known + SMOOTH * (min(stall, LEAP * known) - known) if known else stall

    @property
    def every(self) -> int:
        """Commits from one snapshot to the next; each one until something is measured."""
        if not self._step:
            return 1
        cost = max(self._stall, self._slower) if self._compared >= ENOUGH else self._stall
        fewest = 2 if self._in_a_row >= IN_A_ROW else 1
        return max(fewest, math.ceil(cost / (self._overhead * self._step)))
