"""Alerts, one for each problem that metrics can show. All thresholds are in concertina/diagnosis/problems.py."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any

from concertina.diagnosis import problems
from concertina.diagnosis.problems import Problem
from monitoring.promql import LOST, TIME, TRAINING, UNKNOWN, by, grown, of_jobs

WINDOW = "30m"
"""Window over which shares of the time are measured. It is long enough for some failures and evaluations."""
SPENT = f"namespace_trainingjob_class:concertina_trainingjob_time_seconds:grown{WINDOW}"
"""Recorded series, because several alerts use it: seconds of each class within the window."""
STALLED = "concertina_trainingjob_stalled"
STALLS = (
    *("StorageUnavailable", "DataUnavailable", "AgentsUnreachable", "DataChanged", "Damaged", "SilentCorruption"),
    *("LossNotFinite", "LossSpike", "Hang"),
)
"""Reasons of the condition Stalled or Degraded that have problems of their own."""
PHASE = "concertina_trainingjob_phase"
AT_REST = "Complete|Failed|Queued|Suspending|Suspended|Deleting"
NOT_AT_REST = f'unless on (namespace, trainingjob) {PHASE}{{phase=~"{AT_REST}"}}'
"""Part of an expression that excludes jobs at rest, whose figures stay in their status."""
MOSTLY_TRAINS = f'and sum {by()} ({SPENT}{{class=~"{TRAINING}"}}) > {problems.LEAST_TRAINING:g} * sum {by()} ({SPENT})'
"""Part of an expression that requires mostly training in the window. The first steps of a round wait for many things,
so a short time of training shows no pattern."""
TRAINS = f'and on (namespace, trainingjob) {PHASE}{{phase="Training"}}'
JOB = "{{ $labels.namespace }}/{{ $labels.trainingjob }}"
PERCENT = "{{ $value | humanizePercentage }}"
DURATION = "{{ $value | humanizeDuration }}"
NUMBER = "{{ $value | humanize }}"


HALF_AN_HOUR = "30m"


class Severity(enum.StrEnum):
    CRITICAL = "critical"
    """Work is lost or may be lost, or training has stopped: act now."""
    WARNING = "warning"
    """The problem costs time, or will stop training: act today."""


@dataclass(frozen=True)
class Alert:
    problem: Problem
    severity: Severity
    lasts: str
    """Time for which the expression must hold before the alert fires."""
    expression: str
    summary: str
    """Summary with the job and the figure."""
    description: str

    @property
    def name(self) -> str:
        return f"Concertina{self.problem}"

    def rule(self) -> dict[str, Any]:
        return {
            "alert": self.name,
            "expr": self.expression,
            "for": self.lasts,
            "labels": {"severity": self.severity.value},
            "annotations": {
                "summary": self.summary,
                "description": self.description,
                "runbook_url": self.problem.runbook,  # of which the chart replaces RUNBOOKS by its value
            },
        }


def _share(classes: str, of: str) -> str:
    """Return a PromQL expression for the share that the time of some classes has in the time of the classes `of`.

    `classes` and `of` are regular expressions for the names of classes of time, such as productive or recovery.
    """
    spent, whole = (f'sum {by()} ({SPENT}{{class=~"{each}"}})' for each in (classes, of))
    return f"{spent} / ({whole} > 0)"


def _part_of_training(
    problem: Problem, time: str, threshold: float, summary: str, description: str, besides: str = ""
) -> Alert:
    """Return an alert that fires if the classes of time `time` take too large a share of the training time.

    `besides` is an expression for jobs that also have the problem, whatever the share.
    """
    expression = f"{_share(time, TRAINING)} > {threshold:g} {MOSTLY_TRAINS} {NOT_AT_REST}"
    if besides:
        expression = f"{expression} or {besides}"
    return Alert(problem, Severity.WARNING, "10m", expression, f"{JOB}: {summary.format(PERCENT)}", description)


def _failed(*reasons: str) -> str:
    """Return a PromQL expression for jobs with a recent failure of one of the given reasons.

    Recent means within the job's failure window. Jobs that ended by such a failure count too. The value of the
    expression is the number of such failures.
    """
    where = f'reason=~"{"|".join(reasons)}"'
    counted = "concertina_trainingjob_failures_in_window"
    return f"sum {by()} ({of_jobs(counted, 'reason', where=where)}) or {_stalled(*reasons)}"


def _stalled(*reasons: str) -> str:
    """Return a PromQL expression for jobs that wait for a person, or have failed, for one of the given reasons."""
    return of_jobs(STALLED, where=f'reason=~"{"|".join(reasons)}"')


_MFU = of_jobs("concertina_trainingjob_mfu_ratio")
"""Only jobs of the bundled trainer have an MFU."""
_BUSY_GPUS = f"max {by()} (avg {by('replica')} (avg_over_time(concertina_gpu_utilization_ratio[{HALF_AN_HOUR}])))"
"""Share of the time of the busiest replica's GPUs, because the GPUs of standby replicas are idle."""
_CLASSES = f'class=~"{TRAINING}"'
_WAITED = of_jobs("concertina_trainingjob_checkpoint_waited_seconds")
_TRAINED = f"sum {by()} ({of_jobs(TIME, 'class', where=_CLASSES)})"
"""Time of training, which is the age of the newest checkpoint of a job without one."""
_INTERVAL = of_jobs("concertina_trainingjob_checkpoint_interval_seconds")
_LOSS = of_jobs("concertina_trainingjob_loss")
_USUAL_LOSS = f"quantile_over_time(0.5, ({_LOSS})[1h:1m])"
_HOURS = problems.MEMORY_HOURS
_MEMORY = f"sum {by('replica')} (concertina_worker_resident_memory_bytes)"
_BEFORE = f"sum {by('replica')} (concertina_worker_resident_memory_bytes offset {{}})"
_OTHERS_STALLED = of_jobs(STALLED, "reason", where=f'reason!~"{"|".join(STALLS)}"')
_SHIPPED = f"sum {by()} (increase(concertina_checkpoint_shards_shipped_total[15m])) > 0"
_REFUSED = f"sum {by()} (increase(concertina_checkpoint_storage_failures_total[15m])) > 0"

