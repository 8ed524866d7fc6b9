"""Page about a run: names and messages of a job are only text in it."""

from __future__ import annotations

import re
from xml.etree import ElementTree as xml

from builders.jobs import T0, spec
from concertina.api.accounting import CLASSES, SUFFIX, Goodput, Incident
from concertina.api.loss_history import LossHistory, Point
from concertina.api.status import Condition, JobProgress, JobStatus, rfc3339
from concertina.diagnosis.diagnose import diagnose
from concertina.diagnosis.evidence import JobEvidence, StepLine
from concertina.report.document import COLOURS
from concertina.report.page import page
from concertina.report.plots import MOST_POINTS, bar, line

EVIL = "<script>alert(1)</script>\"'&"


def made(status: JobStatus, **fields: object) -> str:
    seen = JobEvidence(spec=spec(), status=status, at=T0 + 600, created=T0, **fields)  # type: ignore[arg-type]
    return page(f"team/{EVIL}", seen, diagnose(seen), (EVIL,))


def test_what_a_job_says_is_text() -> None:
    failed = Condition(type="Failed", status="True", reason="RepeatedFailure", message=EVIL, last_transition_time="")
    ready = Condition(type="Ready", status="False", reason="Failed", message=EVIL, last_transition_time="")
    incident = Incident(at=rfc3339(T0), cause=EVIL[:20], replica=EVIL, seconds=3)
    text = made(JobStatus(conditions=(ready, failed), incidents=(incident,)))
    assert "<script" not in text
    assert text.count("&lt;script&gt;alert(1)&lt;/script&gt;") >= 5
    assert "JobFailed" in text


def test_a_run_without_anything_has_a_page() -> None:
    text = made(JobStatus())
    assert "No problems were found" in text
    assert "Seconds of a step" not in text, "no log was read"
    assert text.count("There are too few points to draw") == 2, "world and loss"


def course(*points: tuple[int, float | None, int]) -> str:
    """Return a history as in the status: step, loss and replicas, ten seconds apart."""
    times = range(int(T0), int(T0) + 10 * len(points), 10)
    return LossHistory(10, tuple(Point(at, *point) for at, point in zip(times, points, strict=True))).packed()


def curves(text: str) -> list[list[tuple[float, float]]]:
    matches = re.findall(r'<polyline class="line" points="([^"]*)"', text)
    return [[(float(x), float(y)) for x, y in (place.split(",") for place in points.split())] for points in matches]


def test_curves_are_those_of_the_status_without_what_is_not_finite() -> None:
    steps = tuple(StepLine(step=n, loss=None if n == 2 else 1.0 / n, seconds=0.5) for n in (1, 2, 3))
    progress = JobProgress(step=3, steps=10, percent=30, loss=0.3, at=rfc3339(T0 + 500))
    spent = Goodput(productive_seconds=30, at=rfc3339(T0 + 600))
    history = course((1, 3.0, 3), (20, None, 3), (40, 2.0, 2), (60, 1.5, 3))
    text = made(JobStatus(progress=progress, goodput=spent, history=history), steps=steps)
    world, loss, seconds = curves(text)
    assert [len(points) for points in (world, loss, seconds)] == [7, 3, 3], "the world is in steps"
    assert "nan" not in text.lower()


def test_of_steps_that_were_trained_again_the_later_loss_is_drawn() -> None:
    undone = course((1, 3.0, 1), (20, 2.0, 1), (40, 9.0, 1), (20, 2.5, 1), (30, 2.0, 1))
    _, loss = curves(made(JobStatus(history=undone)))
    across = [x for x, _ in loss]
    assert len(loss) == 3
    assert across == sorted(across)


def test_of_steps_that_were_trained_again_the_later_seconds_are_drawn() -> None:
    steps = tuple(StepLine(step=n, loss=1.0, seconds=0.5) for n in (100, 101, 102, 99, 100))
    history = course((1, 3.0, 3), (20, 2.0, 3))
    _, _, seconds = curves(made(JobStatus(history=history), steps=steps))
    across = [x for x, _ in seconds]
    assert len(across) == 2
    assert 0 <= across[0] < across[1] <= 720


def test_a_long_run_has_no_more_points_than_can_be_seen() -> None:
    (polyline,) = line([(float(n), float(n)) for n in range(100_000)], "x", "y").iter("polyline")
    points = polyline.get("points", "").split()
    assert len(points) <= MOST_POINTS + 1
    assert points[-1].startswith("708.0,10.0")


def test_one_point_and_no_time_are_drawn_too() -> None:
    assert xml.tostring(line([(1.0, 2.0)], "x", "y"))
    assert xml.tostring(bar([("productive", 0.0)]))


def test_each_class_of_time_has_a_colour() -> None:
    assert set(COLOURS) == {name.removesuffix(SUFFIX) for name in CLASSES}
