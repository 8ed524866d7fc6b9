"""What a worker tells its agent of where it is, and the lines it logs."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from concertina_protocol import CheckpointInterval, Evaluated, Progress
from concertina_protocol.pulse import PulseWriter
from concertina_protocol.ranges import Ranges
from concertina_protocol.worker_channel import Beat, WorkerEnd
from concertina_trainer.config import TrainerConfig
from concertina_trainer.parallel.waits import Waits

_SMOOTHING = 0.9


class Reporter:
    """Progress from rank 0, a beat from every other rank; and the pulse of each."""

    def __init__(self, config: TrainerConfig, rank: int, channel: WorkerEnd) -> None:
        self.pulse = PulseWriter()
        self.waits: Waits | None = None
        """Once the group is there."""
        self._waited = 0.0
        self._config, self._rank, self._channel = config, rank, channel
        self._tokens = config.global_batch_size * config.model.sequence_length
        self._timeline = {"start": _seconds_since_process_start()}
        self._mark = time.perf_counter()
        self._smoothed = 0.0
        self._first_step_at = 0.0
        self._saving = self._save_seconds = 0.0
        self._sent: Progress | Beat | None = None
        self._reason = ""
        self._evaluated: Evaluated | None = None
        self.restored_step, self.restored_from = -1, ""
        self.interval: Callable[[], CheckpointInterval] | None = None
        """With durable storage."""
        self.shares: Callable[[], tuple[int, ...]] = tuple
        """Sequences of a step by rank, where that follows their speed."""
        self.skipped: Ranges = ()
        """Positions that were left out."""
        self.peak_flops, self.token_flops = 0.0, 0.0
        """Of all devices of the world; of one token's forward and backward. Without them there is no MFU."""

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Time one part of the start."""
        started = time.perf_counter()
        yield
        self._timeline[name] = round(time.perf_counter() - started, 4)
        self._mark = time.perf_counter()

    def phase(self, phase: str, step: int, position: int = 0) -> None:
        """Before the first step."""
        self.pulse.enter(phase, step)
        self._send(phase, step, position, 0.0, 0.0, -1, 0.0, 0.0)

    def step(
        self, step: int, position: int, loss: float, rate: float, snapshot_step: int, saving: float, stalled: float
    ) -> None:
        """After a step. `saving` and `stalled`: seconds of this round spent on snapshots, and waiting for data."""
        now = time.perf_counter()
        seconds, self._mark = now - self._mark, now
        self._worked(seconds)
        if not self._first_step_at:
            self._first_step_at = time.time()
            self._timeline["first_step"] = round(seconds, 4)
            self._announce(step)
        else:  # the first step's warm-up would be seen in the mean for long
            self._smoothed = self._smoothed * _SMOOTHING + seconds * (1 - _SMOOTHING) if self._smoothed else seconds
        self._save_seconds, self._saving = max(self._save_seconds, saving - self._saving), saving
        self._send("training", step, position, loss, seconds, snapshot_step, saving, stalled)
        if self._rank == 0:  # each step: drills and the demo time steps by these lines
            print(
                f"step {step}/{self._config.steps}  loss {loss:.4f}  rate {rate:.2e}  "
                f"{self._tokens / (self._smoothed or seconds):,.0f} tokens/s  {seconds * 1000:.0f} ms",
                flush=True,
            )

    def left_out(self, why: str, skipped: Ranges) -> None:
        """A batch was skipped, why in a sentence; and all that ever were."""
        self.skipped = skipped
        self.note(why)

    def note(self, sentence: str) -> None:
        """A line of the log, once for all ranks; none where there is nothing to say."""
        if sentence and self._rank == 0:
            print(sentence, flush=True)

    def evaluating(self, step: int) -> None:
        """From now on, as long as it takes; that is neither a hang nor part of a step."""
        self.pulse.enter("evaluating", step)
        self._say_again(phase="evaluating", step=step)

    def evaluated(self, result: Evaluated, sentence: str) -> None:
        self._evaluated = result
        self.note(sentence)
        told: dict[str, Any] = {"evaluated": result} if isinstance(self._sent, Progress) else {}
        self._say_again(phase="evaluating", **told)
        self._mark, self._waited = time.perf_counter(), self.waits.seconds if self.waits else 0.0

    def _say_again(self, **changed: Any) -> None:
        """The last line, with what is different now."""
        if self._sent is not None:
            if isinstance(self._sent, Progress):
                changed["at"] = time.time()
            self._channel.send(dataclasses.replace(self._sent, **changed))

    def _worked(self, seconds: float) -> None:
        """Of this step, what was not spent waiting for others. The first one's warm-up tells nothing."""
        waited = self.waits.seconds if self.waits else 0.0
        if self._first_step_at:
            self.pulse.busy += max(0.0, seconds - (waited - self._waited))
        self._waited = waited

    def _announce(self, step: int) -> None:
        """One line when a round is at work: where its state came from and where the time of its start went."""
        if self._rank == 0:
            source = f"{self.restored_from.lower()} of step {self.restored_step}" if self.restored_from else "the seed"
            parts = "  ".join(f"{name} {value:.3f}" for name, value in self._timeline.items())
            print(f"round {os.environ.get('CONCERTINA_ROUND', '?')} is at work: step {step}, state from {source}; "
                  f"seconds: {parts}; at {self._first_step_at:.4f}", flush=True)  # fmt: skip

    def _send(
        self, phase: str, step: int, position: int, loss: float, seconds: float,
        snapshot_step: int, saving: float, stalled: float,
    ) -> None:  # fmt: skip
        if self._rank != 0:
            self._sent = Beat(self._rank, step, phase)
            self._channel.send(self._sent)
            return
        speed = self._tokens / (self._smoothed or seconds) if seconds else 0.0
        self._sent = Progress(
            step=step,
            steps=self._config.steps,
            loss=loss,
            tokens_per_second=speed,
            step_seconds=seconds,
            position=position,
            phase=phase,
            at=time.time(),
            first_step_at=self._first_step_at,
            snapshot_step=snapshot_step,
            checkpoint_seconds=saving,
            stalled_seconds=stalled,
            mfu=speed * self.token_flops / self.peak_flops if self.peak_flops else 0.0,
            timeline=dict(self._timeline),
            save_seconds=self._save_seconds,
            restored_step=self.restored_step,
            restored_from=self.restored_from,
            skipped=self.skipped,
            interval=self.interval() if self.interval else None,
            evaluated=self._evaluated,
            shares=self.shares(),
        )
        self._channel.send(self._sent)

    def stalled(self, reason: str, seconds: float) -> None:
        """While data don't come for want of their store: that is no hang. `seconds`: as of `step`'s `stalled`."""
        if reason != self._reason:
            print(f"waiting for data: {reason}", flush=True)
            self._reason = reason
        if self._sent is not None:
            self.pulse.enter("loading data", self._sent.step)
            told = {"stalled_seconds": seconds, "waits_for": reason[:500]}
            self._say_again(phase="loading data", **(told if isinstance(self._sent, Progress) else {}))


def _seconds_since_process_start() -> float:
    """From the fork (or exec) to now."""
    with open("/proc/self/stat") as file:
        ticks = int(file.read().rpartition(")")[2].split()[19])
    return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK"))
