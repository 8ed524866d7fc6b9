"""The script's side of the connection to its agent (see `concertina_protocol.worker_channel.worker_messages`)."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import threading
import time
import weakref
from pathlib import Path
from typing import Callable, Dict, List, Mapping, Optional, Protocol, Tuple, Type, TypeVar, Union

from concertina_protocol import MOST_METRICS, Durable, JobHistory, Progress, StepPart
from concertina_protocol import worker_channel as w
from concertina_protocol.heartbeat import WorkerPhase
from concertina_protocol.stderr import write_line
from concertina_protocol.worker_channel.rounds import RoundChannel, RoundLeft
from trainingjob._world import world

T = TypeVar("T")
MOST_NAME = 64
"""Maximum length of a metric's name, in characters."""
PARTS: Mapping[str, StepPart] = {WorkerPhase.EVALUATING: StepPart.EVALUATION, WorkerPhase.COMPILING: StepPart.COMPILE}
"""Part of a step to which the time of a reported phase is added, keyed by the phase."""


@dataclasses.dataclass(frozen=True)
class StepReport:
    """A script's report of a finished step (see `trainingjob.report`)."""

    step: int
    steps: int = 0
    loss: Optional[float] = None
    tokens_per_second: float = 0.0
    samples: int = 0
    phase: str = WorkerPhase.TRAINING
    tokens: Optional[int] = None
    metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)


class Tracer(Protocol):
    """Writer of traces of training steps, on request (see `concertina_state.step_trace.Traces`)."""

    def ask(self, wish: w.TraceSteps) -> None:
        """Request a trace of the steps that the message `wish` names."""
        ...

    def list_calls(self, send: Callable[[w.Message], None]) -> None:
        """Call `send` with a message that lists the collectives of this process."""
        ...

    def after(self, step: int) -> None:
        """Record that the step with this number has finished."""
        ...


class RoundEnded(SystemExit):
    """Exception: the round is about to end, and the script has saved its state.

    Outside of `trainingjob.run`, this exception ends the script.

    A round is a period in which a fixed set of replicas trains.
    """


