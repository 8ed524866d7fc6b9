"""Prometheus metrics of each job, computed from the job's status at each scrape.

No values are stored, so the series of a job disappear with the job. docs/reference/metrics.md lists all metrics.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from concertina.api.accounting import Cost
from concertina.api.checkpoint_interval import checkpoint_interval, unsaved_seconds
from concertina.api.status import CheckpointMark, JobProgress, JobStatus, SnapshotMark, unix_seconds
from concertina.plan.facts.decision import Phase
from concertina.plan.observed import JobView

JOB_LABELS = ("namespace", "trainingjob")
MOST_REASONS = 16
"""Largest number of failure reasons of one job that have a time series of their own.

Rarer reasons share one label value.
"""
OTHER = "Other"
Values = Iterator[tuple[tuple[str, ...], float]]
"""Samples of one metric for one job. A sample is the values of the metric's own labels, and a number."""


@dataclass(frozen=True)
class JobFamily:
    """A Prometheus metric with one or more series for each job."""

    name: str
    """Name of the metric. For a counter, the suffix _total is left out, as prometheus_client expects."""
    help: str
    values: Callable[[JobView, float], Values]
    """Function that returns the samples for a job, given the time in Unix seconds."""
    labels: tuple[str, ...] = ()
    counter: bool = False

    @property
    def asked_for(self) -> str:
        """Name of the metric in Prometheus queries. For a counter, this name ends in `_total`."""
        return f"{self.name}_total" if self.counter else self.name

    def metric(self) -> CounterMetricFamily | GaugeMetricFamily:
        """Return a metric family of prometheus_client without samples."""
        kind = CounterMetricFamily if self.counter else GaugeMetricFamily
        return kind(self.name, self.help, labels=[*JOB_LABELS, *self.labels])


def _info(job: JobView, _: float) -> Values:
    spec = job.spec
    launcher, trainer = (spec.launcher.value, "bundled" if spec.bundled else "command") if spec else ("", "")
    yield (job.uid, launcher, trainer), 1.0


def _phase(job: JobView, _: float) -> Values:
    yield (phase_of(job.status),), 1.0


def phase_of(status: JobStatus) -> str:
    """Return the job's phase, which the Status column of `kubectl get` shows."""
    return status.phase or Phase.WAITING.value


def _conditions(job: JobView, _: float) -> Values:
    for condition in job.status.conditions:
        yield (condition.type, condition.status), 1.0


def _failures(job: JobView, _: float) -> Values:
    reasons = Counter(restart.reason for restart in job.status.restarts.recent)
    frequent = dict(reasons.most_common(MOST_REASONS))
    for reason, count in frequent.items():
        yield (reason,), float(count)
    if more := reasons.total() - sum(frequent.values()):
        yield (OTHER,), float(more)


def _time(job: JobView, _: float) -> Values:
    if job.status.goodput.at is not None:
        for name, seconds in job.status.goodput.by_class.items():
            yield (name,), seconds


def _stalled(job: JobView, _: float) -> Values:
    if trouble := job.status.trouble:
        yield (trouble.reason,), 1.0


def _recovery(job: JobView, _: float) -> Values:
    for entry in job.status.goodput.recovery:
        yield (entry.cause,), entry.seconds


def _cost(value: Callable[[Cost], float | None]) -> Callable[[JobView, float], Values]:
    def values(job: JobView, _: float) -> Values:
        cost = job.status.cost
        if cost is not None and (money := value(cost)) is not None:
            yield (cost.currency,), money

    return values


def _goodput(job: JobView, _: float) -> float | None:
    percent = job.status.goodput.percent
    return None if percent is None else percent / 100


def _tracker(job: JobView, _: float) -> float | None:
    return float(job.status.tracking is not None) if job.spec and job.spec.tracking else None


def _avoided(job: JobView, now: float) -> Values:
    yield (), float(sum(unix_seconds(node.until) > now for node in job.status.avoided_nodes))


def _one(value: Callable[[JobView, float], float | None]) -> Callable[[JobView, float], Values]:
    """Return a function that yields the sample of a metric without own labels, unless `value` returns None."""

    def values(job: JobView, now: float) -> Values:
        number = value(job, now)
        if number is not None:
            yield (), float(number)

    return values


def _age(mark: JobProgress | CheckpointMark | SnapshotMark | None, now: float) -> float | None:
    return None if mark is None else max(0.0, now - unix_seconds(mark.at))


def _gauge(name: str, help: str, value: Callable[[JobView, float], float | None]) -> JobFamily:
    return JobFamily(f"concertina_trainingjob_{name}", help, _one(value))


def _progress(name: str, help: str, value: Callable[[JobProgress], float | None]) -> JobFamily:
    """Return a metric family for a value of the job's progress. A job has no series before its first reported step."""
    return _gauge(name, help, lambda job, _: value(job.status.progress) if job.status.progress else None)


def _several(name: str, help: str, values: Callable[[JobView, float], Values], *labels: str) -> JobFamily:
    return JobFamily(f"concertina_trainingjob_{name}", help, values, labels)


def _counter(name: str, help: str, value: Callable[[JobStatus], float]) -> JobFamily:
    return JobFamily(f"concertina_trainingjob_{name}", help, _one(lambda job, _: value(job.status)), counter=True)


