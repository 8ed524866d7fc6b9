"""Number of steps between two snapshots, chosen so that snapshots take only a small share of the training time.

A snapshot is a copy of the training state in node memory.
"""

from __future__ import annotations

import math

OVERHEAD = 0.01
"""Default for the share of the training time that snapshots may take."""
SMOOTH = 0.5
"""Weight of the newest measurement in the moving average."""
LEAP = 2.0
"""Maximum of a single measurement, as a multiple of the average.

A measurement can include a run of Python's garbage collector (95 ms with torch). Without the maximum, one such
measurement would delay the next snapshot as much as a hundred ordinary snapshots.
"""
FADES = 0.97
"""Factor by which the weight of an earlier comparison decreases with each step.

If snapshots are rare, many steps lie between two comparisons. In that case, the newest comparison has most of the
weight.
"""
ENOUGH = 20
"""Number of comparisons that are needed before their average is used."""
IN_A_ROW = 15
"""Number of snapshots in consecutive steps after which one step goes without a snapshot, for comparison."""


class Pace:
    """Number of steps between two snapshots, computed from the cost of snapshots. Rank 0 decides for all ranks.

    The cost of a snapshot has two parts:
    - The training loop waits for the snapshot.
    - Threads compute the snapshot's checksum and copy it to another replica, which makes the following step slower. If
      enough cores are free, this part is zero. If no core is free, it is several times the first part.

    To measure the second part, each step after a snapshot is compared with the preceding steps without a snapshot.

    A snapshot is a copy of the training state in node memory.
    """

    def __init__(self, overhead: float = OVERHEAD) -> None:
        """Set the share of the training time that snapshots may take, for example 0.01."""
        self._overhead = overhead
        self._stall = self._step = 0.0
        self._plain, self._plain_seconds = 0, 0.0
        """Steps since the last snapshot whose duration no snapshot has affected.

        The first value is the number of these steps, the second one their total seconds.
        """
        self._before: tuple[int, float] | None = None
        """Steps between the last two snapshots whose duration no snapshot has affected.

        The first value is the number of these steps, the second one their mean seconds. The attribute is None after the
        cost of the last snapshot has been computed.
        """
        self._behind_seconds = 0.0
        """Seconds by which the last snapshot has made the following steps slower."""
        self._compared, self._slower, self._in_a_row = 0, 0.0, 0

    def stepped(self, seconds: float, behind_snapshot: bool, committing: bool = False) -> None:
        """Record the duration of a step, from the beginning of one save to the beginning of the next.

        Args:
            seconds: Duration of the step.
            behind_snapshot: Whether the save at the beginning of the step took a snapshot.
            committing: Whether a thread was still committing an earlier snapshot during the step.
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
        """Add the measured cost of the last snapshot to the average cost, if that has not been done yet."""
        if self._before is None:
            return
        plain, self._before = self._before[0], None
        self._compared += 1
        weight = max(1 - FADES ** (plain + 1), 1 / self._compared)
        self._slower += weight * (self._behind_seconds - self._slower)

    def took(self, stall: float) -> None:
        """Record that the training loop has waited `stall` seconds for a snapshot."""
        average = self._stall
        self._stall = average + SMOOTH * (min(stall, LEAP * average) - average) if average else stall

    @property
    def cost(self) -> float:
        """Seconds that a snapshot adds to the training time, or 0 before the first measurement."""
        return max(self._stall, self._slower) if self._compared >= ENOUGH else self._stall

    @property
    def every(self) -> int:
        """Number of steps from one snapshot to the next. Before the first measurement of the cost, it is 1."""
        if not self._step:
            return 1
        fewest = 2 if self._in_a_row >= IN_A_ROW else 1
        return max(fewest, math.ceil(self.cost / (self._overhead * self._step)))

    def share(self, steps: int) -> float:
        """Return the share of the training time that snapshots take if one snapshot is taken in `steps` steps.

        The result is 0 before the first measurement.
        """
        return self.cost / (steps * self._step) if self._step else 0.0
