"""Diagnosis of a job with a table of checks.

Each check returns a finding (a problem with its cost and advice) or None.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

from concertina.diagnosis import failure_checks, memory_checks, pace_checks, state
from concertina.diagnosis.evidence import JobEvidence, Window
from concertina.diagnosis.finding import Finding, Severity
from concertina.diagnosis.problems import Problem
from concertina.durations import duration

Check = Callable[[JobEvidence], Finding | None]
CHECKS: tuple[Check, ...] = (
    failure_checks.failed,
    failure_checks.stalled,
    failure_checks.operator_down,
    failure_checks.world_below_minimum,
    state.hang,
    failure_checks.restarts_nearly_used,
    failure_checks.frequent,
    state.loss_nan,
    state.loss_spike,
    state.corrupt,
    state.data_mismatch,
    state.storage_refuses,
    state.checkpoint_old,
    state.tracker_unreachable,
    pace_checks.slow_checkpoint,
    pace_checks.input_bottleneck,
    pace_checks.straggler,
    pace_checks.exposed_communication,
    pace_checks.low_mfu,
    pace_checks.low_gpu_utilization,
    memory_checks.memory_grows,
)
"""Checks in the order in which they run. If two checks find the same problem, only the first finding is used."""

LEAST_SHARE = 0.005
"""Smallest share of a period that a text mentions, from 0 to 1."""


@dataclasses.dataclass(frozen=True)
class Diagnosis:
    """Findings about a job, and the observations on which they are based."""

    findings: tuple[Finding, ...]
    """Findings, in order of severity (critical findings first), and then in order of their cost."""
    saw: tuple[str, ...]
    """Observations as sentences, which also show why there are no other findings."""


def diagnose(evidence: JobEvidence) -> Diagnosis:
    findings: dict[Problem, Finding] = {}
    for check in CHECKS:
        if (finding := check(evidence)) is not None:
            findings.setdefault(finding.problem, finding)
    order = sorted(findings.values(), key=lambda entry: (entry.severity is not Severity.CRITICAL, -entry.lost))
    return Diagnosis(tuple(order), tuple(_observations(evidence)))


def cost(finding: Finding, hourly: float | None, currency: str) -> str:
    """Return a text about the time and money that a problem costs; empty if the problem costs no time."""
    if finding.lost < LEAST_SHARE:
        return ""
    money = f", {finding.lost * hourly:.2f} {currency} an hour" if hourly else ""
    return f"it costs {60 * finding.lost:.0f} s of each minute{money}"


def _observations(evidence: JobEvidence) -> Iterator[str]:
    window, status = evidence.window, evidence.status
    if window.total:
        yield f"time of {window.of}: {shares(window)}"
    if status.goodput.at and status.goodput.percent is None:
        yield "the goodput is unknown: the script has reported no step (call trainingjob.report)"
    if status.progress is not None:
        progress = status.progress
        of = f" of {progress.steps}" if progress.steps else ""
        loss = f", loss {progress.loss:.4g}" if progress.loss is not None and progress.step else ""
        yield f"step {progress.step}{of}{loss}, reported {duration(evidence.age(progress.at))} ago"
    restarts, incidents = status.restarts, len(status.incidents)
    yield f"failures: {restarts.total}, {restarts.in_window} of them in the window; incidents: {incidents}"
    if newest := status.last_checkpoint:
        yield f"newest checkpoint: step {newest.step}, {duration(evidence.age(newest.at))} old"
    if evidence.agents:
        yield f"agents asked: {len({agent.replica for agent in evidence.agents})}"
    if evidence.steps:
        yield f"lines of steps read: {len(evidence.steps)}"
    if evidence.live and evidence.recent is None and not evidence.ended:
        yield "the status did not change during the diagnosis: the figures are for the whole run"


def shares(window: Window) -> str:
    """Return the shares of time in a period, largest first, such as `productive 93%, input 5%`."""
    parts = sorted(window.seconds.items(), key=lambda part: -part[1])
    return ", ".join(f"{name} {part / window.total:.0%}" for name, part in parts if part >= LEAST_SHARE * window.total)
