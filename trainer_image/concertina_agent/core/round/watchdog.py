"""What the coordinator sees of all workers: whether the round stands still, and who is behind. Pure.

Nothing here compares clocks of different machines: what is sent are ages, and each side counts on with its own clock
(decision "The coordinator finds a hang, the operator acts on it").
"""

from __future__ import annotations

import collections
import dataclasses
import math
import statistics
from collections.abc import Iterable, Mapping
from typing import Deque, Optional

from concertina_agent.core.round.stragglers import Stragglers, busy
from concertina_protocol import Busy, Hang, Heartbeat, Limits
from concertina_protocol.heartbeat import WorkerPhase

STEP_PHASES = tuple(phase for phase in WorkerPhase if phase not in (WorkerPhase.TRAINING, WorkerPhase.COMPILING))
"""In the order in which a worker goes through them. Any other, also one that is not known here, counts as computing."""
LASTING: Mapping[str, float] = {
    WorkerPhase.STARTING: 900.0,
    WorkerPhase.RESTORING: 1800.0,
    WorkerPhase.COMPILING: 1800.0,
    WorkerPhase.CHECKPOINTING: 1800.0,
    WorkerPhase.EVALUATING: 7200.0,
}
"""Seconds that these may take, where the limit of a step is less."""
FIRST_STEP = 900.0
"""The same for a round's first step, which may compile and warm up."""
LEAST, TIMES = 60.0, 20.0
"""What is not told otherwise hangs after so many seconds, and so many times the usual step."""
STOPPED_SECONDS = 0.5
"""How long a stopped worker that tells where it is has stood still."""
STACKS_SECONDS = 3.0
"""How long the stacks of all workers are waited for."""
COLLECTIVE = ("torch/distributed/", "torch/_ops.py", "deepspeed/comm", "megatron/core/parallel_state")
"""Code in which a rank waits for others."""
INNERMOST = 4
BUSY_SECONDS = 2.0
"""How often it is worked out how busy all ranks were."""


class Heartbeats:
    """What is known of the own workers: where each is, and for how long."""

    def __init__(self) -> None:
        self.heartbeats: tuple[Heartbeat, ...] = ()
        """Of the workers that run, as of the last look; phase "" where a worker tells nothing of itself."""
        self._beats: dict[int, tuple[int, str, float]] = {}
        self._stopped: frozenset[tuple[int, int]] = frozenset()
        self._stacks: dict[int, tuple[str, ...]] = {}
        self.collecting = False
        """Stacks were asked for, or are there, since the round was last said to hang."""

    def on_beat(self, rank: int, step: int, phase: str, now: float) -> None:
        """A line on the worker channel; where there is a heartbeat as well, that knows more. Who waits for data says so
        again and again, and lives each time that it does."""
        if phase == WorkerPhase.LOADING_DATA or self._beats.get(rank, (None, ""))[:2] != (step, phase):
            self._beats[rank] = (step, phase, now)

    def update(self, read: Iterable[Heartbeat], running: Iterable[int], now: float) -> None:
        known = {heartbeat.rank: heartbeat for heartbeat in read}
        for rank, (step, phase, since) in self._beats.items():
            known.setdefault(rank, Heartbeat(rank, step, phase, now - since))
        unknown = (Heartbeat(rank, -1, "", 0.0) for rank in running if rank not in known)
        heartbeats = [*(known[rank] for rank in running if rank in known), *unknown]
        self.heartbeats = tuple(dataclasses.replace(p, stack=self._stacks.get(p.rank)) for p in heartbeats)

    def stopped(self, ranks: Iterable[tuple[int, int]]) -> frozenset[int]:
        """Those that were stopped (SIGSTOP) at the last look, are still, and have neither computed nor moved in
        between: one that is stopped for moments, again and again, is slow (decision "A worker stopped for moments is
        slow"). Ranks come with the CPU time used."""
        moved = {
            heartbeat.rank for heartbeat in self.heartbeats if heartbeat.phase and heartbeat.still < STOPPED_SECONDS
        }
        before, self._stopped = self._stopped, frozenset(ranks)
        return frozenset(rank for rank, _ in before & self._stopped) - moved

    def hung(self, hung: bool) -> bool:
        """The coordinator says whether the round hangs; true where stacks are to be collected now."""
        begin, self.collecting = hung and not self.collecting, hung
        if not hung:
            self._stacks = {}
        return begin

    def collected(self, stacks: Mapping[int, tuple[str, ...]]) -> None:
        if self.collecting:
            self._stacks = dict(stacks)
            self.heartbeats = tuple(dataclasses.replace(p, stack=self._stacks.get(p.rank, ())) for p in self.heartbeats)


@dataclasses.dataclass(frozen=True)
class RankHeartbeat:
    """One rank as the coordinator knows it."""

    replica: str
    heartbeat: Heartbeat
    moved_at: float
    """By the coordinator's clock."""


