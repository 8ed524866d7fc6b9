"""The page: every text goes through ElementTree, which escapes it, and its policy lets a browser load nothing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from xml.etree import ElementTree as xml

from concertina.api.accounting import Goodput, Incident
from concertina.api.history import Point, unpacked
from concertina.api.status import JobStatus, rfc3339
from concertina.diagnosis.diagnose import Diagnosis, cost
from concertina.diagnosis.evidence import Evidence
from concertina.durations import duration
from concertina.report import plots

POLICY = "default-src 'none'; style-src 'unsafe-inline'"
COLOURS = {
    "productive": "#2e7d32", "communication": "#81c784", "straggler": "#f9a825", "input": "#ef6c00",
    "checkpoint": "#6a1b9a", "evaluation": "#0277bd", "compile": "#4dd0e1", "startup": "#90a4ae",
    "recovery": "#c62828", "replayed": "#e57373", "waiting": "#b0bec5", "stalled": "#5d4037", "suspended": "#eceff1",
}  # fmt: skip
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60em; margin: 2em auto; padding: 0 1em; color: #222 }
h1 { font-size: 1.4em } h2 { font-size: 1.1em; margin-top: 2em }
table { border-collapse: collapse } td, th { text-align: left; vertical-align: top; padding: .15em 1.2em .15em 0 }
svg { width: 100%; display: block } svg text { font-size: 11px; fill: #666 }
.line { fill: none; stroke: #1565c0; stroke-width: 1.5 } .grid { stroke: #ddd }
.critical, .warning { border-left: 4px solid #c62828; padding-left: .8em } .warning { border-color: #f9a825 }
.swatch { display: inline-block; width: .8em; height: .8em; margin-right: .4em }
""" + "".join(f".{name} {{ fill: {colour}; background: {colour} }}\n" for name, colour in COLOURS.items())  # fmt: skip
FEWEST_POINTS = 2


def page(name: str, seen: Evidence, found: Diagnosis, unseen: Sequence[str]) -> str:
    """HTML of one file. `name`: NAMESPACE/NAME; `unseen`: sentences about what could not be read."""
    root = xml.Element("html", lang="en")
    head = xml.SubElement(root, "head")
    xml.SubElement(head, "meta", charset="utf-8")
    xml.SubElement(head, "meta", {"http-equiv": "Content-Security-Policy", "content": POLICY})
    xml.SubElement(head, "title").text = f"Run {name}"
    xml.SubElement(head, "style").text = STYLE
    body = xml.SubElement(root, "body")
    xml.SubElement(body, "h1").text = f"Run {name}"
    _table(body, (), _summary(seen))
    _findings(_section(body, "What is wrong"), seen, found)
    _time(_section(body, "Where the time went"), seen.status.goodput)
    _course(body, seen)
    _incidents(_section(body, "Incidents"), seen.status)
    _table(_section(body, "Checkpoints"), (), _checkpoints(seen.status))
    said = _section(body, "What this page goes by")
    _list(said, (*found.saw, *unseen))
    return "<!doctype html>\n" + xml.tostring(root, encoding="unicode", method="html")


def _section(body: xml.Element, title: str) -> xml.Element:
    found = xml.SubElement(body, "section")
    xml.SubElement(found, "h2").text = title
    return found


def _summary(seen: Evidence) -> Iterator[tuple[str, str]]:
    status = seen.status
    ready = status.condition("Ready")
    yield "State", f"{status.phase}: {ready.message}" if ready else "no operator has seen the job"
    yield "Seen at", rfc3339(round(seen.at))
    end = f" to {status.completion_time}" if status.completion_time else ""
    yield "Time", f"from {rfc3339(round(seen.created))}{end}"
    if progress := status.progress:
        of = (
            f" of {progress.steps} ({progress.percent:.0f}%)" if progress.steps and progress.percent is not None else ""
        )
        yield "Steps", f"{progress.step}{of}, {status.steps_replayed} trained again"
        if progress.loss is not None:
            yield "Loss", f"{progress.loss:.6g}"
        if progress.evaluation and progress.evaluation.loss is not None:
            yield "Evaluation", f"{progress.evaluation.loss:.6g} at step {progress.evaluation.step}"
        if progress.tokens is not None:
            yield "Tokens", f"{progress.tokens:,}"
        if progress.mfu is not None:
            yield "MFU", f"{progress.mfu:.1%}"
    yield "Goodput", f"{status.goodput.percent:.1f}%"
    yield "Rounds and failures", f"{status.rounds} rounds, {status.restarts.total} failures"
    if spent := status.cost:
        each = spent.per_million_tokens
        tokens = f", {each:.4g} per million tokens" if each is not None else ""
        yield "Cost", f"{spent.total:.2f} {spent.currency} for {spent.replica_hours:.1f} replica-hours{tokens}"