class Channel:
    """Connection of one worker to its agent, for one round. Its methods may be called from any thread.

    A round is a period in which a fixed set of replicas trains. Once the round has ended, each method raises RoundLeft.
    """

    def __init__(
        self, rounds: RoundChannel, rank: int, make_tracer: Callable[[int], Tracer], stays: bool = False
    ) -> None:
        """Enter the round that the environment names.

        Args:
            rounds: The connection to the agent.
            rank: Rank of this process.
            make_tracer: Function that receives the rank and returns its tracer. The first request for a trace calls it.
            stays: Whether this process can leave the round and enter the next one.

        Raises:
            RoundLeft: The round has ended.
        """
        self._rank, self._pid = rank, os.getpid()
        self.stays = stays
        self._make_tracer = make_tracer
        self._tracer: Optional[Tracer] = None
        self._rounds = rounds
        self._has_left = False
        """True if this process has left the round."""
        self._start: Optional[w.Start] = None
        self._registered = False
        """True if the agent knows that this rank calls should_checkpoint()."""
        self._must_wait = False
        """True if the next call of should_checkpoint() waits for a message of the agent."""
        self._calls = 0
        """Calls of should_checkpoint() that have returned, or are about to."""
        self._stop_at = 0
        """Number of the call that returns True; 0 until the agents have agreed on one."""
        self._last_step: Optional[Tuple[int, float]] = None
        """Last reported step, and when it was reported (monotonic seconds)."""
        self._step_seconds = 0.0
        self._first_step_at: Optional[float] = None
        self._restored_step: Optional[int] = None
        self._restored_from = ""
        self._samples: Callable[[], int] = int
        self._stalled_seconds = 0.0
        self._seconds_by_part: Dict[str, float] = {}
        """Seconds spent in each StepPart, computed from the phases that the script reported."""
        self._phase: Tuple[str, float] = ("", 0.0)
        """Last reported phase, and when it was reported (monotonic seconds)."""
        self._last_message: Union[Progress, w.Beat, None] = None
        """Last message about a step."""
        self._snapshots: Tuple[Optional[int], float] = (None, 0.0)
        """Step of the newest snapshot that is complete on peers, and the seconds that all snapshots have taken."""
        with contextlib.suppress(w.ChannelClosed):
            hello = w.Hello(rank, self._pid, traces=True, stays=stays, lists_calls=True)
            rounds.enter(world().round, hello, self._on_message)

    @property
    def in_own_process(self) -> bool:
        """True if the caller is the worker process itself.

        The result is False in a process that the worker has forked, such as a data loader's.
        """
        return os.getpid() == self._pid

    @property
    def stops(self) -> bool:
        """True if all ranks have agreed to stop after the current step or an earlier one."""
        return self._stop_at > 0 and self._calls >= self._stop_at

    # --- calls of the script ----------------------------------------------------------------------------------------

    def should_checkpoint(self) -> bool:
        """Return whether the script must save after this step. See `trainingjob.should_checkpoint`.

        Raises:
            RoundEnded: The previous call returned True.
        """
        self._check()
        with self._rounds.changed:
            if self.stops:
                raise RoundEnded(0)
            if not self._registered:
                self._registered = self._must_wait = True
                self._send(w.Register(self._rank))
            self._rounds.wait_until(lambda: not self._must_wait)
            self._calls += 1
            return not self._rounds.closed and self._calls == self._stop_at

    def must_stop(self) -> bool:
        """Return whether the workers are about to be stopped, so that a `State` must save and end the process.

        A `State` calls this method instead of should_checkpoint(), and the agents count the calls in the same way. The
        `State` may save some commits later, for example at the end of a gradient accumulation.
        """
        return self.stops or self.should_checkpoint()

    def count_samples_by(self, samples: Callable[[], int]) -> None:
        """Set the function that counts consumed samples, for reports in which the script gives no number of samples."""
        self._samples = samples

    def add_stall(self, seconds: float) -> None:
        """Add to the seconds for which the script has waited for data. The next report contains the sum."""
        self._stalled_seconds += seconds

    def report_stall(self, reason: str, seconds: float) -> None:
        """Report that the script waits for the store of its training data, so that the agents do not assume a hang.

        Args:
            reason: A sentence that says what the script waits for.
            seconds: Duration of the current wait so far.
        """
        if isinstance(self._last_message, Progress):
            stalled = self._stalled_seconds + seconds
            message = dataclasses.replace(
                self._last_message, stalled_seconds=stalled, waits_for=reason[:500], at=time.time()
            )
            self._send(dataclasses.replace(message, phase=WorkerPhase.LOADING_DATA))
        elif self._last_message is not None:
            self._send(dataclasses.replace(self._last_message, phase=WorkerPhase.LOADING_DATA))

    def report_restored(self, step: int, source: str) -> None:
        """Record at which step this round begins and where its state came from, for later reports to the job."""
        self._restored_step, self._restored_from = step, source

    def report_commit(self, step: int, snapshot_step: Optional[int], seconds: float) -> None:
        """Report that a script has committed a step, unless the script has already reported this step itself.

        Args:
            step: Number of finished steps.
            snapshot_step: Step of the newest snapshot of which other replicas have all shards, or None.
            seconds: Seconds that all snapshots of this round have taken.
        """
        self._snapshots = snapshot_step, seconds
        if self._last_step is None or step > self._last_step[0]:
            self._report(StepReport(step))

    def report(self, report: StepReport) -> None:
        """Report a finished step."""
        if self.stops:
            return  # a step beyond the checkpoint will be trained again
        self._report(report)

    def _report(self, report: StepReport) -> None:
        self._enter_phase(report.phase)
        now, step = time.time(), int(report.step)  # numbers may be numpy's or torch's, which JSON does not know
        if self._last_step is None:
            self._first_step_at = now
            if self._restored_step is None:
                self._restored_step = max(0, step - 1)
        elif step > self._last_step[0]:
            self._step_seconds = (time.monotonic() - self._last_step[1]) / (step - self._last_step[0])
        self._last_step = step, time.monotonic()
        self._last_message = w.Beat(self._rank, step, report.phase)
        if self._rank == 0:
            metrics = itertools.islice(report.metrics.items(), MOST_METRICS)
            self._last_message = Progress(
                step=step,
                steps=int(report.steps) or None,
                loss=float("nan") if report.loss is None else float(report.loss),
                tokens_per_second=float(report.tokens_per_second),
                step_seconds=self._step_seconds,
                position=int(report.samples) or self._samples(),
                phase=report.phase,
                at=now,
                first_step_at=self._first_step_at,
                restored_step=self._restored_step,
                restored_from=self._restored_from,
                snapshot_step=self._snapshots[0],
                checkpoint_seconds=self._snapshots[1],
                stalled_seconds=self._stalled_seconds,
                tokens=None if report.tokens is None else int(report.tokens),
                seconds=dict(self._seconds_by_part),
                metrics={str(name)[:MOST_NAME]: float(value) for name, value in metrics},
            )
        self._send(self._last_message)
        if self._tracer is not None:
            self._tracer.after(step)

    def _enter_phase(self, phase: str) -> None:
        """Add the time since the last report to the phase that this report named, and begin the phase `phase`."""
        previous, since = self._phase
        now = time.monotonic()
        if previous in PARTS:
            part = PARTS[previous]
            self._seconds_by_part[part] = self._seconds_by_part.get(part, 0.0) + now - since
        self._phase = phase, now

    # --- calls of `State` -------------------------------------------------------------------------------------------

    @property
    def round(self) -> int:
        """Number of this round."""
        return world().round

    @property
    def snapshots(self) -> Path:
        """Folder in node memory into which this round's snapshots are written."""
        return Path(os.environ["CONCERTINA_SNAPSHOTS"])

    @property
    def history(self) -> JobHistory:
        """Past failures of the job, from which the interval between checkpoints is computed."""
        return self.start().history

    @property
    def durable(self) -> Optional[Durable]:
        """Newest checkpoint in storage (the one that the file LATEST names), or None if the job must not use it.

        Time until the next checkpoint is counted from this one.
        """
        start = self.start()
        durable = start.durable
        return None if durable and start.restore.bars(durable, start.uid) else durable

    @property
    def images(self) -> Tuple[str, ...]:
        """Container images of the round's replicas."""
        return self.start().images

    def start(self) -> w.Start:
        """Return the agent's first message, which says from which state this round continues.

        Raises:
            ChannelClosed: The agent is gone.
        """
        self._check()
        self._rounds.wait_until(lambda: self._start is not None)
        if self._start is None:
            raise w.ChannelClosed("the agent is gone")
        return self._start

    def request(self, message: w.Message, kind: Type[T]) -> T:
        """Send a message to the agent, wait for the answer of type `kind`, and return the answer.

        Raises:
            ChannelClosed: The agent is gone.
        """
        self._check()
        return self._rounds.request(message, kind)

    def poll(self) -> List[w.Message]:
        """Return the messages about saving that have arrived since the last call."""
        self._check()
        with contextlib.suppress(w.ChannelClosed):
            return self._rounds.poll()
        return []

    def send(self, message: w.Message) -> None:
        """Send a message to the agent. If the agent has exited, the message is dropped."""
        self._send(message)

    # --- the end of the round ---------------------------------------------------------------------------------------

    def may_stay(self) -> bool:
        """Return whether this process can leave the round and stay, so that it sends Left instead of exiting."""
        try:
            return self.start().stays
        except RoundLeft:  # an agent asks only a process that may stay
            return True
        except w.ChannelClosed:
            return False

    def leave(self) -> None:
        """End the round in this process. From now on each use of this object raises RoundLeft."""
        self._has_left = True
        self._rounds.end_round()

    def _check(self) -> None:
        """Raise an error if the round has ended.

        Raises:
            RoundLeft: The round has ended, or this thread was started in an earlier round.
            RuntimeError: An object of an earlier round is used in this one.
        """
        if threading.current_thread() in threads_of_earlier_rounds:
            raise RoundLeft
        if self._has_left:
            raise RuntimeError("this State was created in an earlier round: create it within the function of run()")
        self._rounds.check()

    # --- the socket -------------------------------------------------------------------------------------------------

    def _send(self, message: w.Message) -> None:
        self._check()
        with contextlib.suppress(w.ChannelClosed):
            self._rounds.send(message)

    def _on_message(self, message: w.Message) -> bool:
        """Handle a message in the reading thread. Return False if `receive` or `poll` must return the message too."""
        if isinstance(message, w.QueryCalls):
            self._must_wait = True
            with contextlib.suppress(w.ChannelClosed):  # no _check(): the thread that reads is older than the round
                self._rounds.send(w.CallCount(self._rank, self._calls))
        elif isinstance(message, w.Registered):
            self._must_wait = False
        elif isinstance(message, w.StopAtCall):
            self._must_wait, self._stop_at = False, message.call
        elif isinstance(message, w.TraceSteps):
            request = message
            self._use_tracer(lambda tracer: tracer.ask(request))
        elif isinstance(message, w.ListCalls):
            self._use_tracer(lambda tracer: tracer.list_calls(self._rounds.send))
        elif isinstance(message, w.Start):
            self._start = message
        else:
            return False
        return True

    def _use_tracer(self, use: Callable[[Tracer], None]) -> None:
        try:
            self._tracer = self._tracer or self._make_tracer(self._rank)
            use(self._tracer)
        except Exception as error:  # training continues without it
            write_line(f"trainingjob: nothing could be traced: {type(error).__name__}: {error}")


