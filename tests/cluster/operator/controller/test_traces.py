"""Round of a real job as one trace at a real receiver, and the places of the trace's id.

A receiver that hangs affects nothing but traces.
"""

from __future__ import annotations

import base64
import signal
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from builders.cluster.operator_process import Jobs, Object, Operator, bundled
from builders.otlp import Manner, Receiver, check_round, receiver
from builders.until import until
from concertina.local.host import processes
from concertina_protocol.traces import trace_id

METRICS_TOKEN, COLLECTOR_TOKEN = "of-who-scrapes", "of-the-collector"
SPANS = "concertina_trace_spans_total"
ANNOTATION = "concertina.dev/trace-id"


@pytest.fixture
def collector() -> Iterator[Receiver]:
    with receiver() as there:
        yield there


@pytest.fixture
def traced(installed: dict[str, str], tmp_path: Path, collector: Receiver) -> Iterator[tuple[Operator, str]]:
    """Run an operator, and return the address of its metrics. It would wait an hour for a collector."""
    (port,) = processes.free_ports("127.0.0.1", 1)
    running = Operator(tmp_path, installed)
    running.start(
        CONCERTINA_LOG_LEVEL="DEBUG",
        CONCERTINA_METRICS=f"127.0.0.1:{port}",
        CONCERTINA_METRICS_TOKEN=METRICS_TOKEN,
        OTEL_EXPORTER_OTLP_ENDPOINT=collector.endpoint,
        OTEL_EXPORTER_OTLP_HEADERS=f"authorization=Bearer%20{COLLECTOR_TOKEN}",
        OTEL_EXPORTER_OTLP_TIMEOUT="3600",
    )
    yield running, f"http://127.0.0.1:{port}/metrics"
    if running.process is not None and running.process.poll() is None:
        running.end(signal.SIGTERM)


def asked(url: str, accept: str = "text/plain") -> str:
    headers = {"Accept": accept, "Authorization": f"Bearer {METRICS_TOKEN}"}
    with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=10) as answer:
        return str(answer.read().decode())


def exemplars(url: str) -> set[tuple[str, str]]:
    """Return phases of rounds with the trace ids of their durations' exemplars: the last one of each bucket."""
    families = list(text_string_to_metric_families(asked(url, "application/openmetrics-text; version=1.0.0")))
    samples = (sample for family in families for sample in family.samples)
    return {(sample.labels["phase"], sample.exemplar.labels["trace_id"]) for sample in samples if sample.exemplar}


def total(url: str, result: str) -> float:
    lines = asked(url).splitlines()
    return sum(float(line.split()[1]) for line in lines if line.startswith(f'{SPANS}{{result="{result}"'))


def killed(jobs: Jobs, replicas: int) -> Object:
    """Kill a worker of a member other than the coordinator, and return the job as soon as it trains again."""
    world = jobs.get("a")["status"]["world"]
    jobs.kill_worker("a", world["members"][-1]["replica"])
    return jobs.wait_training("a", replicas, past=world["round"])


def test_a_round_is_one_trace_whose_id_all_say(
    jobs: Jobs, traced: tuple[Operator, str], collector: Receiver, data: Path, tmp_path: Path
) -> None:
    operator, url = traced
    jobs.create("a", replicas=2, **bundled(data, tmp_path / "fault"))
    uid = jobs.wait_training("a", 2)["metadata"]["uid"]
    world = killed(jobs, 2)["status"]["world"]
    trace = trace_id(uid, world["round"])
    spans = until(lambda: collector.traces().get(trace), "the round's trace", collector.traces)

    root = check_round(spans, "a", "WorkerSignaled", jobs.members(jobs.get("a")))
    (incident,) = jobs.get("a")["status"]["incidents"]
    assert incident["seconds"] == pytest.approx((root.end_time_unix_nano - root.start_time_unix_nano) / 1e9, abs=0.1)

    first = trace_id(uid, 1)
    assert collector.traces().keys() == {first, trace}
    root, *parts = (span.name for span in collector.traces()[first] if span.name != "prepare member")
    assert (root, set(parts[:2])) == ("round", {"decide", "prepare"}), "no time passes between these two"
    for reason in ("WorkerSignaled", "RoundCommitted"):
        assert {event["metadata"]["annotations"][ANNOTATION] for event in jobs.events("a", reason)} == {trace}
    named = [line for event in ("claimed", "prepare", "committed", "assign") for line in operator.lines(event)]
    assert {line["trace"] for line in named} == {trace_id(uid, line["round"]) for line in named} == {first, trace}
    assert first in {line["trace"] for line in operator.lines("condition") if "trace" in line}
    said = jobs.logs(world["coordinator"])
    assert f'"trace":"{trace}"' in next(line for line in said.splitlines()[::-1] if '"event":"worker_started"' in line)
    assert {("prepare", trace), ("start", trace)} <= exemplars(url)


@pytest.mark.long(law="tests/unit/controller/test_tracing.py::test_a_bad_collector_takes_traces_and_nothing_else")
def test_a_collector_that_hangs_takes_traces_and_nothing_else(
    jobs: Jobs, traced: tuple[Operator, str], collector: Receiver
) -> None:
    """A pass that waited for the collector would take longer than this test."""
    operator, url = traced
    collector.manner = Manner.HANGS
    jobs.create("a", "import time; time.sleep(3600)", replicas=2)
    jobs.wait_training("a", 2)
    until(lambda: collector.asked, "a collector that is asked")
    killed(jobs, 2)
    assert jobs.events("a", "RoundCommitted")
    assert [total(url, result) for result in ("exported", "dropped")] == [0, 0]
    assert operator.end(signal.SIGTERM) == 0
    assert not collector.spans
    log = operator.text()
    assert '"level":"DEBUG"' in log
    assert [secret for secret in secrets(jobs, operator) if secret in log] == []


def secrets(jobs: Jobs, operator: Operator) -> list[str]:
    """Return all secrets that this operator knew."""
    named = operator.environment["CONCERTINA_NAMESPACE"], operator.environment["CONCERTINA_MASTER_KEY_SECRET"]
    found = jobs.cluster.kubectl("-n", named[0], "get", "secret", named[1], "-o", "jsonpath={.data.key}")
    kubeconfig = yaml.safe_load(Path(operator.environment["KUBECONFIG"]).read_text())
    key = base64.b64decode(found).decode().strip()
    return [METRICS_TOKEN, COLLECTOR_TOKEN, kubeconfig["users"][0]["user"]["token"], found, key]
