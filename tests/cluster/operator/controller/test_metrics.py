"""Metrics of a real operator, compared with other sources: the API server's own counts, the log, the jobs."""

from __future__ import annotations

import contextlib
import os
import signal
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from builders.cluster.operator_process import JOBS, Jobs, Operator, endless, paced
from builders.programs import PROGRAMS, STAND_IN
from builders.samples import Samples, parsed, total
from builders.until import until
from concertina.local.cluster import LocalCluster
from concertina.local.control_plane.api import ControlPlaneError
from concertina.local.host import processes

STAY = "import time; time.sleep(3600)"
TOKEN = "of the tests"


class Scraped:
    """Operator process whose metrics are scraped as Prometheus does."""

    def __init__(self, operator: Operator, faults: Path) -> None:
        (port,) = processes.free_ports("127.0.0.1", 1)
        self.operator, self.faults = operator, faults
        self._url = f"http://127.0.0.1:{port}/metrics"
        path = [str(PROGRAMS / "operator_faults"), *filter(None, [operator.environment["PYTHONPATH"]])]
        self.environment = {
            "PYTHONPATH": os.pathsep.join(path),
            "FAULTS": str(faults),
            "CONCERTINA_METRICS": f"127.0.0.1:{port}",
            "CONCERTINA_METRICS_TOKEN": TOKEN,
            "CONCERTINA_POD_METRICS": "9400",
            "CONCERTINA_POD_METRICS_ANNOTATIONS": "true",
        }

    def ask(self, token: str = TOKEN) -> str:
        request = urllib.request.Request(self._url, headers={"Authorization": f"Bearer {token}"} if token else {})
        with urllib.request.urlopen(request, timeout=10) as answer:
            return str(answer.read().decode())

    def total(self, name: str, /, **labels: str) -> float:
        return total(parsed(self.ask()), name, **labels)


@pytest.fixture(scope="module")
def scraped(installed: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scraped]:
    folder = tmp_path_factory.mktemp("scraped")
    running = Scraped(Operator(folder, installed), folder)
    running.operator.start(**running.environment)
    yield running
    running.operator.end(signal.SIGTERM)


WRITES = (
    {"code": "200", "verb": "PATCH", "resource": "trainingjobs", "subresource": "status"},
    {"code": "201", "verb": "POST", "resource": "pods", "subresource": ""},
    {"code": "201", "verb": "POST", "resource": "secrets", "subresource": ""},
)
"""Kinds of writes that nothing but the operator makes here."""


def unseen_writes(cluster: LocalCluster, scraped: Scraped) -> list[float]:
    """Return how many more writes of each kind the API server has counted since the operator started."""
    mine, others = parsed(scraped.ask()), parsed(cluster.api.call("GET", "/metrics"))
    return [
        total(others, "apiserver_request_total", **labels)
        - total(
            mine,
            "rest_client_requests_total",
            code=labels["code"],
            method=labels["verb"],
            resource=labels["resource"],
        )
        for labels in WRITES
    ]


def settled(cluster: LocalCluster, scraped: Scraped) -> list[float]:
    """Delete the jobs of other tests and wait until they are gone: the operator's metrics would count them as well.

    After a restart of the API server, Kubernetes may try for a long time to delete a namespace.
    """
    for job in everywhere(cluster):
        metadata: Any = job["metadata"]
        with contextlib.suppress(ControlPlaneError):
            cluster.api.call("DELETE", f"{JOBS.format(metadata['namespace'])}/{metadata['name']}")
    until(lambda: not everywhere(cluster), "a cluster without jobs", lambda: everywhere(cluster), pause=0.5)
    return unseen_writes(cluster, scraped)


