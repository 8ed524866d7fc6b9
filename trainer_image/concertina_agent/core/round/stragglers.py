"""Stragglers: who the others wait for, step after step. Pure.

Synchronous steps take the same time on all ranks, so that says nothing (decision "Stragglers by own work"). What each
rank does in a step apart from waiting in collectives (`Heartbeat.busy`) does: the straggler's takes longer. It is
compared over windows, as single steps vary, and with the median of the others, as one of two ranks would otherwise half
hide itself."""

from __future__ import annotations

import bisect
import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from typing import Optional

from concertina_protocol import Busy, Heartbeat, Straggler

WINDOW_SECONDS, WINDOW_STEPS = 5.0, 10
"""A window lasts both."""
IN_A_ROW = 2
"""Windows after which it is named; one without it clears it."""
LEAST_SHARE = 0.2
"""Of the step, that would be saved without it: below, nobody need care how its work compares with the others'."""


@dataclasses.dataclass(frozen=True)
class Work:
    """Of one rank in a window."""

    steps: int
    busy: float
    """Seconds."""

    @property
    def per_step(self) -> float:
        return self.busy / self.steps


class Stragglers:
    def __init__(self, factor: Optional[float]) -> None:
        """`factor` None: none is looked for."""
        self._factor = factor
        self._begun: dict[int, Heartbeat] = {}
        self._begun_at = 0.0
        self._rows: dict[int, int] = {}
        self.found: tuple[Straggler, ...] = ()

    def check(self, places: Mapping[int, tuple[str, Heartbeat]], now: float) -> bool:
        """`places`: rank to replica and heartbeat. Whether `found` has changed."""
        heartbeats = {rank: heartbeat for rank, (_, heartbeat) in places.items() if heartbeat.busy > 0}
        if self._factor is None or len(heartbeats) < 2 or len(heartbeats) < len(places):
            return False
        if self._begun.keys() != heartbeats.keys():
            self._begun, self._begun_at, self._rows = heartbeats, now, {}
            return False
        work = {rank: _work(self._begun[rank], heartbeat) for rank, heartbeat in heartbeats.items()}
        seconds = now - self._begun_at
        if seconds < WINDOW_SECONDS or min(one.steps for one in work.values()) < WINDOW_STEPS:
            return False
        self._begun, self._begun_at = heartbeats, now
        slow = late(work, seconds, self._factor)
        self._rows = {rank: self._rows.get(rank, 0) + 1 for rank in slow}
        return self._name({rank: places[rank][0] for rank, row in self._rows.items() if row >= IN_A_ROW}, work)

    def _name(self, slow: Mapping[int, str], work: Mapping[int, Work]) -> bool:
        before, known = self.found, {straggler.rank: straggler for straggler in self.found}
        self.found = tuple(known.get(rank) or _straggler(rank, slow[rank], work) for rank in sorted(slow))
        return self.found != before


def late(work: Mapping[int, Work], seconds: float, factor: float) -> list[int]:
    """Ranks whose work takes `factor` times that of the others, and a share of the step that is worth a word."""
    ordered = sorted(one.per_step for one in work.values())
    return [
        rank
        for rank, one in work.items()
        if one.per_step >= factor * (others := _others(one, ordered))
        and one.per_step - others >= LEAST_SHARE * seconds / one.steps
    ]


def _others(one: Work, ordered: Sequence[float]) -> float:
    """The median of the others' work; `ordered`: everybody's."""
    place = bisect.bisect_left(ordered, one.per_step)
    lower, odd = divmod(len(ordered) - 2, 2)
    pair = (lower, lower + odd)
    return sum(ordered[i if i < place else i + 1] for i in pair) / 2


def _work(begin: Heartbeat, end: Heartbeat) -> Work:
    return Work(end.step - begin.step, end.busy - begin.busy)


def _straggler(rank: int, replica: str, work: Mapping[int, Work]) -> Straggler:
    others = _others(work[rank], sorted(one.per_step for one in work.values()))
    return Straggler(replica, rank, round(work[rank].per_step, 4), round(others, 4))


def busy(seconds: Mapping[int, float]) -> Optional[Busy]:
    """By rank, seconds of own work; None where some rank measures none."""
    if 0 not in seconds or min(seconds.values()) <= 0:
        return None
    return Busy(round(seconds[0], 3), round(statistics.median(seconds.values()), 3), round(max(seconds.values()), 3))
