"""Watchdog of the coordinator: it detects that the round hangs, and finds the ranks that are behind.

Agents send the number of seconds since a worker's last progress. The clocks of different machines are therefore never
compared (decision "The coordinator finds a hang, the operator acts on it"). The module has no side effects.

The coordinator is the agent of rank 0. A round is a period in which a fixed set of replicas trains.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import statistics
from collections.abc import Iterable, Mapping
from typing import Deque, Optional

from concertina_agent.core.events import StepCount
from concertina_agent.core.round.collectives import hung_collective
from concertina_agent.core.round.stragglers import Stragglers, busy
from concertina_protocol import Busy, GroupCalls, Hang, Heartbeat, HungCollective, Limits
from concertina_protocol.heartbeat import WorkerPhase

STEP_PHASES = tuple(
    phase
    for phase in WorkerPhase
    if phase not in (WorkerPhase.TRAINING, WorkerPhase.COMPILING, WorkerPhase.BETWEEN_STEPS)
)
"""Phases of a step, in the order in which a worker goes through them.

A worker in any other phase counts as computing.
"""
LASTING: Mapping[str, float] = {
    WorkerPhase.STARTING: 900.0,
    WorkerPhase.RESTORING: 1800.0,
    WorkerPhase.COMPILING: 1800.0,
    WorkerPhase.CHECKPOINTING: 1800.0,
    WorkerPhase.EVALUATING: 7200.0,
}
"""Seconds without progress that these phases may take.

In these phases, they replace the limit for a step if the limit for a step is lower.
"""
UNSEEN = 7200.0
"""Default limit in seconds between two optimizer steps of a script that does not report phases.

Between two steps, such a script may evaluate, save or compile.
"""
FIRST_STEP = 900.0
"""Seconds that the first step of a round may take. It may include compilation and warm-up."""
LEAST, TIMES = 60.0, 20.0
"""Defaults for the limit of a step: the higher of LEAST seconds and TIMES times the usual duration of a step."""
STOPPED_SECONDS = 0.5
"""Seconds without progress after which a worker with heartbeats that is stopped (SIGSTOP) is reported."""
STACKS_SECONDS = 4.0
"""Seconds to wait for the stacks of all workers before the hang is reported."""
COLLECTIVE = ("torch/distributed/", "torch/_ops.py", "deepspeed/comm", "megatron/core/parallel_state")
"""Parts of file paths of functions that run a collective. They are compared with the frames of a stack."""
INNERMOST = 4
BUSY_SECONDS = 2.0
"""Seconds between two summaries of the ranks' own work."""


