"""The script's side of the conversation that `concertina_protocol.worker_channel.worker` tells."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import threading
import time
from pathlib import Path
from typing import Any, Callable, Dict, List, Mapping, Optional, Protocol, Tuple, Type, TypeVar, Union

from concertina_protocol import MOST_METRICS, Durable, JobHistory, Progress, ProtocolError, StepPart
from concertina_protocol import worker_channel as w
from concertina_protocol.heartbeat import WorkerPhase
from concertina_protocol.stderr import log

T = TypeVar("T")
MOST_NAME = 64
"""Characters of a metric's name."""
PARTS: Mapping[str, StepPart] = {WorkerPhase.EVALUATING: StepPart.EVALUATION, WorkerPhase.COMPILING: StepPart.COMPILE}


@dataclasses.dataclass(frozen=True)
class Reported:
    """What a script says of a step: see `trainingjob.report`."""

    step: int
    steps: int = 0
    loss: Optional[float] = None
    tokens_per_second: float = 0.0
    samples: int = 0
    phase: str = WorkerPhase.TRAINING
    tokens: Optional[int] = None
    metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)


class Tracing(Protocol):
    """Makes traces of steps that a person asks for."""

    def ask(self, wish: w.TraceSteps) -> None: ...

    def after(self, step: int) -> None: ...


