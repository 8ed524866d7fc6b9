"""Reports of a worker to its agent, and the worker's lines in the log."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

from concertina_protocol import CheckpointInterval, Evaluated, Progress, RestoreSource, SnapshotInterval, StepPart
from concertina_protocol.heartbeat import HeartbeatWriter, WorkerPhase
from concertina_protocol.log_lines import RoundStarted, StepDoneLine
from concertina_protocol.messages.ranges import Ranges
from concertina_protocol.worker_channel import Beat, Message
from concertina_trainer.config.data_config import DocumentMode
from concertina_trainer.config.trainer import TrainerConfig
from concertina_trainer.parallel import compiled
from concertina_trainer.parallel.step_times import StepTimes

_SMOOTHING = 0.9


@dataclasses.dataclass(frozen=True)
class RoundInfo:
    """Facts about a round that the worker sends in every report of a step.

    A round is a period in which a fixed set of replicas trains.
    """

    restored_step: int
    restored_from: str
    """Source of the round's state: Fresh, Memory or Storage."""
    times: StepTimes
    token_flops: float | None
    """Number of operations of the forward and backward pass for one token. None: there is no MFU."""
    token_flops_full_attention: float | None
    """The number `token_flops`, plus operations for pairs of tokens that the causal mask hides.

    The value is None if it is not known.
    """
    peak_flops: float | None
    """Operations per second of all devices of the world. None: there is no MFU."""
    recomputed_flops: float | None = None
    """Number of operations for one token that activation checkpointing repeats. None: unknown, so there is no HFU."""


@dataclasses.dataclass(frozen=True)
class StepInfo:
    """Facts about a finished step."""

    step: int
    position: int
    """Number of samples consumed."""
    tokens: int
    """Number of tokens in this step, over all ranks."""
    loss: float
    gradient_norm: float
    """Norm of the gradient before clipping."""
    rate: float
    snapshot_step: int | None
    """Step of the newest snapshot whose shards are all copied to other replicas, or None."""
    saving_seconds: float
    """Seconds of this round spent on snapshots."""
    stalled_seconds: float
    """Seconds of this round spent waiting for data."""
    skipped: Ranges
    """Positions of the samples that were skipped."""
    shares: tuple[int, ...]
    """Number of sequences of each rank in a step, or empty if shares do not follow the ranks' speed."""
    interval: CheckpointInterval | None
    """Interval between checkpoints, or None without durable storage."""
    snapshots: SnapshotInterval | None
    """Interval between snapshots, or None before the second snapshot."""
    busiest_expert: float | None = None
    """Ratio of the busiest expert's load to its layer's mean load, the maximum over all layers, or None."""
    scaling: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """Metrics of the loss scale, or empty if there is none."""


class Channel(Protocol):
    """Channel from a worker to its agent."""

    def send(self, message: Message) -> None: ...


