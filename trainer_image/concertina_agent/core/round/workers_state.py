"""Facts that an agent knows about its own workers in one round. The module has no side effects.

A round is a period in which a fixed set of replicas trains.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterable
from typing import Optional

from concertina_agent.core.events import StepCount
from concertina_protocol import Progress
from concertina_protocol import worker_channel as w
from concertina_protocol.heartbeat import WorkerPhase


class WorkerOutcome(str, enum.Enum):
    """Outcome of a worker. COMPLETE and DRAINED are also the outcomes in the message Done."""

    COMPLETE = "complete"
    DRAINED = "drained"
    FAILED = "failed"


@dataclasses.dataclass
class Worker:
    """State of one worker."""

    started: bool = False
    traces: bool = False
    """True if the worker supports TraceSteps."""
    done: Optional[w.Done] = None
    fault: Optional[w.Fault] = None
    outcome: Optional[WorkerOutcome] = None
    """Outcome of the worker after its exit, or None while it runs."""


class Workers:
    """States of this agent's workers."""

    def __init__(self, ranks: Iterable[int], bundled: bool) -> None:
        self.progress: Optional[Progress] = None
        """Progress that rank 0 has reported, if rank 0 is a worker of this agent. Otherwise None."""
        self.step: Optional[int] = None
        """Highest step that a worker of this agent has reported, or None."""
        self._bundled = bundled
        self.keep_state = bundled
        """True if the workers save snapshots."""
        self._workers = {rank: Worker() for rank in ranks}
        self._reports_steps = False
        """True if rank 0 reports its steps itself. If so, the agent does not count rank 0's optimizer steps."""

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(self._workers)

    def on_message(self, rank: int, message: w.Message) -> None:
        worker = self._workers[rank]
        worker.started = True
        if isinstance(message, (Progress, w.Beat, w.Done)):
            self.step = message.step if self.step is None else max(self.step, message.step)
        if isinstance(message, w.Hello):
            worker.traces = worker.traces or message.traces
        elif isinstance(message, Progress):
            self.progress, self._reports_steps = message, True
        elif isinstance(message, w.KeepsState):
            self.keep_state = self._reports_steps = True
        elif isinstance(message, w.Done):
            worker.done = message
        elif isinstance(message, w.Fault):
            worker.fault = message

    def on_count(self, count: StepCount, at: float) -> bool:
        """Record the counted optimizer steps of a worker that does not report its steps itself.

        Args:
            count: Counted steps of a worker. The steps of rank 0 are the progress of the round.
            at: Present time in Unix seconds.

        Returns:
            Whether the progress of the round has changed.
        """
        known = self.progress.step if self.progress else 0
        if count.rank != 0 or self._reports_steps or count.steps == known:
            return False
        self.progress = Progress(
            step=count.steps,
            steps=None,
            loss=float("nan"),
            tokens_per_second=0.0,
            step_seconds=count.seconds,
            position=0,
            phase=WorkerPhase.TRAINING,
            at=at,
            first_step_at=count.first_at,
            optimizer=count.optimizer,
        )
        return True

    def exited(self, rank: int, code: int, stopping: bool) -> Worker:
        """Record the exit of a worker.

        Set `stopping` if the worker was asked to stop. A user's own command may then exit with any code.
        """
        worker = self._workers[rank]
        if self._bundled:
            worker.outcome = WorkerOutcome.FAILED
            if worker.done is not None and code == 0:
                worker.outcome = (
                    WorkerOutcome.COMPLETE if worker.done.outcome == w.Outcome.COMPLETE else WorkerOutcome.DRAINED
                )
        elif stopping:
            worker.outcome = WorkerOutcome.DRAINED
        else:
            worker.outcome = WorkerOutcome.COMPLETE if code == 0 else WorkerOutcome.FAILED
        return worker

    def traces(self, rank: int) -> bool:
        """Return whether the worker of this rank can write traces of its steps."""
        return rank in self._workers and self._workers[rank].traces

    def alive(self, rank: int) -> bool:
        return rank in self._workers and self._workers[rank].outcome is None

    def complete(self, rank: int) -> bool:
        return rank in self._workers and self._workers[rank].outcome is WorkerOutcome.COMPLETE

    def drained(self, rank: int) -> bool:
        return rank in self._workers and self._workers[rank].outcome is WorkerOutcome.DRAINED

    @property
    def save_seconds(self) -> float:
        """Seconds that the slowest snapshot took, or 0 if rank 0 has not reported any."""
        return (self.progress and self.progress.save_seconds) or 0.0

    def all_started(self) -> bool:
        return all(worker.started for worker in self._workers.values())

    def all_over(self) -> bool:
        return all(worker.outcome is not None for worker in self._workers.values())

    def all_complete(self) -> bool:
        return all(worker.outcome is WorkerOutcome.COMPLETE for worker in self._workers.values())
