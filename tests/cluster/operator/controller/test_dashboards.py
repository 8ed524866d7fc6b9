"""Every query of every dashboard, evaluated by a real Prometheus that scrapes a real operator and training pods."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from monitoring.__main__ import RULES
from monitoring.boards import Query
from monitoring.dashboards import DASHBOARDS

from builders.cluster.drills import build_data
from builders.cluster.operator_process import Jobs, Operator, endless, paced
from builders.prometheus import Prometheus, needed, serve
from builders.until import until
from concertina.local.host import processes

pytestmark = needed

TOKEN = "of the tests"
POD_PORT = 9400
REPORTS = """
import itertools, time, trainingjob
for step in itertools.count(1):
    time.sleep(0.05)
    trainingjob.report(step=step, steps=10**6, loss=1.0, tokens=64 * step, tokens_per_second=1e3, metrics={"mine": 2.0})
"""
JOBS = ("trained", "script")
"""Jobs that train, one of each kind."""
NOT_HERE = {
    r"concertina_gpu_": "there is no GPU",
    r"mfu_ratio": "a processor's peak is not known",
    r"ALERTS": "a run of a minute raises none",
    r"reconcile_aborted": "no answer of the API server ended a pass",
}
"""Queries that need not return a series here, with the reason."""
SOMETIMES = {"local_rank", "reason"}
"""Labels of legends that not all series have, such as the worker if metrics are per pod."""


@pytest.fixture
def metrics(installed: dict[str, str], tmp_path: Path) -> Iterator[str]:
    """Yield the address of an operator's metrics."""
    [port] = processes.free_ports("127.0.0.1", 1)
    address = f"127.0.0.1:{port}"
    operator = Operator(tmp_path, installed)
    environment = {"CONCERTINA_METRICS": address, "CONCERTINA_METRICS_TOKEN": TOKEN}
    operator.start(**environment, CONCERTINA_POD_METRICS=str(POD_PORT))
    yield address
    operator.end(signal.SIGTERM)


def scrapes(operator: str, pods: list[str]) -> list[dict[str, Any]]:
    """Return the scrape configuration of docs/metrics.md for a plain Prometheus."""
    agents = [f"{address}:{POD_PORT}" for address in pods]
    return [
        {
            "job_name": "operator",
            "honor_labels": True,
            "authorization": {"credentials": TOKEN},
            "static_configs": [{"targets": [operator]}],
        },
        {"job_name": "pods", "honor_labels": True, "static_configs": [{"targets": agents}]},
    ]


def queries() -> dict[str, Query]:
    expressions = {
        f"{board.name}, {panel.title}, {query.legend}": query
        for board in DASHBOARDS.values()
        for panel in board.panels
        for query in panel.queries
    }
    assert len(expressions) == sum(len(panel.queries) for board in DASHBOARDS.values() for panel in board.panels)
    return expressions


def filled(expression: str, namespace: str, job: str) -> str:
    """Return a query with the variables filled in as Grafana does."""
    values = {"namespace": namespace, "trainingjob": job, "replica": ".+", "__rate_interval": "10s"}
    text = re.sub(r"\$(\w+)", lambda match: values[match[1]], expression)
    assert "$" not in text
    return text


def series(prometheus: Prometheus, query: Query, namespace: str) -> list[dict[str, Any]]:
    """Return the series of either job."""
    return [each for job in JOBS for each in prometheus.ask(filled(query.expression, namespace, job))]


def of_pods(jobs: Jobs) -> list[str]:
    return [pod["status"]["podIP"] for job in JOBS for pod in jobs.pods(job)]


@pytest.mark.long(law="tests/unit/monitoring/test_expressions.py::test_it_asks_for_metrics_that_there_are")
def test_each_query_gives_what_its_panel_shows(jobs: Jobs, metrics: str, tmp_path: Path) -> None:
    build_data(str(tmp_path / "data"), {}, "--validation", "0.3")
    sets = [{"name": "aside", "uri": str(tmp_path / "data" / "validation")}]
    trainer = endless(tmp_path / "data", evaluation={"everySteps": 10, "sequences": 4, "sets": sets})
    checkpoint = {"uri": f"file://{tmp_path}/run", "everySteps": 10}
    price = {"perReplicaHour": "2.5", "currency": "EUR"}
    pod = {"containers": [paced()]}
    tracking = {"backend": "TensorBoard", "uri": f"file://{tmp_path}/tracked"}
    more = {"checkpoint": checkpoint, "price": price, "tracking": tracking}
    jobs.create("trained", replicas=2, trainer=trainer, pod=pod, **more)
    jobs.create("script", REPORTS, metrics={"perRank": True})
    jobs.create("waits", REPORTS, pod={"nodeSelector": {"is": "nowhere"}})
    jobs.wait_training("script", 1)
    jobs.wait_training("trained", 2)
    asked = queries()
    with serve(tmp_path, scrapes(metrics, of_pods(jobs)), RULES) as prometheus:
        up = "sum(up) == count(up)"
        until(lambda: prometheus.ask(up), "all scraped", prometheus.targets)
        jobs.kill_worker("trained", jobs.members(jobs.get("trained"))[1])
        empty = set(asked)

        def still_empty() -> set[str]:
            for name in sorted(empty):
                if series(prometheus, asked[name], jobs.namespace):
                    empty.discard(name)
            return {name for name in empty if not any(re.search(why, asked[name].expression) for why in NOT_HERE)}

        until(lambda: not still_empty(), "series of each query", still_empty, pause=1.0)
        for name, query in asked.items():
            wanted = set(re.findall(r"\{\{(\w+)\}\}", query.legend)) - SOMETIMES
            for each in series(prometheus, query, jobs.namespace):
                assert wanted <= each["metric"].keys(), name
        firing = prometheus.ask('ALERTS{alertstate="firing"}')
        assert not firing
        assert not {error for error in prometheus.targets().values() if error}
