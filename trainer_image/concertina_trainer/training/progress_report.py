"""What a worker tells its agent of where it is, and the lines it logs."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from concertina_protocol import CheckpointInterval, Evaluated, Progress, RestoreSource, SnapshotInterval, StepPart
from concertina_protocol.heartbeat import HeartbeatWriter, WorkerPhase
from concertina_protocol.log_lines import RoundStarted, StepDoneLine
from concertina_protocol.messages.ranges import Ranges
from concertina_protocol.worker_channel import Beat, WorkerEnd
from concertina_trainer.config.data_config import DocumentMode
from concertina_trainer.config.trainer import TrainerConfig
from concertina_trainer.parallel.step_times import StepTimes

_SMOOTHING = 0.9


@dataclasses.dataclass(frozen=True)
class RoundInfo:
    """What a round says of itself in every report of a step."""

    restored_step: int
    restored_from: str
    """Fresh, Memory or Storage."""
    times: StepTimes
    token_flops: float | None
    """Of one token's forward and backward. None: there is no MFU."""
    token_flops_full_attention: float | None
    """The same with the pairs of tokens that the causal mask hides. None: not known."""
    peak_flops: float | None
    """A second, of all devices of the world. None: there is no MFU."""


@dataclasses.dataclass(frozen=True)
class StepInfo:
    """After a step."""

    step: int
    position: int
    """Samples consumed."""
    tokens: int
    """Of this step, of all ranks."""
    loss: float
    gradient_norm: float
    """Before clipping."""
    rate: float
    snapshot_step: int | None
    """Newest snapshot that is complete on the peers of all ranks."""
    saving_seconds: float
    """Of this round spent on snapshots."""
    stalled_seconds: float
    """Of this round spent waiting for data."""
    skipped: Ranges
    """Positions that were left out."""
    shares: tuple[int, ...]
    """Sequences of a step by rank, where that follows their speed."""
    interval: CheckpointInterval | None
    """With durable storage."""
    snapshots: SnapshotInterval | None
    """From the second snapshot on."""
    busiest_expert: float | None = None
    """Its tokens over the mean of its layer's experts, in the layer where that is the most."""


class Reporter:
    """Progress from rank 0, a beat from every other rank; and the heartbeat of each."""

    def __init__(self, config: TrainerConfig, rank: int, channel: WorkerEnd) -> None:
        self.heartbeat = HeartbeatWriter()
        self._config, self._rank, self._channel = config, rank, channel
        self._round: RoundInfo | None = None
        self._timeline = {"start": _seconds_since_process_start()}
        self._step_began = time.perf_counter()
        self._waited = 0.0
        self._before: Mapping[StepPart, float] = {}
        """Of the first step, which warms up."""
        self._mean_seconds: float | None = None
        """Of a step, smoothed; without the first one's warm-up."""
        self._first_step_at: float | None = None
        self._saving = self._slowest_save = 0.0
        self._sent: Progress | Beat | None = None
        self._stalled_by = ""
        self._evaluated: Evaluated | None = None

    @contextmanager
    def timed(self, part: str) -> Iterator[None]:
        """A part of the start."""
        started = time.perf_counter()
        yield
        self._timeline[part] = round(time.perf_counter() - started, 4)
        self._step_began = time.perf_counter()

    def enter(self, phase: WorkerPhase, step: int) -> None:
        """For the agent's watchdog; no message."""
        self.heartbeat.enter(phase, step)

    def starting(self, phase: WorkerPhase, step: int) -> None:
        """Before the first step."""
        self.enter(phase, step)
        self._send(
            Progress(step, self._config.last_step, 0.0, 0.0, 0.0, 0, phase, time.time(), timeline=dict(self._timeline))
        )

    def begin(self, round: RoundInfo) -> None:
        """From now on there are steps."""
        self._round = round

    def step(self, info: StepInfo) -> None:
        assert self._round is not None
        now, waited, first = time.perf_counter(), self._round.times.waiting, self._first_step_at is None
        seconds, self._step_began = now - self._step_began, now
        if first:
            self._first_step_at = time.time()
            self._timeline["first_step"] = round(seconds, 4)
            self._announce(info.step, self._round, self._first_step_at)
            self._before = self._round.times.parts
        else:  # the first step's warm-up tells nothing, and would be seen in the mean for long
            self.heartbeat.busy += max(0.0, seconds - (waited - self._waited))
            mean = self._mean_seconds
            self._mean_seconds = seconds if mean is None else mean * _SMOOTHING + seconds * (1 - _SMOOTHING)
        self._waited = waited
        self._slowest_save = max(self._slowest_save, info.saving_seconds - self._saving)
        self._saving = info.saving_seconds
        speed, peak = info.tokens / (self._mean_seconds or seconds), self._round.peak_flops
        flops, full = self._round.token_flops, self._round.token_flops_full_attention
        varies = self._config.data.documents is DocumentMode.bucketed  # then nothing adds up what earlier rounds had
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
                metrics=_metrics(info),
            )
        )
        # Each step: drills and the demo time steps by these lines.
        self.note(str(StepDoneLine(info.step, self._config.last_step, info.loss, info.rate, speed, seconds)))

    def note(self, sentence: str) -> None:
        """A line of the log, once for all ranks; none where there is nothing to say."""
        if sentence and self._rank == 0:
            print(sentence, flush=True)

    def evaluating(self, step: int) -> None:
        """From now on, as long as it takes; that is neither a hang nor part of a step."""
        self.enter(WorkerPhase.EVALUATING, step)
        self._send_again(phase=WorkerPhase.EVALUATING, step=step)

    def evaluated(self, result: Evaluated, sentence: str) -> None:
        self._evaluated = result
        self.note(sentence)
        self._send_again({"evaluated": result}, phase=WorkerPhase.EVALUATING)
        self._step_began = time.perf_counter()
        self._waited = self._round.times.waiting if self._round else 0.0

    def stalled(self, reason: str, seconds: float) -> None:
        """While data don't come for want of their store: that is no hang. `seconds`: as in StepInfo."""
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
        """The last message, with what is different now."""
        if isinstance(self._sent, Progress):
            changed |= {"at": time.time(), **(of_progress or {})}
        if self._sent is not None:
            self._channel.send(dataclasses.replace(self._sent, **changed))

    def _announce(self, step: int, about: RoundInfo, at: float) -> None:
        """One line when a round is at work: where its state came from and where the time of its start went."""
        number, source = int(os.environ["CONCERTINA_ROUND"]), RestoreSource(about.restored_from)
        self.note(str(RoundStarted(number, step, source, about.restored_step, self._timeline, at)))


def _metrics(info: StepInfo) -> dict[str, float]:
    told = {"gradient_norm": info.gradient_norm, "learning_rate": info.rate}
    return told if info.busiest_expert is None else {**told, "busiest_expert": info.busiest_expert}


def _seconds_since_process_start() -> float:
    """From the fork (or exec) to now."""
    with open("/proc/self/stat") as file:
        ticks = int(file.read().rpartition(")")[2].split()[19])
    return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK"))