ALERTS = (
    Alert(
        Problem.LOW_MFU,
        Severity.WARNING,
        HALF_AN_HOUR,
        f"{_MFU} < {problems.LOW_MFU:g} {TRAINS}",
        f"{JOB}: training uses only {PERCENT} of the devices' peak arithmetic",
        "Training is slower than the devices allow. The parts of a step show why.",
    ),
    Alert(
        Problem.LOW_GPU_UTILIZATION,
        Severity.WARNING,
        HALF_AN_HOUR,
        f"{_BUSY_GPUS} < {problems.LOW_GPU_UTILIZATION:g} {TRAINS} unless on (namespace, trainingjob) {_MFU}",
        f"{JOB}: the GPUs run kernels for only {PERCENT} of the time",
        "The GPUs wait for most of a step: for data, for Python, or for other workers.",
    ),
    _part_of_training(
        Problem.EXPOSED_COMMUNICATION,
        "communication",
        problems.EXPOSED_COMMUNICATION,
        "{} of the training time is spent waiting for collectives",
        "Collectives do not overlap with computation: the network is slow, or each worker has too little "
        "work in a step.",
    ),
    _part_of_training(
        Problem.INPUT_BOTTLENECK,
        "input",
        problems.INPUT_BOTTLENECK,
        "{} of the training time is spent waiting for data",
        "Training consumes data faster than they arrive.",
        _stalled("DataUnavailable"),
    ),
    _part_of_training(
        Problem.STRAGGLER,
        "straggler",
        problems.STRAGGLER,
        "{} of the training time is spent waiting for the slowest rank",
        "One rank takes longer than the other ranks in every step.",
    ),
    _part_of_training(
        Problem.SLOW_CHECKPOINT,
        "checkpoint",
        problems.SLOW_CHECKPOINT,
        "{} of the training time is spent waiting for snapshots and checkpoints",
        "Saves take longer than the steps between them.",
    ),
    Alert(
        Problem.CHECKPOINT_OLD,
        Severity.CRITICAL,
        "5m",
        f"(({_WAITED} or {_TRAINED}) > {problems.CHECKPOINT_INTERVALS} * {_INTERVAL}) {TRAINS} "
        f"unless on (namespace, trainingjob) {_stalled('StorageUnavailable')}",
        f"{JOB}: no checkpoint for {DURATION} of training",
        f"There should have been {problems.CHECKPOINT_INTERVALS} checkpoints in that time. If all replicas "
        "fail at once, the training since the last checkpoint is lost.",
    ),
    Alert(
        Problem.STORAGE_REFUSES,
        Severity.CRITICAL,
        "5m",
        f"{_stalled('StorageUnavailable')} or ({_REFUSED} unless {_SHIPPED})",
        f"{JOB}: durable storage accepts no checkpoints",
        "Training continues, but nothing is saved durably: the bucket or disk is full or missing, or the "
        "job may not write to it.",
    ),
    Alert(
        Problem.FREQUENT_FAILURES,
        Severity.WARNING,
        "10m",
        f"{_share(LOST, f'{TRAINING}|{UNKNOWN}|{LOST}')} > {problems.FREQUENT_FAILURES:g} {NOT_AT_REST}",
        f"{JOB}: {PERCENT} of the time is spent on recovery and repeated steps",
        "Failures or changes of members are too frequent.",
    ),
    Alert(
        Problem.HANG,
        Severity.CRITICAL,
        "0m",
        _failed("Hang", "CollectiveHang"),
        f"{JOB}: training hung",
        "No rank finished a step for failurePolicy.hangTimeoutSeconds. The event Hang names the rank that the others "
        "wait for, and the collective.",
    ),
    Alert(
        Problem.RESTARTS_NEARLY_USED,
        Severity.CRITICAL,
        "0m",
        f"{of_jobs('concertina_trainingjob_restarts_remaining')} <= {problems.RESTARTS_REMAINING} "
        f"and on (namespace, trainingjob) concertina_trainingjob_failures_in_window > 0 {NOT_AT_REST}",
        f"{JOB}: the job fails after {NUMBER} more failures",
        "failurePolicy.maxRestarts is nearly used up within its window.",
    ),
    Alert(
        Problem.WORLD_BELOW_MINIMUM,
        Severity.CRITICAL,
        "10m",
        f"{of_jobs('concertina_trainingjob_ready_replicas')} < {of_jobs('concertina_trainingjob_min_replicas')} "
        f"{NOT_AT_REST}",
        f"{JOB}: only {NUMBER} replicas train, fewer than its minimum",
        "With fewer than elastic.minReplicas replicas, the job does not train. It waits for nodes, quota or pods.",
    ),
    Alert(
        Problem.LOSS_NAN,
        Severity.CRITICAL,
        "0m",
        f"count {by()} (concertina_training_loss != concertina_training_loss) or {_failed('LossNotFinite')}",
        f"{JOB}: the loss is not a number",
        "Further training on this state is useless. With trainer.anomalies, the job goes back to an "
        "earlier state by itself.",
    ),
    Alert(
        Problem.LOSS_SPIKE,
        Severity.WARNING,
        "5m",
        f"{_LOSS} / ({_USUAL_LOSS} > 0) > {problems.LOSS_SPIKE:g} {TRAINS} or {_failed('LossSpike')}",
        f"{JOB}: the loss has jumped",
        f"For minutes, the loss has been more than {problems.LOSS_SPIKE:g} times that of the last hour, or "
        "the job went back because of a jump.",
    ),
    Alert(
        Problem.DATA_DIGEST_MISMATCH,
        Severity.CRITICAL,
        "0m",
        _failed("DataChanged"),
        f"{JOB}: the data differ from those that the saved state was trained on",
        "Positions in one data set have no meaning in another, so the run does not continue.",
    ),
    Alert(
        Problem.CORRUPT_STATE,
        Severity.CRITICAL,
        "0m",
        _failed("Damaged", "SilentCorruption"),
        f"{JOB}: stored bytes are damaged",
        "The checksum of a checkpoint, a data file or the weights in memory does not match.",
    ),
    Alert(
        Problem.MEMORY_GROWS,
        Severity.WARNING,
        HALF_AN_HOUR,
        f"{_MEMORY} > {_BEFORE.format('20m')} > {_BEFORE.format('40m')} "
        f"and ({_MEMORY} - {_BEFORE.format('1h')}) * {_HOURS:g} > {_MEMORY}",
        f"{JOB}: the memory of the workers in {{{{ $labels.replica }}}} grows, now {{{{ $value | humanize1024 }}}}B",
        f"At the rate of the last hour, the memory doubles within {_HOURS:g} hours. Workers are killed at "
        "the container's limit.",
    ),
    Alert(
        Problem.OPERATOR_ISOLATED,
        Severity.CRITICAL,
        "1m",
        f"max (concertina_operator_isolated) == 1 or {_stalled('AgentsUnreachable')}",
        "The operator can't reach most agents",
        "The operator suspects its own network, so it declares no replica lost. Jobs do not recover from "
        "silent failures until the agents answer again.",
    ),
    Alert(
        Problem.OPERATOR_DOWN,
        Severity.CRITICAL,
        f"{problems.OPERATOR_SILENT_SECONDS / 60:g}m",
        'absent(leader_election_master_status{name="concertina-operator"} == 1)',
        "No operator is active, or Prometheus can't reach any",
        "Running jobs continue to train, but nothing recovers, starts or changes.",
    ),
    Alert(
        Problem.TRACKER_UNREACHABLE,
        Severity.WARNING,
        "10m",
        f"{of_jobs('concertina_trainingjob_tracker_unreachable')} == 1 {NOT_AT_REST}",
        f"{JOB}: the tracker accepts no records",
        "Training continues, and the records wait on the node.",
    ),
    Alert(
        Problem.JOB_FAILED,
        Severity.CRITICAL,
        "0m",
        f'{_OTHERS_STALLED} and on (namespace, trainingjob) {PHASE}{{phase="Failed"}}',
        f"{JOB} has failed: {{{{ $labels.reason }}}}",
        "The job does not continue by itself. Its state is in its last checkpoint.",
    ),
    Alert(
        Problem.JOB_STALLED,
        Severity.CRITICAL,
        "5m",
        f'{_OTHERS_STALLED} unless on (namespace, trainingjob) {PHASE}{{phase="Failed"}}',
        f"{JOB} needs a person: {{{{ $labels.reason }}}}",
        "The message of the condition Stalled says what to do. The job then continues by itself.",
    ),
)


def rules() -> dict[str, Any]:
    """Return the content of a rules file of Prometheus, which is also the spec of a PrometheusRule."""
    recorded = {"record": SPENT, "expr": grown(TIME, "class", window=WINDOW)}
    often = [recorded, *(alert.rule() for alert in ALERTS if alert.lasts != HALF_AN_HOUR)]
    seldom = [alert.rule() for alert in ALERTS if alert.lasts == HALF_AN_HOUR]
    return {
        "groups": [
            {"name": "concertina", "rules": often},
            # What must last so long need not be asked for at each scrape: the memory of 10,000 replicas takes seconds.
            {"name": "concertina-seldom", "interval": "2m", "rules": seldom},
        ]
    }
