"""Check that the reference has every metric, also of the agents, under names that Prometheus does not change.

A request for the operator's metrics is answered, or refused if a token is missing.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse

from builders.counted import counted
from builders.until import until_async
from concertina import metrics
from concertina.agents.connections import CALLS, CallResult, StreamState
from concertina.agents.streams import StreamEnd
from concertina.controller import serving
from concertina.controller.job_metrics import FAMILIES, JOB_LABELS
from concertina.controller.queue import KeyedQueue
from concertina.controller.settings import OperatorSettings, OperatorSettingsError, from_environment
from concertina.controller.tracing import SpanResult
from concertina.kube.reflector import WatchEnd
from concertina.local.host import processes
from concertina.plan.observed import Refusal
from concertina_agent.metrics import families
from concertina_protocol import StepPart

PAGE = Path(__file__).parents[3] / "docs" / "metrics.md"
REFERENCE = PAGE.parent / "reference" / "metrics.md"
ENTRY = re.compile(r"^- `(\w+)`: \*(counter|gauge|histogram)\*(.*?)  \n  \S", re.MULTILINE | re.DOTALL)
TAKEN = {"namespace", "pod", "container", "job", "instance", "endpoint", "service", "node", "le", "quantile"}
"""Labels that a monitor of the Prometheus operator sets itself, or that have a meaning."""
ENVIRONMENT = {
    "CONCERTINA_NAMESPACE": "n",
    "CONCERTINA_MASTER_KEY_SECRET": "s",
    "CONCERTINA_IMAGE_AGENT": "i",
}


def registered() -> dict[str, tuple[str, tuple[str, ...]]]:
    """Type and labels of each metric, by the name that a person asks Prometheus for."""
    labels = {
        name: tuple(collector._labelnames)
        for collector, names in metrics.REGISTRY._collector_to_names.items()
        if isinstance(collector, MetricWrapperBase)
        for name in names
    }
    families = {each.name + ("_total" if each.type == "counter" else ""): each for each in metrics.REGISTRY.collect()}
    return {name: (family.type, labels.get(family.name, ())) for name, family in families.items()}


def of_jobs() -> dict[str, tuple[str, tuple[str, ...]]]:
    """Likewise; their labels beside those that all have."""
    return {each.asked_for: ("counter" if each.counter else "gauge", each.labels) for each in FAMILIES}


def of_agents() -> dict[str, tuple[str, tuple[str, ...]]]:
    return {each.name: (each.kind.value, each.labels) for each in families.ALL}


def test_the_reference_has_every_metric_and_no_other() -> None:
    entries = ENTRY.findall(REFERENCE.read_text())
    assert len(entries) == len({name for name, *_ in entries})
    there = {name: (kind, tuple(re.findall(r"`(\w+)`", labels))) for name, kind, labels in entries}
    process = {name for name in registered() if name.startswith("process_")}
    assert "`process_*`" in REFERENCE.read_text()
    assert there.keys() | process == registered().keys() | of_jobs().keys() | of_agents().keys()
    assert there == {name: (registered() | of_jobs() | of_agents())[name] for name in there}


@pytest.mark.parametrize(
    "words",
    [
        StreamEnd,
        StreamState,
        CallResult,
        CALLS.values(),
        WatchEnd,
        [kind.name.lower() for kind in Refusal],
        StepPart,
        SpanResult,
        (*families.POD_LABELS, families.WORKER_LABEL, *JOB_LABELS),
    ],
    ids=[
        "stream ends",
        "streams",
        "results of calls",
        "calls",
        "watch ends",
        "refusals",
        "parts of steps",
        "spans",
        "labels",
    ],
)
def test_words_of_labels_are_on_the_page(words: Iterable[str]) -> None:
    page = PAGE.read_text()
    assert not [word for word in words if f"`{word}`" not in page]


def test_names_and_labels_stay_as_they_are_on_the_way() -> None:
    everything = {**registered(), **of_jobs(), **of_agents()}
    for name, (kind, labels) in everything.items():
        assert (kind == "counter") == name.endswith("_total"), name
        assert not name.endswith(("_created_total", "_percent")), name
        assert not TAKEN.intersection(labels), name
    of_all = {*families.POD_LABELS, *JOB_LABELS, families.WORKER_LABEL}
    assert of_all & TAKEN == {"namespace"}, "which the operator's monitors honour, and that of pods drops"


def settings(**more: str) -> OperatorSettings:
    return from_environment({**ENVIRONMENT, **more})


def served(
    ask: Callable[[aiohttp.ClientSession], Awaitable[None]], looks: list[serving.Look], **environment: str
) -> None:
    async def scenario() -> None:
        async with serving.endpoints(settings(**environment), looks), aiohttp.ClientSession() as session:
            await ask(session)

    asyncio.run(scenario())


def test_metrics_are_looked_at_and_served_in_either_format() -> None:
    (port,) = processes.free_ports("127.0.0.1", 1)
    url = f"http://127.0.0.1:{port}/metrics"
    looked: list[None] = []

    async def ask(session: aiohttp.ClientSession) -> None:
        async with session.get(url) as answer:
            assert answer.status == 200
            plain = {family.name: family for family in parse(await answer.text())}
        assert plain.keys() == {family.name for family in metrics.REGISTRY.collect()}
        assert not [s.name for family in plain.values() for s in family.samples if s.name.endswith("_created")]
        async with session.get(url, headers={"Accept": "application/openmetrics-text; version=1.0.0"}) as answer:
            assert answer.headers["Content-Type"].startswith("application/openmetrics-text")
            assert {family.name for family in parse_openmetrics(await answer.text())} == plain.keys()
        assert len(looked) == 2

    served(ask, [lambda: looked.append(None)], CONCERTINA_METRICS=f"127.0.0.1:{port}")


def test_a_crowd_that_asks_at_once_shares_what_is_made() -> None:
    (port,) = processes.free_ports("127.0.0.1", 1)
    looked: list[None] = []

    async def ask(session: aiohttp.ClientSession) -> None:
        async def one() -> int:
            async with session.get(f"http://127.0.0.1:{port}/metrics") as answer:
                return len(await answer.read())

        sizes = await asyncio.gather(*(one() for _ in range(60)))
        assert min(sizes) > 1000
        assert len(looked) < 30
        before = len(looked)
        await one()
        assert len(looked) == before + 1, "who asks later gets what is so then"

    served(ask, [lambda: looked.append(None)], CONCERTINA_METRICS=f"127.0.0.1:{port}")


@pytest.mark.parametrize("given", [{}, {"Authorization": "Bearer no"}, {"Authorization": "s3cret"}, {"x": "s3cret"}])
def test_a_token_is_asked_for(given: dict[str, str]) -> None:
    (port,) = processes.free_ports("127.0.0.1", 1)
    url = f"http://127.0.0.1:{port}/metrics"

    async def ask(session: aiohttp.ClientSession) -> None:
        async with session.get(url, headers=given) as answer:
            text = await answer.text()
            assert (answer.status, answer.headers["WWW-Authenticate"]) == (401, "Bearer")
            assert "Authorization: Bearer TOKEN" in text
            assert "s3cret" not in text
        async with session.get(url, headers={"Authorization": "Bearer s3cret"}) as answer:
            assert answer.status == 200

    served(ask, [], CONCERTINA_METRICS=f"127.0.0.1:{port}", CONCERTINA_METRICS_TOKEN="s3cret\n")


def test_without_a_token_to_compare_with_nobody_is_answered() -> None:
    (port,) = processes.free_ports("127.0.0.1", 1)

    async def ask(session: aiohttp.ClientSession) -> None:
        for given in ({}, {"Authorization": "Bearer "}, {"Authorization": "Bearer x"}):
            async with session.get(f"http://127.0.0.1:{port}/metrics", headers=given) as answer:
                assert answer.status == 401
                assert "metrics.tokenSecret" in await answer.text()

    served(ask, [], CONCERTINA_METRICS=f"127.0.0.1:{port}", CONCERTINA_METRICS_ACCESS="Token")


def test_an_address_that_is_none_is_named() -> None:
    with pytest.raises(OperatorSettingsError, match=r"CONCERTINA_METRICS is 'x'; it must be HOST:PORT"):
        settings(CONCERTINA_METRICS="x")


def test_passes_are_counted_by_result_and_looked_at_while_they_wait_and_run(monkeypatch: pytest.MonkeyPatch) -> None:
    queue_names = {"name": "trainingjob", "controller": "trainingjob"}
    series: dict[str, dict[str, str]] = {
        "workqueue_adds_total": queue_names,
        "workqueue_retries_total": queue_names,
        "workqueue_queue_duration_seconds_count": queue_names,
        "workqueue_work_duration_seconds_count": queue_names,
        "controller_runtime_reconcile_errors_total": {"controller": "trainingjob"},
        "controller_runtime_reconcile_time_seconds_count": {"controller": "trainingjob"},
    }

    def seen() -> dict[str, float]:
        results = {
            result: counted("controller_runtime_reconcile_total", controller="trainingjob", result=result)
            for result in ("success", "requeue_after", "error")
        }
        return results | {name: counted(name, **labels) for name, labels in series.items()}

    def gauges(queue: KeyedQueue) -> dict[str, float]:
        queue.set_gauges()
        return {
            "depth": counted("workqueue_depth", **queue_names),
            "active": counted("controller_runtime_active_workers", controller="trainingjob"),
            "unfinished": counted("workqueue_unfinished_work_seconds", **queue_names) > 0,
            "longest": counted("workqueue_longest_running_processor_seconds", **queue_names) > 0,
        }

    async def scenario() -> None:
        gate, runs = asyncio.Event(), 0

        async def work(key: str) -> float | None:
            nonlocal runs
            runs += 1
            if key == "slow":
                await gate.wait()
            if key == "bad":
                raise RuntimeError("no")
            return 3600.0 if key == "later" else None

        queue = KeyedQueue(work)
        queue.start()
        before = seen()
        for key in ("slow", "bad", "later", "good"):
            queue.add(key)
        queue.add("good")  # it waits already
        assert gauges(queue) == {"depth": 4, "active": 0, "unfinished": False, "longest": False}
        await until_async(lambda: runs == 4, "the runs", lambda: runs)
        queue.add("slow")
        assert gauges(queue) == {"depth": 1, "active": 1, "unfinished": True, "longest": True}
        gate.set()
        await until_async(lambda: runs == 5, "the runs", lambda: runs)
        await asyncio.sleep(0)
        assert gauges(queue) == {"depth": 0, "active": 0, "unfinished": False, "longest": False}
        more: dict[str, Any] = {name: value - before[name] for name, value in seen().items()}
        assert more == {
            "success": 3,
            "requeue_after": 1,
            "error": 1,
            "workqueue_adds_total": 5,
            "workqueue_retries_total": 1,
            "workqueue_queue_duration_seconds_count": 5,
            "workqueue_work_duration_seconds_count": 5,
            "controller_runtime_reconcile_errors_total": 1,
            "controller_runtime_reconcile_time_seconds_count": 5,
        }
        await queue.close()

    monkeypatch.setattr("concertina.controller.queue.FIRST_SECONDS", 3600.0)
    asyncio.run(scenario())
