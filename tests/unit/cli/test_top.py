"""`concertina top`: the order of jobs, and what it shows of each job and of all jobs."""

from __future__ import annotations

import asyncio
import io
import json
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from rich.console import Console

from builders.api_server import api_server, no_success
from builders.until import until_async
from concertina.api.accounting import Cost, Goodput
from concertina.api.status import Condition, ConditionType, JobProgress, JobStatus, rfc3339
from concertina.cli import top
from concertina.kube.resources import Raw
from concertina.terminal.cluster_connection import Target
from concertina.terminal.job_table import QUEUE_LABEL, RowOrder, as_json, cells, group, ordered, row, screen

NOW = 1_800_000_000


def job(name: str, *true: ConditionType, labels: dict[str, str] | None = None, **status: Any) -> Raw:
    conditions = [Condition(type=kind, status="True", reason="R", last_transition_time=rfc3339(NOW)) for kind in true]
    meta = {"name": name, "namespace": "team", "creationTimestamp": rfc3339(NOW - 3600), "labels": labels or {}}
    return {"metadata": meta, "status": JobStatus(conditions=tuple(conditions), **status).manifest()}


def time_spent(percent: float | None, **seconds: float) -> Goodput:
    return Goodput(percent=percent, at=rfc3339(NOW), **seconds)


def jobs() -> list[Raw]:
    running = ConditionType.RUNNING
    return [
        job("done", ConditionType.COMPLETE),
        job("asleep", ConditionType.SUSPENDED),
        job("well", running, goodput=time_spent(97, productive_seconds=2000), replicas=4),
        job("slow", running, goodput=time_spent(40, productive_seconds=800, recovery_seconds=1200)),
        job("young", running, goodput=time_spent(40, productive_seconds=8, startup_seconds=12)),
        job("stuck", ConditionType.STALLED),
        job("waits", goodput=time_spent(0, waiting_seconds=90)),
        job("dear", running, goodput=time_spent(97, productive_seconds=2000), cost=Cost(currency="EUR", total=12.5)),
    ]


def names(order: RowOrder) -> list[str]:
    return [each.name for each in ordered(map(row, jobs()), order)]


def test_those_first_that_somebody_should_look_at() -> None:
    assert names(RowOrder.ATTENTION) == ["stuck", "waits", "slow", "young", "dear", "well", "asleep", "done"]
    assert names(RowOrder.GOODPUT)[:3] == ["waits", "slow", "young"]
    assert names(RowOrder.COST)[0] == "dear"
    assert names(RowOrder.NAME) == sorted(names(RowOrder.COST))


def test_groups() -> None:
    some = [job("a", labels={QUEUE_LABEL: "night"}), job("b", labels={"user": "ann"}), job("c")]
    cases = {"": ["", "", ""], "queue": ["night", "", ""], "user": ["", "ann", ""], "namespace": ["team"] * 3}
    for by, groups in cases.items():
        assert [group(row(each), by) for each in some] == groups
    assert [each.name for each in ordered(map(row, some), RowOrder.NAME, "user")] == ["a", "c", "b"]


def test_what_does_not_fit_is_counted() -> None:
    rows = ordered(map(row, jobs()), RowOrder.ATTENTION)
    console = Console(width=200)
    with console.capture() as captured:
        console.print(screen(rows, NOW, False, "", height=6))
    text = captured.get()
    assert text.splitlines()[0].startswith("8 jobs: 1 stalled, 1 waiting, 1 slow, 3 training, 1 suspended, 1 ended; 4 ")
    assert "12.50 EUR" in text.splitlines()[0]
    assert ("stuck" in text, "slow" in text, "asleep" in text) == (True, True, False)
    assert "and 5 more" in text


def test_who_does_not_train_has_no_pace() -> None:
    reported = JobProgress(step=5, steps=10, percent=50, eta_seconds=60, tokens_per_second=100, at=rfc3339(NOW))
    for kind, pace in ((ConditionType.RUNNING, (50, 60, 100)), (ConditionType.SUSPENDED, (50, None, None))):
        found = row(job("a", kind, progress=reported))
        assert (found.percent, found.eta_seconds, found.tokens_per_second) == pace


def test_as_json() -> None:
    printed = as_json(row(jobs()[3]))
    assert (printed["name"], printed["attention"], printed["goodputPercent"]) == ("slow", "Slow", 40.0)


def test_a_job_that_reports_no_steps_has_an_unknown_goodput_and_is_not_slow() -> None:
    spent = time_spent(None, unknown_seconds=2000, recovery_seconds=900)
    found = row(job("silent", ConditionType.RUNNING, goodput=spent))
    assert (found.goodput, found.attention.name) == (None, "TRAINING")
    assert as_json(found)["goodputPercent"] is None
    assert "unknown" in cells(found, NOW)
    assert "unknown" not in cells(row(job("new")), NOW), "nothing was counted yet"


def test_what_may_be_out_of_date_is_said_until_something_is_heard_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = "trainingjobs is forbidden: ann can't watch it"
    now, later = (
        {**job("a", ConditionType.RUNNING, progress=JobProgress(step=step, at=rfc3339(NOW))), "kind": "TrainingJob"}
        for step in (6, 7)
    )
    for version, each in enumerate((now, later), 5):
        each["metadata"] |= {"uid": "u", "resourceVersion": str(version)}
    mended, over = asyncio.Event(), asyncio.Event()
    printed = io.StringIO()

    async def answer(request: web.Request) -> web.StreamResponse:
        if not request.query.get("watch"):
            return web.json_response({"metadata": {"resourceVersion": "5"}, "items": [now]})
        if not mended.is_set():
            return no_success(403, refused)
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(json.dumps({"type": "MODIFIED", "object": later}).encode() + b"\n")
        await over.wait()
        return response

    def frame() -> str:
        """Return the last frame that was drawn."""
        return printed.getvalue().rpartition("\x1b[H")[2]

    async def scenario() -> None:
        async with api_server(tmp_path, answer) as config:
            following = asyncio.create_task(top.top(Target(config, None, "team"), False, "", "attention", False, ""))
            await until_async(lambda: f"Out of date, perhaps: {refused}" in frame(), "a word of it", frame)
            assert "step 6" in frame()
            mended.set()
            await until_async(lambda: "step 7" in frame() and "Out of date" not in frame(), "what is new", frame)
            over.set()
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)

    monkeypatch.setattr(top, "console", Console(file=printed, force_terminal=True, no_color=True, width=200, height=20))
    monkeypatch.setattr(top, "REFRESH_SECONDS", 0.01)
    asyncio.run(scenario())
