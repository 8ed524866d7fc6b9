"""From evidence to findings: a table of checks, each of which has something to say or not."""

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
    memory_checks.memory_grows,
)
"""Of two that find the same problem the first is heard."""

LEAST_SHARE = 0.005
"""Of the time, that is worth a word."""


@dataclasses.dataclass(frozen=True)
class Diagnosis:
    findings: tuple[Finding, ...]
    """The most costly first, those that are critical before all others."""
    saw: tuple[str, ...]
    """What was looked at, in sentences: the grounds for finding nothing else."""


def diagnose(seen: JobEvidence) -> Diagnosis:
    found: dict[Problem, Finding] = {}
    for check in CHECKS:
        if (finding := check(seen)) is not None:
            found.setdefault(finding.problem, finding)
    order = sorted(found.values(), key=lambda one: (one.severity is not Severity.CRITICAL, -one.lost))
    return Diagnosis(tuple(order), tuple(_saw(seen)))


def cost(finding: Finding, hourly: float | None, currency: str) -> str:
    """Of a finding that costs time, in words; empty for others."""
    if finding.lost < LEAST_SHARE:
        return ""
    money = f", {finding.lost * hourly:.2f} {currency} an hour" if hourly else ""
    return f"it costs {60 * finding.lost:.0f} s of each minute{money}"


def _saw(seen: JobEvidence) -> Iterator[str]:
    window, status = seen.window, seen.status
    if window.total:
        yield f"time of {window.of}: {shares(window)}"
    if status.goodput.at and status.goodput.percent is None:
        yield "the goodput is unknown: the script has reported no step (trainingjob.report does)"
    if status.progress is not None:
        progress = status.progress
        of = f" of {progress.steps}" if progress.steps else ""
        loss = f", loss {progress.loss:.4g}" if progress.loss is not None and progress.step else ""
        yield f"step {progress.step}{of}{loss}, told of {duration(seen.age(progress.at))} ago"
    restarts, incidents = status.restarts, len(status.incidents)
    yield f"failures: {restarts.total}, {restarts.in_window} of them in the window; incidents: {incidents}"
    if newest := status.last_checkpoint:
        yield f"newest checkpoint: step {newest.step}, {duration(seen.age(newest.at))} old"
    if seen.agents:
        yield f"agents asked: {len({agent.replica for agent in seen.agents})}"
    if seen.steps:
        yield f"lines of steps read: {len(seen.steps)}"
    if seen.live and seen.recent is None and not seen.ended:
        yield "the status did not change while it was looked at: figures are of the whole run"


def shares(window: Window) -> str:
    """Of all its time, the most first, as `productive 93%, input 5%`."""
    parts = sorted(window.seconds.items(), key=lambda part: -part[1])
    return ", ".join(f"{name} {part / window.total:.0%}" for name, part in parts if part >= LEAST_SHARE * window.total)