class Reporter:
    """Reports of a worker to its agent.

    After each step, rank 0 sends a Progress message, and every other rank sends a Beat message. Each rank also updates
    its heartbeat file.
    """

    def __init__(
        self, config: TrainerConfig, rank: int, channel: Channel, heartbeat: HeartbeatWriter, entered: float | None
    ) -> None:
        """Begin to report a round.

        `entered` is the time (time.perf_counter) at which this process entered the round, or None if the process was
        started for this round.
        """
        self.heartbeat = heartbeat
        heartbeat.busy = 0.0
        self._config, self._rank, self._channel = config, rank, channel
        self._round: RoundInfo | None = None
        self._timeline = {"start": _seconds_since_process_start() if entered is None else time.perf_counter() - entered}
        self._step_began = time.perf_counter()
        self._waited = 0.0
        self._before: Mapping[StepPart, float] = {}
        """Seconds of each part of the first step. Reports subtract these seconds, because they include the warm-up."""
        self._mean_seconds: float | None = None
        """Moving average of the seconds of a step, without the first step, which includes the warm-up."""
        self._first_step_at: float | None = None
        self._graphs, self._compiling = 0, 0.0
        """Number of graphs compiled by the previous step, and seconds of compilation before the round."""
        self._saving = self._slowest_save = 0.0
        self._sent: Progress | Beat | None = None
        self._stalled_by = ""
        self._evaluated: Evaluated | None = None
        self.settings: Mapping[str, str] = {}
        """Chosen values of the fields that the job does not set, keyed by the field's path.

        For model.from and model.hf, the value is the model that was read.
        """

    @contextmanager
    def timed(self, part: str) -> Iterator[None]:
        """Measure the duration of a part of the worker's start."""
        started = time.perf_counter()
        yield
        self._timeline[part] = round(time.perf_counter() - started, 4)
        self._step_began = time.perf_counter()

    def enter(self, phase: WorkerPhase, step: int) -> None:
        """Set the worker's phase for the agent's watchdog, without sending a message."""
        self.heartbeat.enter(phase, step)

    def starting(self, phase: WorkerPhase, step: int) -> None:
        """Report the phase of the worker's start, such as the restore, before the first step."""
        self.enter(phase, step)
        self._send(
            Progress(step, self._config.last_step, 0.0, 0.0, 0.0, 0, phase, time.time(), timeline=dict(self._timeline))
        )

    def begin(self, round: RoundInfo) -> None:
        """Begin to report the steps of a round."""
        self._round = round
        self._graphs, self._compiling = compiled.graphs(), compiled.seconds()

    def step(self, info: StepInfo) -> None:
        assert self._round is not None
        now, waited, first = time.perf_counter(), self._round.times.waiting, self._first_step_at is None
        seconds, self._step_began = now - self._step_began, now
        if first:
            self._first_step_at = time.time()
            if compiling := compiled.seconds() - self._compiling:
                self._timeline["compile"] = round(compiling, 4)
            self._timeline["first_step"] = round(max(0.0, seconds - compiling), 4)
            self._announce(info.step, self._round, self._first_step_at)
            self._before = self._round.times.parts
        else:  # the first step warms up, and would distort the mean for long
            self.heartbeat.busy += max(0.0, seconds - (waited - self._waited))
            mean = self._mean_seconds
            self._mean_seconds = seconds if mean is None else mean * _SMOOTHING + seconds * (1 - _SMOOTHING)
        self._waited = waited
        self._slowest_save = max(self._slowest_save, info.saving_seconds - self._saving)
        self._saving = info.saving_seconds
        speed, peak = info.tokens / (self._mean_seconds or seconds), self._round.peak_flops
        flops, full = self._round.token_flops, self._round.token_flops_full_attention
        varies = self._config.data.documents is DocumentMode.bucketed  # the tokens of earlier rounds are then not known
        self._send(
            Progress(
                step=info.step,
                steps=self._config.last_step,
                loss=info.loss,
                tokens_per_second=speed,
                step_seconds=seconds,
                position=info.position,
                phase=WorkerPhase.TRAINING,
                at=time.time(),
                first_step_at=self._first_step_at,
                snapshot_step=info.snapshot_step,
                checkpoint_seconds=info.saving_seconds,
                stalled_seconds=info.stalled_seconds,
                mfu=speed * flops / peak if flops and peak else None,
                mfu_full_attention=speed * full / peak if full and peak else None,
                timeline=dict(self._timeline),
                save_seconds=self._slowest_save or None,
                restored_step=self._round.restored_step,
                restored_from=self._round.restored_from,
                skipped=info.skipped,
                interval=info.interval,
                snapshots=info.snapshots,
                evaluated=self._evaluated,
                shares=info.shares,
                tokens=None if varies else info.position * self._config.model.sequence_length,
                seconds={part: round(s - self._before[part], 4) for part, s in self._round.times.parts.items()},
                metrics={**_metrics(info), **_hfu(self._round, speed)},
                settings=self.settings,
            )
        )
        graphs, self._graphs = compiled.graphs() - self._graphs, compiled.graphs()
        self.note(f"step {info.step} has compiled graphs: {graphs}" if graphs else "")
        # Logged in each step, because drills and the demo measure steps by these lines.
        self.note(str(StepDoneLine(info.step, self._config.last_step, info.loss, info.rate, speed, seconds)))

    def note(self, sentence: str) -> None:
        """Log a sentence, on rank 0 only. An empty sentence is not logged."""
        if sentence and self._rank == 0:
            print(sentence, flush=True)

    def evaluating(self, step: int) -> None:
        """Report that an evaluation begins.

        The time of an evaluation is not limited, and counts neither as a hang nor as part of a step.
        """
        self.enter(WorkerPhase.EVALUATING, step)
        self._send_again(phase=WorkerPhase.EVALUATING, step=step)

    def evaluated_before(self, result: Evaluated) -> None:
        """Report the last evaluation before this round. The reports of this round's steps repeat it.

        A run that has stopped early ends without another step. This report then contains the reason.
        """
        self._evaluated = result
        self._send_again({"evaluated": result})

    def evaluated(self, result: Evaluated, sentence: str) -> None:
        self._evaluated = result
        self.note(sentence)
        self._send_again({"evaluated": result}, phase=WorkerPhase.EVALUATING)
        self._step_began = time.perf_counter()
        self._waited = self._round.times.waiting if self._round else 0.0

    def stalled(self, reason: str, seconds: float) -> None:
        """Report that the data store delays the worker, so that the delay does not count as a hang.

        `seconds` is the time that was spent waiting for data in this round.
        """
        if reason != self._stalled_by:
            print(f"waiting for data: {reason}", flush=True)
            self._stalled_by = reason
        if self._sent is not None:
            self.enter(WorkerPhase.LOADING_DATA, self._sent.step)
            self._send_again({"stalled_seconds": seconds, "waits_for": reason[:500]}, phase=WorkerPhase.LOADING_DATA)

    def _send(self, progress: Progress) -> None:
        self._sent = progress if self._rank == 0 else Beat(self._rank, progress.step, progress.phase)
        self._channel.send(self._sent)

    def _send_again(self, of_progress: dict[str, Any] | None = None, **changed: Any) -> None:
        """Send the last message again, with new values `changed` of its fields.

        If the last message is a Progress message, the values `of_progress` are changed too. A Beat message does not
        have these fields.
        """
        if isinstance(self._sent, Progress):
            changed |= {"at": time.time(), **(of_progress or {})}
        if self._sent is not None:
            self._channel.send(dataclasses.replace(self._sent, **changed))

    def _announce(self, step: int, round: RoundInfo, first_step_at: float) -> None:
        """Log the source of the round's state, and the duration of each part of the worker's start."""
        number, source = int(os.environ["CONCERTINA_ROUND"]), RestoreSource(round.restored_from)
        self.note(str(RoundStarted(number, step, source, round.restored_step, self._timeline, first_step_at)))


def _metrics(info: StepInfo) -> dict[str, float]:
    metrics = {"gradient_norm": info.gradient_norm, "learning_rate": info.rate, **info.scaling}
    return metrics if info.busiest_expert is None else {**metrics, "busiest_expert": info.busiest_expert}


def _hfu(round: RoundInfo, speed: float) -> dict[str, float]:
    """Return the hardware FLOPs utilization at `speed` tokens per second as a metric, or nothing if unknown."""
    if not round.token_flops or not round.peak_flops or round.recomputed_flops is None:
        return {}
    return {"hfu": speed * (round.token_flops + round.recomputed_flops) / round.peak_flops}


def _seconds_since_process_start() -> float:
    """Return the seconds since this process was forked, or since it was started by exec."""
    with open("/proc/self/stat") as file:
        ticks = int(file.read().rpartition(")")[2].split()[19])
    return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK"))