def _findings(section: xml.Element, seen: Evidence, found: Diagnosis) -> None:
    if not found.findings:
        xml.SubElement(section, "p").text = "Nothing was found that is wrong."
    price = seen.spec.price if seen.spec else None
    for one in found.findings:
        box = xml.SubElement(section, "div", {"class": one.severity.value})
        xml.SubElement(box, "strong").text = f"{one.problem}: "
        costs = cost(one, seen.hourly, price.currency if price else "")
        xml.SubElement(box, "p").text = one.sentence + (f"; {costs}" if costs else "")
        xml.SubElement(box, "p").text = f"Next: {one.advice} ({one.runbook})"


def _time(section: xml.Element, goodput: Goodput) -> None:
    parts = sorted(goodput.by_class.items(), key=lambda part: -part[1])
    total = sum(part for _, part in parts)
    if not total:
        xml.SubElement(section, "p").text = "No time was counted yet."
        return
    section.append(plots.bar(parts))
    table = xml.SubElement(section, "table")
    for name, part in parts:
        if part:
            row = xml.SubElement(table, "tr")
            cell = xml.SubElement(row, "td")
            swatch = xml.SubElement(cell, "span", {"class": f"swatch {name}"})
            swatch.tail = name
            xml.SubElement(row, "td").text = duration(part)
            xml.SubElement(row, "td").text = f"{part / total:.1%}"
    if goodput.recovery:
        xml.SubElement(section, "p").text = "Recovery by cause:"
        causes = sorted(goodput.recovery, key=lambda cause: -cause.seconds)
        _table(section, (), ((cause.cause, f"{cause.times} x", f"{cause.seconds:.1f} s") for cause in causes))


def _course(body: xml.Element, seen: Evidence) -> None:
    """As the status keeps it, of the whole run; and the last steps, as the log tells them."""
    points = unpacked(seen.status.history or "").points
    world = [((point.at - seen.created) / 60, float(point.replicas)) for point in points]
    losses = [(float(point.step), point.loss) for point in _not_undone(points) if point.loss is not None]
    paces = [(float(line.step), line.seconds) for line in seen.steps]
    _line(body, "World over time", world, "minutes since the job was created", "replicas", steps=True)
    _line(body, "Loss", losses, "step", "loss")
    _line(body, "Seconds of a step", paces, "step, of the last ones in the log", "seconds")


def _not_undone(points: Iterable[Point]) -> Sequence[Point]:
    """Of steps that were trained again the later ones."""
    kept: list[Point] = []
    for point in points:
        while kept and kept[-1].step >= point.step:
            kept.pop()
        kept.append(point)
    return kept


def _line(body: xml.Element, title: str, points: Sequence[plots.Point], x: str, y: str, steps: bool = False) -> None:
    section = _section(body, title)
    if len(points) >= FEWEST_POINTS:
        section.append(plots.line(points, x, y, steps))
    else:
        xml.SubElement(section, "p").text = "Too little was told of it to be drawn."


def _incidents(section: xml.Element, status: JobStatus) -> None:
    if not status.incidents:
        xml.SubElement(section, "p").text = "Training was never interrupted."
        return
    head = ("At", "Round", "Cause", "Replica", "Node", "Without training", "Trained again", "Cost")
    _table(section, head, (_incident(one, status) for one in reversed(status.incidents)))


def _incident(one: Incident, status: JobStatus) -> tuple[str, ...]:
    again = f"{one.steps_replayed} steps, {one.replayed_seconds:.1f} s" if one.steps_replayed else ""
    money = f"{one.cost:.2f} {status.cost.currency}" if one.cost is not None and status.cost else ""
    return (one.at, str(one.round), one.cause, one.replica, one.node, f"{one.seconds:.1f} s", again, money)


def _checkpoints(status: JobStatus) -> Iterator[tuple[str, str]]:
    if newest := status.last_checkpoint:
        yield "Newest", f"step {newest.step} at {newest.at}"
        yield "Folder", newest.uri
    else:
        yield "Newest", "there is none"
    if snapshot := status.last_snapshot:
        yield "In node memory", f"step {snapshot.step} at {snapshot.at}"
    if every := status.checkpoint_interval:
        clock = duration(every.seconds) if every.seconds else "by steps alone"
        yield "Every", f"{clock}; {duration(every.suggested_seconds)} would lose the least time"
    if back := status.rollback:
        yield "Rolled back", f"at {back.at} to step {back.step}: {back.message}"
    for some in status.skipped:
        yield "Left out", f"samples {some.begin} to {some.end - 1}"


def _table(parent: xml.Element, head: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    table = xml.SubElement(parent, "table")
    for kind, cells in (("th", head), *(("td", row) for row in rows)):
        if cells:
            row = xml.SubElement(table, "tr")
            for cell in cells:
                xml.SubElement(row, kind).text = cell


def _list(parent: xml.Element, sentences: Iterable[str]) -> None:
    found = xml.SubElement(parent, "ul")
    for sentence in sentences:
        xml.SubElement(found, "li").text = sentence