class Channel:
    def __init__(self, path: str, rank: int, tracing: Callable[[int], Tracing]) -> None:
        """`tracing`: for this rank, at the first wish. Raises OSError where no agent listens."""
        self._rank, self._pid = rank, os.getpid()
        self._tracing = tracing
        self._traces: Optional[Tracing] = None
        self._end = w.WorkerEnd(path)
        self._changed = threading.Condition()
        self._open, self._asked, self._attends = True, False, False
        self._passed = 0
        """Calls of should_checkpoint() that have returned False, or are about to."""
        self._stop_at = 0
        self._last: Optional[Tuple[int, float]] = None
        self._step_seconds = 0.0
        self._first_step_at: Optional[float] = None
        self._restored_step: Optional[int] = None
        self._restored_from = ""
        self._samples: Callable[[], int] = int
        self._stalled_seconds = 0.0
        self._seconds: Dict[str, float] = {}
        """By StepPart, as phases were reported."""
        self._phase: Tuple[str, float] = ("", 0.0)
        """The last one, and since when (monotonic)."""
        self._sent: Union[Progress, w.Beat, None] = None
        """Of a step, the last."""
        self._received: List[Any] = []
        """For `State`."""
        self._snapshots: Tuple[Optional[int], float] = (None, 0.0)
        """Step of the newest one that is complete on peers, and seconds that all have taken."""
        self._send(w.Hello(rank, self._pid, traces=True))
        threading.Thread(target=self._listen, name="trainingjob", daemon=True).start()

    @property
    def ours(self) -> bool:
        """False in a process that was forked from the worker, such as a data loader's."""
        return os.getpid() == self._pid

    # --- what the script calls --------------------------------------------------------------------------------------

    def should_checkpoint(self) -> bool:
        with self._changed:
            if self._stop_at and self._passed >= self._stop_at:
                raise SystemExit(0)
            if not self._attends:
                self._attends = self._asked = True
                self._send(w.Register(self._rank))
            self._changed.wait_for(lambda: not self._open or not self._asked)
            self._passed += 1
            return self._open and self._passed == self._stop_at

    def passes(self) -> bool:
        """Whether this world ends with this commit; a call of should_checkpoint() that nobody has to heed."""
        if self._stop_at and self._passed >= self._stop_at:
            return True
        return self.should_checkpoint()

    def counts(self, samples: Callable[[], int]) -> None:
        """How many were consumed, where a report does not say so."""
        self._samples = samples

    def waited(self, seconds: float) -> None:
        """For data."""
        self._stalled_seconds += seconds

    def stalled(self, reason: str, seconds: float) -> None:
        """While data don't come for want of their store: that is no hang. `seconds`: of this wait, so far."""
        if isinstance(self._sent, Progress):
            stalled = self._stalled_seconds + seconds
            told = dataclasses.replace(self._sent, stalled_seconds=stalled, waits_for=reason[:500], at=time.time())
            self._send(dataclasses.replace(told, phase=WorkerPhase.LOADING_DATA))
        elif self._sent is not None:
            self._send(dataclasses.replace(self._sent, phase=WorkerPhase.LOADING_DATA))

    def restored(self, step: int, source: str) -> None:
        self._restored_step, self._restored_from = step, source

    def finished(self, step: int, snapshot_step: Optional[int], seconds: float) -> None:
        """A step of a script with `State`; its own report of that step, if it makes one, says more."""
        self._snapshots = snapshot_step, seconds
        if self._last is None or step > self._last[0]:
            self._tell(Reported(step))

    def report(self, said: Reported) -> None:
        if self._stop_at and self._passed >= self._stop_at:
            return None  # a step beyond the checkpoint will be trained again
        return self._tell(said)

    def _tell(self, said: Reported) -> None:
        self._enter(said.phase)
        now, step = time.time(), int(said.step)  # numbers may be numpy's or torch's, which JSON does not know
        if self._last is None:
            self._first_step_at = now
            if self._restored_step is None:
                self._restored_step = max(0, step - 1)
        elif step > self._last[0]:
            self._step_seconds = (time.monotonic() - self._last[1]) / (step - self._last[0])
        self._last = step, time.monotonic()
        self._sent = w.Beat(self._rank, step, said.phase)
        if self._rank == 0:
            first = itertools.islice(said.metrics.items(), MOST_METRICS)
            self._sent = Progress(
                step=step,
                steps=int(said.steps) or None,
                loss=float("nan") if said.loss is None else float(said.loss),
                tokens_per_second=float(said.tokens_per_second),
                step_seconds=self._step_seconds,
                position=int(said.samples) or self._samples(),
                phase=said.phase,
                at=now,
                first_step_at=self._first_step_at,
                restored_step=self._restored_step,
                restored_from=self._restored_from,
                snapshot_step=self._snapshots[0],
                checkpoint_seconds=self._snapshots[1],
                stalled_seconds=self._stalled_seconds,
                tokens=None if said.tokens is None else int(said.tokens),
                seconds=dict(self._seconds),
                metrics={str(name)[:MOST_NAME]: float(value) for name, value in first},
            )
        self._send(self._sent)
        if self._traces is not None:
            self._traces.after(step)

    def _enter(self, phase: str) -> None:
        """What was evaluated or compiled since the last report counts as that."""
        before, since = self._phase
        now = time.monotonic()
        if before in PARTS:
            part = PARTS[before]
            self._seconds[part] = self._seconds.get(part, 0.0) + now - since
        self._phase = phase, now

    # --- what its state asks ----------------------------------------------------------------------------------------

    @property
    def round(self) -> int:
        return int(os.environ["CONCERTINA_ROUND"])

    @property
    def snapshots(self) -> Path:
        return Path(os.environ["CONCERTINA_SNAPSHOTS"])

    @property
    def history(self) -> JobHistory:
        return self.start().history

    @property
    def durable(self) -> Optional[Durable]:
        """The checkpoint that LATEST names, if the job may go on from it: the next checkpoint is due by it."""
        start = self.start()
        durable = start.durable
        return None if durable and start.restore.bars(durable, start.uid) else durable

    @property
    def images(self) -> Tuple[str, ...]:
        return self.start().images

    def start(self) -> w.Start:
        """Where this round goes on from. Raises ChannelClosed where the agent is gone."""
        return self._wait_for(w.Start, keep=True)

    def request(self, message: w.Message, kind: Type[T]) -> T:
        self._send(message)
        return self._wait_for(kind)

    def poll(self) -> List[object]:
        with self._changed:
            found: List[object] = [m for m in self._received if isinstance(m, (w.CopiedUpTo, w.SaveNow))]
            self._received = [message for message in self._received if message not in found]
            return found

    def send(self, message: w.Message) -> None:
        self._send(message)

    def _wait_for(self, kind: Type[T], keep: bool = False) -> T:
        def first() -> Optional[T]:
            return next((message for message in self._received if isinstance(message, kind)), None)

        with self._changed:
            self._changed.wait_for(lambda: not self._open or first() is not None)
            found = first()
            if found is None:
                raise w.ChannelClosed("the agent is gone")
            if not keep:
                self._received.remove(found)
            return found

    # --- the wire ---------------------------------------------------------------------------------------------------

    def _send(self, message: w.Message) -> None:
        with contextlib.suppress(w.ChannelClosed):
            self._end.send(message)

    def _listen(self) -> None:
        try:
            while True:
                self._on_message(self._end.receive(object))
        except (w.ChannelClosed, ProtocolError):
            with self._changed:
                self._open = False
                self._changed.notify_all()

    def _on_message(self, message: object) -> None:
        with self._changed:
            if isinstance(message, w.QueryCalls):
                self._asked = True
                self._send(w.CallCount(self._rank, self._passed))
            elif isinstance(message, w.Registered):
                self._asked = False
            elif isinstance(message, w.StopAtCall):
                self._asked, self._stop_at = False, message.call
            elif isinstance(message, w.TraceSteps):
                self._trace(message)
            else:
                self._received.append(message)
            self._changed.notify_all()

    def _trace(self, wish: w.TraceSteps) -> None:
        try:
            self._traces = self._traces or self._tracing(self._rank)
            self._traces.ask(wish)
        except Exception as error:  # training goes on without
            log(f"trainingjob: no trace: {type(error).__name__}: {error}")


_channel: Optional[Channel] = None
_tried = False


def connected(path: str, rank: int, tracing: Callable[[int], Tracing]) -> Optional[Channel]:
    """The connection of this process, opened at the first call; None where no agent listens."""
    global _channel, _tried
    if not _tried:
        _tried = True
        try:
            _channel = Channel(path, rank, tracing)
        except OSError as error:
            log(f"trainingjob: the agent can't be reached ({error}); nothing is reported")
    return _channel if _channel is not None and _channel.ours else None
