"""Observation of all workers by the coordinator: whether the round hangs, and which ranks are behind.

The module compares no clocks of different machines: agents send ages, and each side adds the time of its own clock
(decision "The coordinator finds a hang, the operator acts on it"). The module has no side effects.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import statistics
from collections.abc import Iterable, Mapping
from typing import Deque, Optional

from concertina_agent.core.events import StepCount
from concertina_agent.core.round.stragglers import Stragglers, busy
from concertina_protocol import Busy, Hang, Heartbeat, Limits
from concertina_protocol.heartbeat import WorkerPhase

STEP_PHASES = tuple(
    phase
    for phase in WorkerPhase
    if phase not in (WorkerPhase.TRAINING, WorkerPhase.COMPILING, WorkerPhase.BETWEEN_STEPS)
)
"""Phases in the order in which a worker passes them. Any other phase, including unknown ones, counts as computing."""
LASTING: Mapping[str, float] = {
    WorkerPhase.STARTING: 900.0,
    WorkerPhase.RESTORING: 1800.0,
    WorkerPhase.COMPILING: 1800.0,
    WorkerPhase.CHECKPOINTING: 1800.0,
    WorkerPhase.EVALUATING: 7200.0,
}
"""Seconds that these phases may take, if the limit of a step is lower."""
UNSEEN = 7200.0
"""Default limit between two optimizer steps of a script that does not report: it may evaluate, save or compile then."""
FIRST_STEP = 900.0
"""Seconds that a round's first step may take, which may compile and warm up."""
LEAST, TIMES = 60.0, 20.0
"""Default limit of a step: at least this many seconds, and this many times the usual duration of a step."""
STOPPED_SECONDS = 0.5
"""Seconds without progress after which a stopped worker that writes heartbeats counts as stopped."""
STACKS_SECONDS = 3.0
"""Seconds to wait for the stacks of all workers."""
COLLECTIVE = ("torch/distributed/", "torch/_ops.py", "deepspeed/comm", "megatron/core/parallel_state")
"""Code in which a rank waits for others."""
INNERMOST = 4
BUSY_SECONDS = 2.0
"""Interval in seconds at which the ranks' own work is summarized."""


class Heartbeats:
    """Phases of the own workers, and their ages."""

    def __init__(self) -> None:
        self.heartbeats: tuple[Heartbeat, ...] = ()
        """Heartbeats of the running workers as of the last look; the phase is "" if a worker reports nothing."""
        self._beats: dict[int, tuple[int, str, float]] = {}
        self._stopped: frozenset[tuple[int, int]] = frozenset()
        self._stacks: dict[int, tuple[str, ...]] = {}
        self.collecting = False
        """Whether stacks were requested, or are there, since the round was last reported to hang."""

    def on_beat(self, rank: int, step: int, phase: str, now: float) -> None:
        """Record a line on the worker channel; a heartbeat file, if there is one, is more precise.

        A worker that waits for data repeats its line, and each line counts as progress.
        """
        if phase == WorkerPhase.LOADING_DATA or self._beats.get(rank, (None, ""))[:2] != (step, phase):
            self._beats[rank] = (step, phase, now)

    def update(
        self, read: Iterable[Heartbeat], running: Iterable[int], now: float, counts: Iterable[StepCount] = ()
    ) -> None:
        """Record the phases of the running workers. A worker's own reports have precedence over its counted steps."""
        by_rank = {heartbeat.rank: heartbeat for heartbeat in read}
        for rank, (step, phase, since) in self._beats.items():
            by_rank.setdefault(rank, Heartbeat(rank, step, phase, now - since))
        for count in counts:
            heartbeat = Heartbeat(count.rank, count.steps, WorkerPhase.BETWEEN_STEPS, count.still)
            by_rank.setdefault(count.rank, heartbeat)
        unknown = (Heartbeat(rank, -1, "", 0.0) for rank in running if rank not in by_rank)
        heartbeats = [*(by_rank[rank] for rank in running if rank in by_rank), *unknown]
        self.heartbeats = tuple(dataclasses.replace(p, stack=self._stacks.get(p.rank)) for p in heartbeats)

    def stopped(self, ranks: Iterable[tuple[int, int]]) -> frozenset[int]:
        """Return the ranks that were stopped (SIGSTOP) at the last look and still are, without progress in between.

        A rank without progress has neither computed nor moved.


        A worker that is stopped repeatedly for moments is only slow (decision "A worker stopped for moments is slow").
        `ranks` contains each rank with the CPU time that it has used.
        """
        moved = {
            heartbeat.rank for heartbeat in self.heartbeats if heartbeat.phase and heartbeat.still < STOPPED_SECONDS
        }
        before, self._stopped = self._stopped, frozenset(ranks)
        return frozenset(rank for rank, _ in before & self._stopped) - moved

    def hung(self, hung: bool) -> bool:
        """Record whether the round hangs, as the coordinator says; return whether stacks must be collected now."""
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
    """State of one rank as the coordinator knows it."""

    replica: str
    heartbeat: Heartbeat
    moved_at: float
    """Time of the last progress on the coordinator's clock."""