threads_of_earlier_rounds: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
"""Threads that a script has started in a round that this process has left."""
_channel: Optional[Channel] = None
_tried = False


def connected(path: str, rank: int, make_tracer: Callable[[int], Tracer]) -> Optional[Channel]:
    """Return this process's channel to its agent, or None if no agent listens.

    The first call opens the channel. All further calls return the same one.

    Args:
        path: Path of the agent's socket.
        rank: Rank of this process.
        make_tracer: See `Channel`.
    """
    if not _tried:
        rounds = connect(path, abort=lambda: None)
        if rounds is not None:
            enter(rounds, rank, make_tracer)
    return _channel if _channel is not None and _channel.in_own_process else None


def connect(path: str, abort: Callable[[], None]) -> Optional[RoundChannel]:
    """Connect this process to its agent, or return None if no agent listens.

    Args:
        path: Path of the agent's socket.
        abort: Function that aborts the process groups of a round that the agent has ended.

    Raises:
        RuntimeError: This process is connected already.
    """
    global _tried
    if _tried:
        raise RuntimeError("this process is already connected to its agent")
    _tried = True
    try:
        return RoundChannel(w.WorkerEnd(path), abort)
    except OSError as error:
        write_line(f"trainingjob: the agent can't be reached ({error}), so nothing is reported")
        return None


def enter(rounds: RoundChannel, rank: int, make_tracer: Callable[[int], Tracer], stays: bool = False) -> Channel:
    """Enter the round that the environment variables name, and return the channel for this round. See `Channel`."""
    global _channel
    _channel = Channel(rounds, rank, make_tracer, stays)
    return _channel


def leave() -> None:
    """End the round in this process. If the round had ended before this process could enter it, do nothing."""
    if _channel is not None:
        _channel.leave()