FAMILIES = (
    _several(
        "info",
        "1, with the job's uid, its launcher, and its trainer: bundled or command.",
        _info,
        "uid",
        "launcher",
        "trainer",
    ),
    _several("phase", "1, with the value of the column Status.", _phase, "phase"),
    _several(
        "condition",
        "1 for each condition of the status, with its value: True, False or Unknown.",
        _conditions,
        "type",
        "status",
    ),
    _gauge("wanted_replicas", "Value of spec.replicas.", lambda job, _: job.spec.replicas if job.spec else None),
    _gauge(
        "min_replicas",
        "Smallest number of replicas with which training continues.",
        lambda job, _: job.spec.min_replicas if job.spec else None,
    ),
    _gauge("replicas", "Pods that are not finished, without standby replicas.", lambda job, _: job.status.replicas),
    _gauge("ready_replicas", "Replicas that are members of the round.", lambda job, _: job.status.world.replicas),
    _gauge(
        "standby_replicas_ready",
        "Standby replicas that are ready to join.",
        lambda job, _: job.status.standby_replicas.ready,
    ),
    _gauge("world_size", "Workers of the round.", lambda job, _: job.status.world.workers),
    _counter("rounds", "Committed rounds.", lambda status: status.rounds),
    _counter(
        "failures",
        "Failures since the job was created, including the one that ended it.",
        lambda status: status.restarts.total,
    ),
    _several(
        "failures_in_window",
        "Failures within failurePolicy.windowSeconds that the status lists, by reason.",
        _failures,
        "reason",
    ),
    _gauge(
        "restarts_remaining",
        "Failures that are still allowed in this window.",
        lambda job, _: job.status.restarts.budget,
    ),
    _several(
        "stalled",
        "1 while the condition Stalled or Degraded is true, with its reason: you must act, or the job has failed.",
        _stalled,
        "reason",
    ),
    _gauge(
        "goodput_ratio",
        "Goodput from 0 to 1 (docs/accounting.md#goodput). Absent while it is unknown.",
        _goodput,
    ),
    _gauge(
        "useful_tokens_per_second",
        "Tokens that the job has trained on, each counted once, divided by its time without suspensions.",
        lambda job, _: job.status.goodput.tokens_per_second,
    ),
    JobFamily(
        "concertina_trainingjob_time_seconds",
        "Seconds since the job's start, by class. The classes are the fields of status.goodput that "
        "end in Seconds, without that ending. They add up to the whole time.",
        _time,
        ("class",),
        counter=True,
    ),
    JobFamily(
        "concertina_trainingjob_recovery_seconds",
        "Seconds of the class recovery by cause, with at most 32 causes. A lower bound for scripts "
        "that report no steps.",
        _recovery,
        ("cause",),
        counter=True,
    ),
    _several("cost", "Cost of the job so far, by spec.price.", _cost(lambda cost: cost.total), "currency"),
    _several(
        "cost_per_million_tokens",
        "Cost of a million tokens by spec.price, each token counted once.",
        _cost(lambda cost: cost.per_million_tokens),
        "currency",
    ),
    _progress(
        "step",
        "Steps finished since the run began. It falls when steps are trained again. Counted steps "
        "begin at 1 after each start.",
        lambda progress: progress.step,
    ),
    _progress("steps", "Steps of the whole run, if known.", lambda progress: progress.steps),
    _counter("steps_replayed", "Steps that were trained again after failures.", lambda status: status.steps_replayed),
    _progress("loss", "Mean loss of the last reported step.", lambda progress: progress.loss),
    _progress(
        "tokens_per_second", "Tokens trained on per second by all workers.", lambda progress: progress.tokens_per_second
    ),
    _progress(
        "mfu_ratio",
        "Share of the devices' peak arithmetic that training uses, from 0 to 1, with causal attention "
        "counted (docs/accounting.md).",
        lambda progress: progress.mfu,
    ),
    _gauge(
        "progress_age_seconds",
        "Seconds since the last reported step.",
        lambda job, now: _age(job.status.progress, now),
    ),
    _gauge(
        "checkpoint_age_seconds",
        "Seconds since the newest durable checkpoint became durable.",
        lambda job, now: _age(job.status.last_checkpoint, now),
    ),
    _gauge(
        "checkpoint_waited_seconds",
        "Part of the checkpoint's age that counts towards the next checkpoint, without suspensions. "
        "With an interval in steps, it is counted by steps.",
        lambda job, now: unsaved_seconds(job.spec, job.status, now),
    ),
    _gauge(
        "checkpoint_step",
        "Step of the newest durable checkpoint.",
        lambda job, _: job.status.last_checkpoint.step if job.status.last_checkpoint else None,
    ),
    _gauge(
        "checkpoint_interval_seconds",
        "Seconds between checkpoints by spec.checkpoint. An interval in steps is converted by the "
        "duration of the last step.",
        lambda job, _: checkpoint_interval(job.spec, job.status),
    ),
    _gauge(
        "snapshot_age_seconds",
        "Seconds since the newest snapshot in node memory was complete on peers.",
        lambda job, now: _age(job.status.last_snapshot, now),
    ),
    _gauge(
        "tracker_unreachable",
        "1 while the tracker of spec.tracking accepts nothing, else 0. Absent without a tracker.",
        _tracker,
    ),
    _gauge(
        "stragglers", "Ranks for which the other ranks wait in every step.", lambda job, _: len(job.status.stragglers)
    ),
    _several("avoided_nodes", "Nodes that new pods currently avoid.", _avoided),
)


class JobCollector(Collector):
    """Collector for the metrics of a fixed list of jobs. Any thread may use it."""

    def __init__(self, jobs: Sequence[JobView], now: float | None = None) -> None:
        """Create a collector for the metrics of these jobs.

        Args:
            jobs: Jobs to report.
            now: Time in Unix seconds; the current time by default.
        """
        self._jobs, self._now = jobs, time.time() if now is None else now

    def collect(self) -> Iterable[Metric]:
        for family in FAMILIES:
            metric = family.metric()
            for job in self._jobs:
                with contextlib.suppress(ValueError):  # an invalid timestamp only drops one series
                    for labels, value in family.values(job, self._now):
                        metric.add_metric([job.namespace, job.name, *labels], value)
            yield metric