def test_a_job_is_counted_as_others_saw_it(cluster: LocalCluster, jobs: Jobs, scraped: Scraped, data: Path) -> None:
    before = settled(cluster, scraped)
    assert scraped.total("leader_election_master_status", name="concertina-operator") == 1
    trainer = endless(data, steps=20)
    jobs.create("a", replicas=2, trainer=trainer, pod={"containers": [paced(PYTHONPATH=STAND_IN)]})
    jobs.wait_training("a", 2)
    assert scraped.total("concertina_agent_streams", state="open") >= 1
    jobs.wait_true("a", "Complete")

    def agrees() -> list[str]:
        """Return the values that do not agree (yet)."""
        lines, rounds = scraped.operator.lines, "concertina_round_duration_seconds_count"
        now = parsed(scraped.ask())
        sent = [line for kind in ("prepare", "assign", "drain", "save") for line in lines(kind)]
        reasons = Counter(jobs.condition(job, "Ready").get("reason") for job in everywhere(cluster))
        pairs = {
            "writes": (unseen_writes(cluster, scraped), before),
            "requests of pods": (total(now, "rest_client_requests_total", method="POST", resource="pods"), 2),
            "passes": (total(now, "controller_runtime_reconcile_time_seconds_count") > 5, True),
            "passes by result": (
                total(now, "controller_runtime_reconcile_total"),
                total(now, "workqueue_work_duration_seconds_count"),
            ),
            "errors": (total(now, "controller_runtime_reconcile_errors_total"), 0),
            "jobs": (total(now, "concertina_trainingjobs", phase="Complete"), reasons["Complete"]),
            # On a busy machine a call may fail, and is repeated.
            "calls": (total(now, "concertina_agent_calls_total"), len(sent)),
            "calls that were answered": (total(now, "concertina_agent_calls_total", result="answered") > 0, True),
            "streams": (total(now, "concertina_agent_streams"), 0),
            "commits": (
                total(now, rounds, phase="prepare"),
                len(lines("committed")),
            ),
            "rounds with progress": (total(now, rounds, phase="start"), 1),
            "ends of parts": (total(now, "concertina_background_task_restarts_total"), 0),
        }
        return [f"{what}: {seen} and not {wanted}" for what, (seen, wanted) in pairs.items() if seen != wanted]

    until(lambda: not agrees(), "counts that agree", agrees)
    assert total(parsed(scraped.ask()), "concertina_agent_stream_ends_total", reason="failed") == 0


def of_pods(cluster: LocalCluster, namespace: str) -> dict[str, Samples]:
    """Return the metrics of pods that are found by their annotations, by name, for those that answer."""
    metrics = {}
    for pod in cluster.api.call("GET", f"/api/v1/namespaces/{namespace}/pods")["items"]:
        with contextlib.suppress(OSError, KeyError):
            annotations = {key.partition("/")[2]: value for key, value in pod["metadata"]["annotations"].items()}
            url = f"http://{pod['status']['podIP']}:{annotations['port']}{annotations['path']}"
            with urllib.request.urlopen(url, timeout=10) as answer:
                metrics[pod["metadata"]["name"]] = parsed(answer.read().decode())
    return metrics


def test_a_job_and_its_pods_are_told_of_until_they_are_gone(
    cluster: LocalCluster, jobs: Jobs, scraped: Scraped, data: Path
) -> None:
    """A job of the bundled trainer is found as a plain Prometheus finds it, and both sides name it alike."""
    trainer = endless(data)
    jobs.create("told", replicas=2, trainer=trainer, pod={"containers": [paced(PYTHONPATH=STAND_IN)]})
    jobs.wait_training("told", 2)
    labels = {"namespace": jobs.namespace, "trainingjob": "told"}

    def pods() -> bool:
        metrics = of_pods(cluster, jobs.namespace)
        steps = [
            name for name, each in metrics.items() if total(each, "concertina_training_step", replica=name, **labels)
        ]
        workers = sum(total(each, "concertina_worker_running", **labels) for each in metrics.values())
        return workers == 2 and steps == [jobs.members(jobs.get("told"))[0]]

    until(pods, "two workers, and steps by the coordinator alone", lambda: of_pods(cluster, jobs.namespace))

    def of_operator() -> Samples:
        return {key: value for key, value in parsed(scraped.ask()).items() if labels.items() <= dict(key[1]).items()}

    def agrees() -> bool:
        now, prefix = of_operator(), "concertina_trainingjob_"
        names = ("wanted_replicas", "ready_replicas", "world_size")
        return total(now, f"{prefix}step") > 0 and [total(now, prefix + name) for name in names] == [2, 2, 2]

    until(agrees, "the job's own series", of_operator)
    jobs.delete("told")
    until(lambda: not of_operator(), "an operator that tells nothing of it any more", of_operator)