class Watchdog:
    """The coordinator's: looks at all ranks of the round."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._places: dict[int, RankHeartbeat] = {}
        self._ranks: dict[str, tuple[int, ...]] = {}
        """That each replica spoke of last."""
        self._steps: Deque[float] = collections.deque(maxlen=32)
        self._hung_at: Optional[float] = None
        self.hang: Optional[Hang] = None
        self.stragglers = Stragglers(limits.straggler_factor)
        self.busy: Optional[Busy] = None
        """As of the last look, BUSY_SECONDS ago at most."""
        self._busy_at = -math.inf

    @property
    def hung(self) -> bool:
        """No rank has moved for too long; `hang` follows when the stacks are there."""
        return self._hung_at is not None

    def on_heartbeats(self, replica: str, heartbeats: tuple[Heartbeat, ...], now: float) -> None:
        for rank in self._ranks.get(replica, ()):
            if rank in self._places and self._places[rank].replica == replica:
                del self._places[rank]
        self._ranks[replica] = tuple(heartbeat.rank for heartbeat in heartbeats)
        for heartbeat in heartbeats:
            self._places[heartbeat.rank] = RankHeartbeat(replica, heartbeat, now - heartbeat.still)

    def step_took(self, seconds: float) -> None:
        if seconds > 0:
            self._steps.append(seconds)

    def check(self, now: float) -> bool:
        """Whether there is news of a hang or a straggler."""
        places = {rank: (place.replica, place.heartbeat) for rank, place in self._places.items()}
        if now >= self._busy_at + BUSY_SECONDS:
            self._busy_at, self.busy = now, busy({rank: heartbeat.busy for rank, (_, heartbeat) in places.items()})
        return self._hangs(now) | self.stragglers.check(places, now)

    def _hangs(self, now: float) -> bool:
        before = self.hang
        known = [place for place in self._places.values() if place.heartbeat.phase]
        still = now - max((place.moved_at for place in known), default=now)
        last = min(known, key=lambda place: position(place.heartbeat), default=None)
        if last is None or still < limit(self._limits, self._steps, last.heartbeat.phase):
            self._hung_at = self.hang = None
        elif self._hung_at is None:
            self._hung_at = now
        elif self.hang is None and (self._all_stacks() or now >= self._hung_at + STACKS_SECONDS):
            self.hang = self._named(still)
        return self.hang != before

    def _all_stacks(self) -> bool:
        return all(place.heartbeat.stack is not None for place in self._places.values())

    def _named(self, still: float) -> Hang:
        found = suspects([place.heartbeat for place in self._places.values()])
        others = [place.heartbeat for place in self._places.values() if place.heartbeat not in found]
        if not others and len(found) > 1:
            return Hang("", None, found[0].step, _usual_phase(found), "", round(still, 1), len(found), _stack(found[0]))
        first = found[0]
        replica = self._places[first.rank].replica
        return Hang(
            replica,
            first.rank,
            first.step,
            first.phase,
            _usual_phase(others),
            round(still, 1),
            len(found),
            _stack(first),
        )


def limit(limits: Limits, steps: Iterable[float], phase: str) -> float:
    """Seconds without movement that are too many, where the rank that is behind is in this phase."""
    known = list(steps)
    usual = limits.hang_seconds or max(LEAST, TIMES * statistics.median(known) if known else FIRST_STEP)
    first = 0.0 if known else FIRST_STEP
    return max(usual, LASTING.get(phase, first))


def position(heartbeat: Heartbeat) -> tuple[int, int]:
    """How far a rank is: steps finished, and the part of the next."""
    phase = heartbeat.phase if heartbeat.phase in STEP_PHASES else WorkerPhase.COMPUTING
    return heartbeat.step, STEP_PHASES.index(phase)


def suspects(heartbeats: Iterable[Heartbeat]) -> list[Heartbeat]:
    """Who is behind: the rest wait for them (decision "A heartbeat file instead of lines"). Of several at the same
    place, those that do not wait in a collective; all of them where that tells nothing."""
    everyone = sorted(heartbeats, key=lambda heartbeat: heartbeat.rank)
    known = [heartbeat for heartbeat in everyone if heartbeat.phase]
    last = min(map(position, known))
    behind = [heartbeat for heartbeat in known if position(heartbeat) == last]
    if len(behind) == len(known):
        behind = everyone
    awake = [heartbeat for heartbeat in behind if heartbeat.stack and not waits(heartbeat.stack)]
    return awake or behind


def waits(stack: Iterable[str]) -> bool:
    """Whether the innermost frames of the main thread are a collective's."""
    lines = list(stack)
    begin = next((i for i, line in enumerate(lines) if line.startswith(("Current thread", "Thread"))), -1)
    current = next((i for i, line in enumerate(lines) if "Current thread" in line or "MainThread" in line), begin)
    return any(part in line for line in lines[current + 1 : current + 1 + INNERMOST] for part in COLLECTIVE)


def _usual_phase(heartbeats: list[Heartbeat]) -> str:
    """What most of them do."""
    counted = collections.Counter(heartbeat.phase for heartbeat in heartbeats if heartbeat.phase)
    return counted.most_common(1)[0][0] if counted else ""


def _stack(heartbeat: Heartbeat) -> tuple[str, ...]:
    return heartbeat.stack or ()