class Heartbeats:
    """Phases of this agent's workers, and the time since each worker's last progress."""

    def __init__(self) -> None:
        self.heartbeats: tuple[Heartbeat, ...] = ()
        """Heartbeats of the running workers at the last update. The phase is "" if a worker has not reported any."""
        self._beats: dict[int, tuple[int, str, float]] = {}
        self._stopped: frozenset[tuple[int, int]] = frozenset()
        self._stacks: dict[int, tuple[str, ...]] = {}
        self._calls: dict[int, tuple[GroupCalls, ...]] = {}
        self.collecting = False
        """True if stacks have been requested or collected for the present hang of the round."""

    def on_beat(self, rank: int, step: int, phase: str, now: float) -> None:
        """Record the phase in a worker's message.

        If the worker has a heartbeat file, the phase in the file is used instead, because the file is more precise.

        A worker that waits for data repeats its message, and each message counts as progress.
        """
        if phase == WorkerPhase.LOADING_DATA or self._beats.get(rank, (None, ""))[:2] != (step, phase):
            self._beats[rank] = (step, phase, now)

    def update(
        self, read: Iterable[Heartbeat], running: Iterable[int], now: float, counts: Iterable[StepCount] = ()
    ) -> None:
        """Record the phases of the running workers.

        A heartbeat in `read` (from a worker's heartbeat file) has precedence over a phase in the worker's messages.
        Counted optimizer steps have the lowest precedence.

        Args:
            read: Heartbeats that were read from the heartbeat files.
            running: Ranks of the running workers.
            now: Present monotonic time in seconds.
            counts: Counted optimizer steps of workers that run a script.
        """
        by_rank = {heartbeat.rank: heartbeat for heartbeat in read}
        for rank, (step, phase, since) in self._beats.items():
            by_rank.setdefault(rank, Heartbeat(rank, step, phase, now - since))
        for count in counts:
            heartbeat = Heartbeat(count.rank, count.steps, WorkerPhase.BETWEEN_STEPS, count.still)
            by_rank.setdefault(count.rank, heartbeat)
        unknown = (Heartbeat(rank, -1, "", 0.0) for rank in running if rank not in by_rank)
        heartbeats = [*(by_rank[rank] for rank in running if rank in by_rank), *unknown]
        self.heartbeats = tuple(
            dataclasses.replace(p, stack=self._stacks.get(p.rank), calls=self._calls.get(p.rank)) for p in heartbeats
        )

    def stopped(self, ranks: Iterable[tuple[int, int]]) -> frozenset[int]:
        """Return the ranks that have been stopped (SIGSTOP) without a pause since the last call.

        `ranks` contains each rank that is stopped now, with the CPU time that the rank has used. If the CPU time is the
        same as at the last call, the rank has not run in between. A worker that is stopped for short moments again and
        again is only slow (decision "A briefly stopped worker counts as slow").
        """
        moved = {
            heartbeat.rank for heartbeat in self.heartbeats if heartbeat.phase and heartbeat.still < STOPPED_SECONDS
        }
        before, self._stopped = self._stopped, frozenset(ranks)
        return frozenset(rank for rank, _ in before & self._stopped) - moved

    def hung(self, hung: bool) -> bool:
        """Record whether the coordinator reports a hang of the round.

        Return whether to collect the workers' stacks now.

        Stacks are collected once for each hang.

        The coordinator is the agent of rank 0.
        """
        begin, self.collecting = hung and not self.collecting, hung
        if not hung:
            self._stacks, self._calls = {}, {}
        return begin

    def collected(
        self, stacks: Mapping[int, tuple[str, ...]], calls: Optional[Mapping[int, tuple[GroupCalls, ...]]] = None
    ) -> None:
        if self.collecting:
            self._stacks, self._calls = dict(stacks), dict(calls or {})
            self.heartbeats = tuple(
                dataclasses.replace(p, stack=self._stacks.get(p.rank, ()), calls=self._calls.get(p.rank))
                for p in self.heartbeats
            )


@dataclasses.dataclass(frozen=True)
class RankHeartbeat:
    """Heartbeat of one rank, as the coordinator (the agent of rank 0) has received it."""

    replica: str
    heartbeat: Heartbeat
    moved_at: float
    """Time of the last progress, by the coordinator's clock."""


class Watchdog:
    """Detector of hangs and stragglers among all ranks of the round, for the coordinator.

    A round is a period in which a fixed set of replicas trains.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._rank_heartbeats: dict[int, RankHeartbeat] = {}
        self._ranks: dict[str, tuple[int, ...]] = {}
        """Ranks that each replica listed in its last line."""
        self._steps: Deque[float] = collections.deque(maxlen=32)
        self._hung_at: Optional[float] = None
        self.hang: Optional[Hang] = None
        self.stragglers = Stragglers(limits.straggler_factor)
        self.busy: Optional[Busy] = None
        """Last summary of the ranks' own work.

        The summary is renewed every BUSY_SECONDS, unless the heartbeats of a replica are late by more than that time.
        """
        self._busy_at = -math.inf
        self._summarized: dict[int, Heartbeat] = {}
        """Heartbeat of each rank at the time of the last summary."""

    @property
    def hung(self) -> bool:
        """True if no rank has made progress for too long.

        The field `hang` contains the details. It is set later, when the workers' stacks have been collected.
        """
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
        """Check for hangs and stragglers.

        Return whether a hang or straggler has appeared or ended since the last call.
        """
        rank_heartbeats = {
            rank: (rank_heartbeat.replica, rank_heartbeat.heartbeat)
            for rank, rank_heartbeat in self._rank_heartbeats.items()
        }
        if now >= self._busy_at + BUSY_SECONDS:
            self._busy_at = now
            self.busy = self._busy() or self.busy
        return self._hangs(now) | self.stragglers.check(rank_heartbeats, now)

    def _busy(self) -> Optional[Busy]:
        """Return a summary of the ranks' own work up to a step that lies between the last summary and now."""
        last = {rank: rank_heartbeat.heartbeat for rank, rank_heartbeat in self._rank_heartbeats.items()}
        earlier = {rank: self._summarized.get(rank, heartbeat) for rank, heartbeat in last.items()}
        summary = busy({rank: (earlier[rank], last[rank]) for rank in last})
        self._summarized = {
            rank: heartbeat for rank, heartbeat in (earlier if summary is None else last).items() if heartbeat.busy > 0
        }
        return summary

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
        collective = hung_collective(
            {rank: rank_heartbeat.heartbeat.calls for rank, rank_heartbeat in self._rank_heartbeats.items()}
        )
        heartbeats = [rank_heartbeat.heartbeat for rank_heartbeat in self._rank_heartbeats.values()]
        suspected = suspects(heartbeats, collective)
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
                collective,
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
            collective,
        )