class Watchdog:
    """Observer of all ranks of the round, on the coordinator."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._rank_heartbeats: dict[int, RankHeartbeat] = {}
        self._ranks: dict[str, tuple[int, ...]] = {}
        """Ranks in the last line of each replica."""
        self._steps: Deque[float] = collections.deque(maxlen=32)
        self._hung_at: Optional[float] = None
        self.hang: Optional[Hang] = None
        self.stragglers = Stragglers(limits.straggler_factor)
        self.busy: Optional[Busy] = None
        """Own work of the ranks as of the last summary, at most BUSY_SECONDS ago."""
        self._busy_at = -math.inf

    @property
    def hung(self) -> bool:
        """Whether no rank has made progress for too long; `hang` follows when the stacks are there."""
        return self._hung_at is not None

    def on_heartbeats(self, replica: str, heartbeats: tuple[Heartbeat, ...], now: float) -> None:
        for rank in self._ranks.get(replica, ()):
            if rank in self._rank_heartbeats and self._rank_heartbeats[rank].replica == replica:
                del self._rank_heartbeats[rank]
        self._ranks[replica] = tuple(heartbeat.rank for heartbeat in heartbeats)
        for heartbeat in heartbeats:
            self._rank_heartbeats[heartbeat.rank] = RankHeartbeat(replica, heartbeat, now - heartbeat.still)

    def step_took(self, seconds: float) -> None:
        if seconds > 0:
            self._steps.append(seconds)

    def check(self, now: float) -> bool:
        """Return whether there is news of a hang or a straggler."""
        rank_heartbeats = {
            rank: (rank_heartbeat.replica, rank_heartbeat.heartbeat)
            for rank, rank_heartbeat in self._rank_heartbeats.items()
        }
        if now >= self._busy_at + BUSY_SECONDS:
            self._busy_at, self.busy = (
                now,
                busy({rank: heartbeat.busy for rank, (_, heartbeat) in rank_heartbeats.items()}),
            )
        return self._hangs(now) | self.stragglers.check(rank_heartbeats, now)

    def _hangs(self, now: float) -> bool:
        before = self.hang
        reporting = [
            rank_heartbeat for rank_heartbeat in self._rank_heartbeats.values() if rank_heartbeat.heartbeat.phase
        ]
        still = now - max((rank_heartbeat.moved_at for rank_heartbeat in reporting), default=now)
        last = min(reporting, key=lambda rank_heartbeat: position(rank_heartbeat.heartbeat), default=None)
        if last is None or still < limit(self._limits, self._steps, last.heartbeat.phase):
            self._hung_at = self.hang = None
        elif self._hung_at is None:
            self._hung_at = now
        elif self.hang is None and (self._all_stacks() or now >= self._hung_at + STACKS_SECONDS):
            self.hang = self._named(still)
        return self.hang != before

    def _all_stacks(self) -> bool:
        return all(rank_heartbeat.heartbeat.stack is not None for rank_heartbeat in self._rank_heartbeats.values())

    def _named(self, still: float) -> Hang:
        suspected = suspects([rank_heartbeat.heartbeat for rank_heartbeat in self._rank_heartbeats.values()])
        other_heartbeats = [
            rank_heartbeat.heartbeat
            for rank_heartbeat in self._rank_heartbeats.values()
            if rank_heartbeat.heartbeat not in suspected
        ]
        if not other_heartbeats and len(suspected) > 1:
            return Hang(
                "",
                None,
                suspected[0].step,
                _usual_phase(suspected),
                "",
                round(still, 1),
                len(suspected),
                _stack(suspected[0]),
            )
        first = suspected[0]
        replica = self._rank_heartbeats[first.rank].replica
        return Hang(
            replica,
            first.rank,
            first.step,
            first.phase,
            _usual_phase(other_heartbeats),
            round(still, 1),
            len(suspected),
            _stack(first),
        )


def limit(limits: Limits, steps: Iterable[float], phase: str) -> float:
    """Return the seconds without progress from which the round hangs, if the rank that is behind is in this phase."""
    durations = list(steps)
    if phase == WorkerPhase.BETWEEN_STEPS:
        return limits.hang_seconds or max(UNSEEN, TIMES * statistics.median(durations) if durations else 0.0)
    usual = limits.hang_seconds or max(LEAST, TIMES * statistics.median(durations) if durations else FIRST_STEP)
    first = 0.0 if durations else FIRST_STEP
    return max(usual, LASTING.get(phase, first))


def position(heartbeat: Heartbeat) -> tuple[int, int]:
    """Return how far a rank is: the number of finished steps, and the part of the next one."""
    phase = heartbeat.phase if heartbeat.phase in STEP_PHASES else WorkerPhase.COMPUTING
    return heartbeat.step, STEP_PHASES.index(phase)


def suspects(heartbeats: Iterable[Heartbeat]) -> list[Heartbeat]:
    """Return the ranks that are behind, for which the other ranks wait.

    See decision "A heartbeat file instead of lines". If several ranks are at the same position, those that do not wait
    in a collective are returned, or all of them if the stacks do not distinguish them.
    """
    everyone = sorted(heartbeats, key=lambda heartbeat: heartbeat.rank)
    reporting = [heartbeat for heartbeat in everyone if heartbeat.phase]
    last = min(map(position, reporting))
    behind = [heartbeat for heartbeat in reporting if position(heartbeat) == last]
    if len(behind) == len(reporting):
        behind = everyone
    awake = [heartbeat for heartbeat in behind if heartbeat.stack and not waits(heartbeat.stack)]
    return awake or behind


def waits(stack: Iterable[str]) -> bool:
    """Return whether the innermost frames of the main thread belong to a collective."""
    lines = list(stack)
    begin = next((i for i, line in enumerate(lines) if line.startswith(("Current thread", "Thread"))), -1)
    current = next((i for i, line in enumerate(lines) if "Current thread" in line or "MainThread" in line), begin)
    return any(part in line for line in lines[current + 1 : current + 1 + INNERMOST] for part in COLLECTIVE)


def _usual_phase(heartbeats: list[Heartbeat]) -> str:
    """Return the most common phase."""
    counted = collections.Counter(heartbeat.phase for heartbeat in heartbeats if heartbeat.phase)
    return counted.most_common(1)[0][0] if counted else ""


def _stack(heartbeat: Heartbeat) -> tuple[str, ...]:
    return heartbeat.stack or ()