def everywhere(cluster: LocalCluster) -> list[dict[str, object]]:
    items: list[dict[str, object]] = cluster.api.call("GET", "/apis/concertina.dev/v1beta1/trainingjobs")["items"]
    return items


@pytest.mark.parametrize("token", ["", "another"])
def test_a_token_is_asked_for(scraped: Scraped, token: str) -> None:
    with pytest.raises(urllib.error.HTTPError, match="401") as refused:
        scraped.ask(token)
    assert "need its token" in refused.value.read().decode()


@pytest.mark.long(law="tests/cluster/test_chart.py::test_each_operator_says_whether_it_acts_to_who_may_read_metrics")
def test_one_that_stands_by_says_so(scraped: Scraped, installed: dict[str, str], tmp_path: Path) -> None:
    second = Scraped(Operator(tmp_path, {**installed, "POD_NAME": "another-one"}), tmp_path)
    second.operator.start(wait=False, **second.environment)

    def answers() -> str:
        try:
            return second.ask()
        except OSError:
            return ""

    samples = parsed(until(answers, "an operator that answers", second.operator.text))
    assert total(samples, "leader_election_master_status", name="concertina-operator") == 0
    assert ("leader_election_master_status", frozenset({("name", "concertina-operator")})) in samples
    second.operator.end(signal.SIGTERM)


def test_what_the_api_server_refuses_is_counted_by_kind(jobs: Jobs, scraped: Scraped) -> None:
    jobs.create("a", STAY, pod={"activeDeadlineSeconds": -1})
    jobs.wait("a", lambda job: jobs.condition(job, "Stalled").get("reason") == "PodRefused")

    def seen() -> list[float]:
        lines = scraped.operator.lines("create refused")
        counts = [scraped.total("concertina_create_rejections_total", kind=kind) for kind in ("permanent", "quota")]
        return [*counts, len(lines)]

    until(lambda: seen()[0] == seen()[2] > 0, "as many as the log has", seen)
    assert seen()[1] == 0
    jobs.delete("a")


def test_a_pass_that_raises_and_a_stream_that_breaks_are_counted(jobs: Jobs, scraped: Scraped) -> None:
    jobs.create("a", STAY, replicas=2, elastic={"minReplicas": 1})
    jobs.wait_training("a", 2)
    (scraped.faults / "raise").write_text("bad")
    jobs.create("bad", STAY)
    assert "ZeroDivisionError: planted" in jobs.condition(jobs.wait_true("bad", "ReconcileError"), "Stalled")["message"]

    def seen() -> list[float]:
        now = parsed(scraped.ask())
        return [
            total(now, "controller_runtime_reconcile_errors_total", controller="trainingjob"),
            total(now, "controller_runtime_reconcile_total", result="error"),
            total(now, "workqueue_retries_total"),
            len(scraped.operator.lines("reconcile error")),
        ]

    assert min(until(lambda: seen() if len(set(seen())) == 1 else [], "the same by all", seen)) >= 1
    (scraped.faults / "raise").unlink()

    def broken() -> float:
        now = parsed(scraped.ask())
        reasons = ("closed", "not_listening", "unreachable", "silent")
        return sum(total(now, "concertina_agent_stream_ends_total", reason=reason) for reason in reasons)

    before, coordinator = broken(), jobs.members(jobs.get("a"))[0]
    jobs.kill_pod(coordinator)
    until(lambda: broken() > before, "the end of a stream", broken)


def test_watches_that_break_are_counted(cluster: LocalCluster, scraped: Scraped) -> None:
    watched = ("nodes", "pods", "trainingjobs")

    def broken() -> list[float]:
        now = parsed(scraped.ask())
        return [total(now, "concertina_watch_restarts_total", resource=each, reason="broken") for each in watched]

    before = broken()  # For example, the API server may not know a role yet.
    no_answer = scraped.total("rest_client_requests_total", code="<error>", resource="nodes")
    cluster.kill_component("kube-apiserver")
    try:
        until(lambda: all(a > b for a, b in zip(broken(), before, strict=True)), "an end of each watch", broken)
    finally:
        cluster.start_component("kube-apiserver")
        cluster.wait_api()
    assert scraped.total("rest_client_requests_total", code="<error>", resource="nodes") > no_answer