def limit(limits: Limits, steps: Iterable[float], phase: str) -> float:
    """Return the seconds without progress after which the round counts as hung.

    Args:
        limits: Limits from the job's spec.
        steps: Durations in seconds of recent steps of the rank that is behind.
        phase: Phase of the rank that is behind, such as a step or a save.
    """
    durations = list(steps)
    if phase == WorkerPhase.BETWEEN_STEPS:
        return limits.hang_seconds or max(UNSEEN, TIMES * statistics.median(durations) if durations else 0.0)
    usual = limits.hang_seconds or max(LEAST, TIMES * statistics.median(durations) if durations else FIRST_STEP)
    first = 0.0 if durations else FIRST_STEP
    return max(usual, LASTING.get(phase, first))


def position(heartbeat: Heartbeat) -> tuple[int, int]:
    """Return the progress of a rank as two numbers to compare: finished steps, and phase within the next step."""
    phase = heartbeat.phase if heartbeat.phase in STEP_PHASES else WorkerPhase.COMPUTING
    return heartbeat.step, STEP_PHASES.index(phase)


def suspects(heartbeats: Iterable[Heartbeat], collective: Optional[HungCollective] = None) -> list[Heartbeat]:
    """Return the heartbeats of the ranks that are behind, so that the other ranks wait for them.

    These are the ranks with the least progress, except those that wait in a collective operation themselves. If all
    ranks with the least progress seem to wait, the result is the ranks among them that have not called the hung
    `collective`. If all ranks with the least progress have called it, the result is all these ranks (decision "A
    heartbeat file instead of messages").
    """
    everyone = sorted(heartbeats, key=lambda heartbeat: heartbeat.rank)
    reporting = [heartbeat for heartbeat in everyone if heartbeat.phase]
    last = min(map(position, reporting))
    behind = [heartbeat for heartbeat in reporting if position(heartbeat) == last]
    if len(behind) == len(reporting):
        behind = everyone
    awake = [heartbeat for heartbeat in behind if heartbeat.stack and not waits(heartbeat.stack)]
    missing = [heartbeat for heartbeat in behind if collective and heartbeat.rank in collective.missing]
    return awake or missing or behind


def waits(stack: Iterable[str]) -> bool:
    """Return whether a worker's stack shows that its main thread waits in a collective operation.

    Only the innermost frames count.
    """
    lines = list(stack)
    begin = next((i for i, line in enumerate(lines) if line.startswith(("Current thread", "Thread"))), -1)
    current = next((i for i, line in enumerate(lines) if "Current thread" in line or "MainThread" in line), begin)
    return any(part in line for line in lines[current + 1 : current + 1 + INNERMOST] for part in COLLECTIVE)


def _usual_phase(heartbeats: list[Heartbeat]) -> str:
    """Return the phase, such as a step or a save, in which most of the ranks are."""
    counted = collections.Counter(heartbeat.phase for heartbeat in heartbeats if heartbeat.phase)
    return counted.most_common(1)[0][0] if counted else ""


def _stack(heartbeat: Heartbeat) -> tuple[str, ...]:
    return heartbeat.stack or ()
