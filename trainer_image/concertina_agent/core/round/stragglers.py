"""Stragglers: ranks that the other ranks wait for in every step.

In synchronous training, a step takes the same time on all ranks, so its duration does not show which rank is slow
(decision "Stragglers are found by their own work time"). The ranks differ in the time in which they do not wait in
collectives (`Heartbeat.busy`): a straggler has the longest such time. Because single steps vary, this module sums this
time over several steps. The module compares the sum of a rank with the median of the other ranks, because a median of
all ranks would depend on the straggler itself. The module has no side effects.
"""

from __future__ import annotations

import bisect
import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from typing import Optional

from concertina_protocol import Busy, Heartbeat, Straggler

WINDOW_SECONDS, WINDOW_STEPS = 5.0, 10
"""Minimum duration in seconds, and minimum number of steps, of a window over which work is summed."""
IN_A_ROW = 2
"""Number of consecutive windows in which a rank must be slow to be reported.

After one window in which the rank is not slow, the rank is no longer reported.
"""
LEAST_SHARE = 0.2
"""Minimum share of a step's time that the job must lose to a straggler. Stragglers that cost less are ignored."""


@dataclasses.dataclass(frozen=True)
class Work:
    """Work of one rank within a window of several steps."""

    steps: int
    busy: float
    """Seconds in which the rank did not wait for others, summed over the window."""

    @property
    def per_step(self) -> float:
        return self.busy / self.steps


class Stragglers:
    """Search for stragglers in one round.

    A round is a period in which a fixed set of replicas trains.
    """

    def __init__(self, factor: Optional[float]) -> None:
        """Prepare the search for stragglers. Without a `factor` (None), no rank counts as a straggler."""
        self._factor = factor
        self._begun: dict[int, Heartbeat] = {}
        self._begun_at = 0.0
        self._rows: dict[int, int] = {}
        self.found: tuple[Straggler, ...] = ()

    def check(self, rank_heartbeats: Mapping[int, tuple[str, Heartbeat]], now: float) -> bool:
        """Update the list `found` of stragglers, and return whether the list has changed.

        Args:
            rank_heartbeats: The replica and the heartbeat of each rank, keyed by rank.
            now: Present monotonic time in seconds.
        """
        heartbeats = {rank: heartbeat for rank, (_, heartbeat) in rank_heartbeats.items() if heartbeat.busy > 0}
        if self._factor is None or len(heartbeats) < 2 or len(heartbeats) < len(rank_heartbeats):
            return False
        if self._begun.keys() != heartbeats.keys():
            self._begun, self._begun_at, self._rows = heartbeats, now, {}
            return False
        work = {rank: _work(self._begun[rank], heartbeat) for rank, heartbeat in heartbeats.items()}
        seconds = now - self._begun_at
        if seconds < WINDOW_SECONDS or min(rank_work.steps for rank_work in work.values()) < WINDOW_STEPS:
            return False
        self._begun, self._begun_at = heartbeats, now
        slow = late(work, seconds, self._factor)
        self._rows = {rank: self._rows.get(rank, 0) + 1 for rank in slow}
        return self._name({rank: rank_heartbeats[rank][0] for rank, row in self._rows.items() if row >= IN_A_ROW}, work)

    def _name(self, slow: Mapping[int, str], work: Mapping[int, Work]) -> bool:
        before, named = self.found, {straggler.rank: straggler for straggler in self.found}
        self.found = tuple(named.get(rank) or _straggler(rank, slow[rank], work) for rank in sorted(slow))
        return self.found != before


def late(work: Mapping[int, Work], seconds: float, factor: float) -> list[int]:
    """Return the ranks whose work per step takes at least `factor` times as long as the median of the other ranks.

    A rank is left out if its work exceeds the median by less than LEAST_SHARE of a step's time.

    Args:
        work: Work of each rank in a window of several steps, keyed by rank.
        seconds: Duration of the window.
        factor: Minimum ratio of a straggler's work to the median.
    """
    ordered = sorted(rank_work.per_step for rank_work in work.values())
    return [
        rank
        for rank, rank_work in work.items()
        if rank_work.per_step >= factor * (others_median := _median_of_others(rank_work, ordered))
        and rank_work.per_step - others_median >= LEAST_SHARE * seconds / rank_work.steps
    ]


def _median_of_others(rank_work: Work, ordered: Sequence[float]) -> float:
    """Return the median of the work of all ranks except one.

    `ordered` contains the work of all ranks in ascending order, and `rank_work` is the work of the rank to leave out.
    """
    index = bisect.bisect_left(ordered, rank_work.per_step)
    lower, odd = divmod(len(ordered) - 2, 2)
    pair = (lower, lower + odd)
    return sum(ordered[i if i < index else i + 1] for i in pair) / 2


def _work(begin: Heartbeat, end: Heartbeat) -> Work:
    return Work(end.step - begin.step, end.busy - begin.busy)


def _straggler(rank: int, replica: str, work: Mapping[int, Work]) -> Straggler:
    others_median = _median_of_others(work[rank], sorted(rank_work.per_step for rank_work in work.values()))
    return Straggler(replica, rank, round(work[rank].per_step, 4), round(others_median, 4))


def busy(rank_heartbeats: Mapping[int, tuple[Heartbeat, Heartbeat]]) -> Optional[Busy]:
    """Return a summary of the ranks' seconds of work, up to the last step that all ranks have reported.

    Heartbeats of different replicas arrive at different times. If the ranks were compared at different steps, the last
    step of the rank that reported first would count as time in which the other ranks waited.

    Return None if a rank does not measure its work, or if a rank's heartbeats are all of later steps.

    Args:
        rank_heartbeats: An earlier heartbeat and the last heartbeat of each rank, keyed by rank. Both may be the same.
    """
    if 0 not in rank_heartbeats or min(last.busy for _, last in rank_heartbeats.values()) <= 0:
        return None
    step = min(last.step for _, last in rank_heartbeats.values())
    if any(before.step > step for before, _ in rank_heartbeats.values()):
        return None
    seconds = {rank: _busy_at(step, *heartbeats) for rank, heartbeats in rank_heartbeats.items()}
    return Busy(round(seconds[0], 3), round(statistics.median(seconds.values()), 3), round(max(seconds.values()), 3))


def _busy_at(step: int, before: Heartbeat, last: Heartbeat) -> float:
    """Return a rank's seconds of work up to a step from `before.step` to `last.step`, by linear interpolation."""
    steps = last.step - before.step
    return before.busy + (last.busy - before.busy) * (step - before.step) / steps if steps else last.busy
