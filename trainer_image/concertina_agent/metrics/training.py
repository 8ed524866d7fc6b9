"""Metrics of training, as rank 0 reports it, summed over the rounds in which rank 0 was a worker of this pod.

The module has no side effects.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable, Iterator, Mapping
from typing import Optional

import concertina_protocol as p
from concertina_agent.metrics import families as f
from concertina_agent.metrics.exposition import Histogram, MetricSample

_OWN_METRICS = {"learning_rate": f.LEARNING_RATE, "gradient_norm": f.GRADIENT_NORM}
"""Metric families for metrics that a worker reports by name."""
_STEP_PARTS = frozenset(part.value for part in p.StepPart)
OTHER = "other"
"""Label value for parts of a step that this version does not know."""
_START_PARTS = ("start", "group", "build", "restore", "compile", "first_step")
LONGEST_NAME = 64
MOST_STEPS = 100_000
"""Maximum number of steps that one report can add to the counters."""


class Training:
    """Counters and gauges of training."""

    def __init__(self) -> None:
        self._round = -1
        self._last: Optional[p.Progress] = None
        self._step_seconds = Histogram(f.STEP_BUCKETS)
        self._totals: dict[Hashable, float] = {}
        """Sums of the workers' values over all rounds before the present one, keyed by metric."""
        self._of_round: dict[Hashable, float] = {}
        """Last values that workers have reported in the present round, keyed by metric.

        Workers count from the beginning of each round, so these values begin at 0 in each round.
        """
        self._tokens, self._knows_tokens = 0, False
        self._snapshot: tuple[Optional[int], float] = (None, 0.0)
        """Step of the newest snapshot, and the time at which that step was first reported."""
        self._had_loss = False

    def on_progress(self, round: int, progress: p.Progress, now: float) -> None:
        """Record a report of rank 0.

        Args:
            round: Number of the round.
            progress: Report of rank 0.
            now: Present monotonic time in seconds.
        """
        if round < self._round:
            return
        if round > self._round:
            self._round, self._last, self._of_round, self._snapshot = round, None, {}, (None, now)
        last = self._last
        if last is not None and last.first_step_at is not None:
            self._stepped(last, progress)
        self._add(f.DATA_WAIT_SECONDS, progress.stalled_seconds)
        self._add(f.SAVE_WAIT_SECONDS, progress.checkpoint_seconds)
        parts: dict[str, float] = {}
        for name, seconds in itertools.islice(progress.seconds.items(), p.MOST_METRICS):
            part = name if name in _STEP_PARTS else OTHER
            parts[part] = parts.get(part, 0.0) + seconds
        for part, seconds in parts.items():
            self._add((f.PART_SECONDS, part), seconds)
        if progress.snapshot_step != self._snapshot[0]:
            self._snapshot = progress.snapshot_step, now
        self._knows_tokens = self._knows_tokens or progress.tokens is not None
        self._had_loss = self._had_loss or math.isfinite(progress.loss)
        self._last = progress

    def _stepped(self, last: p.Progress, progress: p.Progress) -> None:
        steps = min(progress.step - last.step, MOST_STEPS)
        if steps > 0 and 0 < progress.step_seconds < math.inf:
            self._step_seconds.observe(progress.step_seconds, steps)
        if progress.tokens is not None and last.tokens is not None:
            self._tokens += max(0, progress.tokens - last.tokens)

    def _add(self, key: Hashable, seconds: float) -> None:
        """Add the increase of a worker's total to a counter of this pod.

        A worker counts from the beginning of its round, whereas the pod's counter includes earlier rounds.

        Args:
            key: Name of the counter.
            seconds: Total since the beginning of the round, as the worker reports it.
        """
        more = seconds - self._of_round.get(key, 0.0)
        if 0.0 <= more < math.inf:
            self._of_round[key] = seconds
            self._totals[key] = self._totals.get(key, 0.0) + more

    def samples(self, current: Optional[p.Progress], busy: Optional[p.Busy], now: float) -> Iterator[MetricSample]:
        """Yield the metrics of training.

        Args:
            current: Report of rank 0 in the present round, or None if rank 0 is not a worker of this pod. In the latter
                case, the pod still serves its counters.
            busy: Summary of the ranks' own work, on a coordinator.
            now: Present monotonic time in seconds.
        """
        if busy is not None:
            for of, seconds in (("coordinator", busy.coordinator), ("median", busy.median), ("slowest", busy.most)):
                self._add((f.BUSY_SECONDS, of), seconds)
        if self._last is not None:
            yield MetricSample(f.STEP_SECONDS, self._step_seconds)
        if self._knows_tokens:
            yield MetricSample(f.TOKENS, self._tokens)
        for key, seconds in self._totals.items():
            family, *labels = key if isinstance(key, tuple) else (key,)
            yield MetricSample(family, seconds, tuple(labels))
        if current is not None:
            yield from self._gauges(current, now)

    def _gauges(self, progress: p.Progress, now: float) -> Iterator[MetricSample]:
        yield MetricSample(f.STEP, progress.step)
        if progress.position:  # 0 if a script does not report its position
            yield MetricSample(f.SAMPLES, progress.position)
        if progress.steps is not None:
            yield MetricSample(f.STEPS, progress.steps)
        if progress.tokens is not None:
            yield MetricSample(f.RUN_TOKENS, progress.tokens)
        if progress.tokens_per_second:  # 0 if a script does not report it
            yield MetricSample(f.TOKENS_PER_SECOND, progress.tokens_per_second)
        # A script that reports no loss has NaN, which would look like a diverged loss. Before the first step of a
        # round, there is no loss.
        if self._had_loss and progress.first_step_at is not None:
            yield MetricSample(f.LOSS, progress.loss)
        if progress.evaluated is not None:
            yield MetricSample(f.VALIDATION_LOSS, progress.evaluated.loss)
            yield MetricSample(f.VALIDATION_STEP, progress.evaluated.step)
            if progress.evaluated.perplexity is not None:
                yield MetricSample(f.VALIDATION_PERPLEXITY, progress.evaluated.perplexity)
            if progress.evaluated.token_accuracy is not None:
                yield MetricSample(f.VALIDATION_ACCURACY, progress.evaluated.token_accuracy)
            if progress.evaluated.bits_per_byte is not None:
                yield MetricSample(f.VALIDATION_BITS_PER_BYTE, progress.evaluated.bits_per_byte)
            for family, sets in (
                (f.VALIDATION_SET_LOSS, progress.evaluated.sets),
                (f.VALIDATION_SET_ACCURACY, progress.evaluated.set_token_accuracies),
                (f.VALIDATION_SET_BITS_PER_BYTE, progress.evaluated.set_bits_per_byte),
            ):
                for name, value in itertools.islice(sets.items(), p.MOST_METRICS):
                    yield MetricSample(family, value, (name[:LONGEST_NAME],))
        if progress.mfu is not None:
            yield MetricSample(f.MFU, progress.mfu)
        if progress.save_seconds is not None:
            yield MetricSample(f.SLOWEST_SAVE, progress.save_seconds)
        if progress.snapshot_step is not None:
            yield MetricSample(f.SNAPSHOT_STEP, progress.snapshot_step)
            yield MetricSample(f.SNAPSHOT_AGE, max(0.0, now - self._snapshot[1]))
        for part in _START_PARTS:
            if part in progress.timeline:
                yield MetricSample(f.START_SECONDS, progress.timeline[part], (part,))
        yield from _named_samples(progress.metrics)


def _named_samples(metrics: Mapping[str, float]) -> Iterator[MetricSample]:
    for name, value in itertools.islice(metrics.items(), p.MOST_METRICS):
        if name in _OWN_METRICS:
            yield MetricSample(_OWN_METRICS[name], value)
        else:
            yield MetricSample(f.METRIC, value, (name[:LONGEST_NAME],))
