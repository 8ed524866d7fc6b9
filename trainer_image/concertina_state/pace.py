"""Number of steps between two snapshots, such that snapshots take only a small share of the training time. Pure."""

from __future__ import annotations

import math

OVERHEAD = 0.01
"""Default share of the training time that snapshots may take."""
SMOOTH = 0.5
"""Weight of the newest measurement."""
LEAP = 2.0
"""Limit of one measurement, as a multiple of the average.

A single measurement can coincide with a collection of Python's garbage (95 ms with torch), which would prevent
snapshots for as long as a hundred usual ones take.
"""
FADES = 0.97
"""Weight that a comparison keeps with each further step. The rarer snapshots are, the more the last one counts."""
ENOUGH = 20
"""Number of comparisons that are needed before they count."""
IN_A_ROW = 15
"""Number of snapshots in consecutive steps after which one step goes without a snapshot, for comparison."""


class Pace:
    """Number of steps between two snapshots, from what they cost. Rank 0 decides; the other ranks follow.

    The cost of a snapshot has two parts: the time that the loop waits for it, and the time that the threads behind it
    (its checksum, its copy to a peer) take from the following step. The second part is zero if there are free cores for
    them, and several times the first if there are none. So each step with a snapshot is compared with the steps without
    one before it.
    """

    def __init__(self, overhead: float = OVERHEAD) -> None:
        """Set the share of the training time that snapshots may take."""
        self._overhead = overhead
        self._stall = self._step = 0.0
        self._plain, self._plain_seconds = 0, 0.0
        """Number of steps since the last snapshot that no snapshot slowed down, and the seconds that they took."""
        self._before: tuple[int, float] | None = None
        """Number and mean seconds of the plain steps before the last snapshot, until all steps behind it are known."""
        self._behind_seconds = 0.0
        """Seconds by which these steps are slower."""
        self._compared, self._slower, self._in_a_row = 0, 0.0, 0

    def stepped(self, seconds: float, behind_snapshot: bool, committing: bool = False) -> None:
        """Record the time from the beginning of one commit to the beginning of the next.

        Args:
            seconds: The time.
            behind_snapshot: Whether the first of the two commits took a snapshot.
            committing: Whether the snapshot before it was still being committed, beside this step.
        """
        usual = min(seconds, LEAP * self._step) if self._step else seconds
        self._step += (SMOOTH if self._step else 1.0) * (usual - self._step)
        if committing and not behind_snapshot:
            self._in_a_row = 0
            if self._before is not None:
                self._behind_seconds += usual - self._before[1]
            return
        self._compare()
        if not behind_snapshot:
            self._plain, self._plain_seconds, self._in_a_row = self._plain + 1, self._plain_seconds + usual, 0
        elif self._plain:
            self._before = self._plain, self._plain_seconds / self._plain
            self._behind_seconds = usual - self._before[1]
            self._plain, self._plain_seconds = 0, 0.0
        else:
            self._in_a_row += 1

    def _compare(self) -> None:
        """Take the steps behind the last snapshot into the average, once all of them are known."""
        if self._before is None:
            return
        plain, self._before = self._before[0], None
        self._compared += 1
        weight = max(1 - FADES ** (plain + 1), 1 / self._compared)
        self._slower += weight * (self._behind_seconds - self._slower)

    def took(self, stall: float) -> None:
        """Record the seconds that the loop waited for a snapshot."""
        average = self._stall
        self._stall = average + SMOOTH * (min(stall, LEAP * average) - average) if average else stall

    @property
    def cost(self) -> float:
        """Seconds that a snapshot adds to the training time; 0 until something is measured."""
        return max(self._stall, self._slower) if self._compared >= ENOUGH else self._stall

    @property
    def every(self) -> int:
        """Steps from one snapshot to the next; 1 until something is measured."""
        if not self._step:
            return 1
        fewest = 2 if self._in_a_row >= IN_A_ROW else 1
        return max(fewest, math.ceil(self.cost / (self._overhead * self._step)))

    def share(self, steps: int) -> float:
        """Return the share of the training time that one snapshot in `steps` steps takes; 0 until it is known."""
        return self.cost / (steps * self._step) if self._step else 0.0
