"""What is known about the own workers of one round. Pure."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterable
from typing import Optional

from concertina_protocol import Progress
from concertina_protocol import worker_channel as w


class WorkerOutcome(str, enum.Enum):
    """How a worker has ended; the first two are Done's words."""

    COMPLETE = "complete"
    DRAINED = "drained"
    FAILED = "failed"


@dataclasses.dataclass
class Worker:
    started: bool = False
    traces: bool = False
    """It knows TraceSteps."""
    done: Optional[w.Done] = None
    fault: Optional[w.Fault] = None
    outcome: Optional[WorkerOutcome] = None
    """Once it has exited."""


class Workers:
    def __init__(self, ranks: Iterable[int], bundled: bool) -> None:
        self.progress: Optional[Progress] = None
        """From rank 0, where it is one of ours."""
        self.step: Optional[int] = None
        """The highest that one of them has told."""
        self._bundled = bundled
        self.keep_state = bundled
        """They save snapshots."""
        self._workers = {rank: Worker() for rank in ranks}

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
            self.progress = message
        elif isinstance(message, w.KeepsState):
            self.keep_state = True
        elif isinstance(message, w.Done):
            worker.done = message
        elif isinstance(message, w.Fault):
            worker.fault = message

    def exited(self, rank: int, code: int, stopping: bool) -> Worker:
        """`stopping`: it was told to stop; a command of one's own may then end as it likes."""
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
        """Whether it can be asked for traces."""
        return rank in self._workers and self._workers[rank].traces

    def alive(self, rank: int) -> bool:
        return rank in self._workers and self._workers[rank].outcome is None

    def complete(self, rank: int) -> bool:
        return rank in self._workers and self._workers[rank].outcome is WorkerOutcome.COMPLETE

    def drained(self, rank: int) -> bool:
        return rank in self._workers and self._workers[rank].outcome is WorkerOutcome.DRAINED

    @property
    def save_seconds(self) -> float:
        """That the last snapshot took, as far as rank 0 says."""
        return (self.progress and self.progress.save_seconds) or 0.0

    def all_started(self) -> bool:
        return all(worker.started for worker in self._workers.values())

    def all_over(self) -> bool:
        return all(worker.outcome is not None for worker in self._workers.values())

    def all_complete(self) -> bool:
        return all(worker.outcome is WorkerOutcome.COMPLETE for worker in self._workers.values())
