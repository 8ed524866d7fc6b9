"""Page of `concertina report`. Its Content-Security-Policy prevents the browser from loading other resources."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar
from xml.etree import ElementTree as xml

from concertina.amounts import amount
from concertina.api.accounting import Goodput, Incident
from concertina.api.loss_history import Point, unpacked
from concertina.api.status import ConditionType, JobStatus, rfc3339, unix_seconds
from concertina.diagnosis.diagnose import Diagnosis, cost
from concertina.diagnosis.evidence import JobEvidence, StepLine
from concertina.durations import duration
from concertina.kube.resources import Raw
from concertina.report import plots
from concertina.report.document import STYLE, bullets, document, paragraph, section, table, written
from concertina.terminal import show

POLICY = "default-src 'none'; style-src 'unsafe-inline'"
FEWEST_POINTS = 2
S = TypeVar("S", Point, StepLine)


def page(
    name: str,
    evidence: JobEvidence,
    diagnosis: Diagnosis,
    unseen: Sequence[str],
    events: Sequence[Raw] = (),
) -> str:
    """Return the complete page as HTML, without references to other files.

    Args:
        name: NAMESPACE/NAME of the job.
        evidence: Input of the diagnosis.
        diagnosis: Diagnosis of the job.
        unseen: Sentences about information that could not be read.
        events: Events about the job, in any order.
    """
    root, head, body = document(f"Run {name}")
    xml.SubElement(head, "meta", {"http-equiv": "Content-Security-Policy", "content": POLICY})
    xml.SubElement(head, "style").text = STYLE
    headline(body, f"Run {name}", evidence.status)
    chapters(body, evidence, diagnosis, unseen, events)
    return written(root)


def headline(body: xml.Element, title: str, status: JobStatus) -> None:
    """Add the heading of the report: the title, the current state of the job, and its progress."""
    xml.SubElement(body, "h1").text = title
    ready = status.condition(ConditionType.READY)
    state = paragraph(body, "")
    word = xml.SubElement(state, "strong", {"class": show.COLOURS.get(show.word(status), "yellow")})
    word.text = show.word(status)
    word.tail = f"  {ready.message if ready else 'no operator has seen the job'}"
    if status.progress and status.progress.percent is not None:
        xml.SubElement(body, "progress", max="100", value=f"{status.progress.percent:.1f}")


def chapters(
    body: xml.Element,
    evidence: JobEvidence,
    diagnosis: Diagnosis,
    unseen: Sequence[str],
    events: Sequence[Raw],
) -> None:
    """Add all sections of the report about a run, the most urgent section first."""
    table(body, (), _summary(evidence))
    _findings(section(body, "What is wrong"), evidence, diagnosis)
    _time(section(body, "Where the time went"), evidence.status.goodput)
    _curves(body, evidence)
    _incidents(section(body, "Incidents"), evidence.status)
    if events:
        table(section(body, "Last events"), show.EVENT_COLUMNS, show.last_events(events))
    table(section(body, "Checkpoints"), (), _checkpoints(evidence.status))
    bullets(section(body, "What this page goes by"), (*diagnosis.saw, *unseen))


def _summary(evidence: JobEvidence) -> Iterator[tuple[str, str]]:
    status, world = evidence.status, evidence.status.world
    runs = status.is_true(ConditionType.RUNNING)  # A job that does not run has no speed.
    yield "Seen at", rfc3339(round(evidence.at))
    end = f" to {_without_fraction(status.completion_time)}" if status.completion_time else ""
    yield "Time", f"from {rfc3339(round(evidence.created))}{end}"
    if world.round:
        yield "World", f"{world.size} replicas, {amount(world.workers, 'worker')}, round {world.round}"
    if progress := status.progress:
        share = f" ({progress.percent:.0f}%)" if progress.percent is not None else ""
        of = f" of {progress.steps}{share}" if progress.steps else ""
        eta = f", {duration(progress.eta_seconds)} to go" if runs and progress.eta_seconds is not None else ""
        yield "Steps", f"{progress.step}{of}, {status.steps_replayed} trained again{eta}"
        if progress.loss is not None:
            yield "Loss", f"{progress.loss:.6g}"
        if progress.evaluation and progress.evaluation.loss is not None:
            yield "Evaluation", f"{progress.evaluation.loss:.6g} at step {progress.evaluation.step}"
        if progress.tokens is not None:
            pace = progress.tokens_per_second if runs else None
            yield "Tokens", f"{progress.tokens:,}" + (f", {pace:,.0f} a second" if pace is not None else "")
        if progress.mfu is not None:
            yield "MFU", show.mfu(progress)
    yield "Goodput", show.goodput(status.goodput)
    yield "Rounds", str(status.rounds)
    yield "Failures", str(status.restarts.total)
    if spent := status.cost:
        token_cost = spent.per_million_tokens
        tokens = f", {token_cost:.4g} per million tokens" if token_cost is not None else ""
        yield "Cost", f"{spent.total:.2f} {spent.currency} for {spent.replica_hours:.1f} replica-hours{tokens}"


def _without_fraction(timestamp: str) -> str:
    """Return a timestamp without fractions of a second."""
    return rfc3339(round(unix_seconds(timestamp)))


def _findings(parent: xml.Element, evidence: JobEvidence, diagnosis: Diagnosis) -> None:
    if not diagnosis.findings:
        paragraph(parent, "No problems were found.")
    price = evidence.spec.price if evidence.spec else None
    for finding in diagnosis.findings:
        box = xml.SubElement(parent, "div", {"class": finding.severity.value})
        xml.SubElement(box, "strong").text = f"{finding.problem}: "
        costs = cost(finding, evidence.hourly, price.currency if price else "")
        paragraph(box, finding.sentence + (f"; {costs}" if costs else ""))
        paragraph(box, f"Next: {finding.advice} ({finding.runbook})")


def _time(parent: xml.Element, goodput: Goodput) -> None:
    parts = sorted(goodput.by_class.items(), key=lambda part: -part[1])
    total = sum(part for _, part in parts)
    if not total:
        paragraph(parent, "No time was counted yet.")
        return
    parent.append(plots.bar(parts))
    table(parent, (), ((_class_name(name), duration(part), f"{part / total:.1%}") for name, part in parts if part))
    if goodput.recovery:
        paragraph(parent, "Recovery by cause:" if goodput.percent is not None else "Recovery by cause (lower bounds):")
        causes = sorted(goodput.recovery, key=lambda cause: -cause.seconds)
        table(parent, (), ((cause.cause, f"{cause.times} x", f"{cause.seconds:.1f} s") for cause in causes))


def _class_name(name: str) -> xml.Element:
    """Return an element with the name of a goodput class, in the colour that the class has in the bar of times."""
    cell = xml.Element("span")
    xml.SubElement(cell, "span", {"class": f"swatch {name}"}).tail = name
    return cell


def _curves(body: xml.Element, evidence: JobEvidence) -> None:
    """Add the plots.

    The numbers of replicas and the losses come from the status and cover the whole run. The seconds per step come from
    the log.
    """
    points = unpacked(evidence.status.history or "").points
    world = [((point.at - evidence.created) / 60, float(point.replicas)) for point in points]
    losses = [(float(point.step), point.loss) for point in _not_undone(points) if point.loss is not None]
    paces = [(float(line.step), line.seconds) for line in _not_undone(evidence.steps)]
    _line(body, "World over time", world, "minutes since the job was created", "replicas", steps=True)
    _line(body, "Loss", losses, "step", "loss")
    if paces:
        _line(body, "Seconds of a step", paces, "step (only the last steps in the log)", "seconds")


def _not_undone(points: Iterable[S]) -> Sequence[S]:
    """Return the points without those of steps that were trained again later."""
    valid_points: list[S] = []
    for point in points:
        while valid_points and valid_points[-1].step >= point.step:
            valid_points.pop()
        valid_points.append(point)
    return valid_points


def _line(body: xml.Element, title: str, points: Sequence[plots.Point], x: str, y: str, steps: bool = False) -> None:
    chapter = section(body, title)
    if len(points) >= FEWEST_POINTS:
        xml.SubElement(chapter, "div", {"class": "scroll"}).append(plots.line(points, x, y, steps))
    else:
        paragraph(chapter, "There are too few points to draw.")


def _incidents(parent: xml.Element, status: JobStatus) -> None:
    if not status.incidents:
        paragraph(parent, "Training was never interrupted.")
        return
    head = ("At", "Round", "Cause", "Replica", "Node", "Without training", "Trained again", "Cost")
    table(parent, head, (_incident(incident, status) for incident in reversed(status.incidents)))


def _incident(incident: Incident, status: JobStatus) -> tuple[str, ...]:
    replayed = (
        f"{amount(incident.steps_replayed, 'step')}, {incident.replayed_seconds:.1f} s"
        if incident.steps_replayed
        else ""
    )
    at_least = "at least " if incident.at_least else ""
    money = f"{at_least}{incident.cost:.2f} {status.cost.currency}" if incident.cost is not None and status.cost else ""
    lost_time = f"{at_least}{incident.seconds:.1f} s"
    return (
        _without_fraction(incident.at),
        str(incident.round),
        incident.cause,
        incident.replica,
        incident.node,
        lost_time,
        replayed,
        money,
    )


def _checkpoints(status: JobStatus) -> Iterator[tuple[str, str]]:
    if newest := status.last_checkpoint:
        yield "Newest", f"step {newest.step} at {_without_fraction(newest.at)}"
        yield "Folder", newest.uri
    else:
        yield "Newest", "there is none"
    if snapshot := status.last_snapshot:
        yield "In node memory", f"step {snapshot.step} at {_without_fraction(snapshot.at)}"
    if interval := status.checkpoint_interval:
        yield "Interval", show.checkpoints_every(interval, status.restarts.total)
    if rollback := status.rollback:
        yield "Rolled back", f"at {_without_fraction(rollback.at)} to step {rollback.step}: {rollback.message}"
    for stretch in status.skipped:
        yield "Left out", f"samples {stretch.begin} to {stretch.end - 1}"
