"""Problems that are planted in real runs, each named by the real command; and runs in which nothing is wrong."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from builders.cluster.operator import Jobs, Operator, endless, paced
from concertina.cli.diagnose import FOUND
from concertina.diagnosis.problems import Problem
from concertina.local.cluster import LocalCluster

Object = dict[str, Any]
SECONDS = "8"
COMMAND = str(Path(sys.executable).with_name("concertina"))
REPORTS_NAN = """
import os, time, trainingjob
for step in range(1, 10**6):
    trainingjob.report(step=step, loss=1 / step if step < 20 else float("nan"))
    time.sleep(0.1)
"""


@pytest.fixture(scope="module")
def operator(installed: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Operator]:
    """One whose pods serve metrics."""
    running = Operator(tmp_path_factory.mktemp("operator"), installed)
    running.start(CONCERTINA_POD_METRICS="9400")
    yield running
    running.end(signal.SIGTERM)


@pytest.fixture(scope="module")
def jobs(cluster: LocalCluster, operator: Operator) -> Iterator[Jobs]:
    """Of a namespace for all tests of this file: runs go on side by side, most of them at rest."""
    namespace = f"t-{uuid.uuid4().hex[:8]}"
    cluster.create_namespace(namespace)
    yield Jobs(cluster, namespace)
    cluster.kubectl("delete", "namespace", namespace, "--wait=false")


@pytest.fixture(scope="module")
def planted(jobs: Jobs, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Jobs:
    """Those of the gate, all begun at once."""
    faults = tmp_path_factory.mktemp("faults")
    _bundled(jobs, data, "healthy", replicas=2)
    _bundled(jobs, data, "reads-slowly", _fault(faults, "0 read_slowly 0.3"))
    _bundled(jobs, data, "one-is-slow", _fault(faults, "1 slow 0.3"), replicas=2)
    explodes = {"learningRate": 10.0, "weightDecay": 10.0, "warmupSteps": 0}
    _bundled(jobs, data, "explodes", optimizer=explodes)
    jobs.create("tells-nan", REPORTS_NAN)
    return jobs


def _fault(folder: Path, text: str) -> Path:
    path = folder / text.replace(" ", "-")
    path.write_text(text)
    return path


def _bundled(jobs: Jobs, data: Path, name: str, fault: Path | None = None, replicas: int = 1, **trainer: Any) -> None:
    variables = {"FAULT": fault} if fault else {}
    jobs.create(name, replicas=replicas, trainer=endless(data, **trainer), pod={"containers": [paced(**variables)]})


def past(jobs: Jobs, name: str, step: int) -> Object:
    """As soon as its status tells of this step."""
    return jobs.wait(name, lambda job: (job.get("status", {}).get("progress") or {}).get("step", 0) >= step)


def concertina(jobs: Jobs, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [COMMAND, *arguments, "-n", jobs.namespace], env=os.environ | {"KUBECONFIG": str(jobs.cluster.kubeconfig)},
        capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip


def diagnosed(jobs: Jobs, name: str, *more: str) -> Object:
    done = concertina(jobs, "diagnose", name, "--seconds", SECONDS, "--json", *more)
    assert done.stdout, done.stderr
    found: Object = json.loads(done.stdout)
    assert done.returncode == (FOUND if found["findings"] else 0)
    print(json.dumps({key: value for key, value in found.items() if key != "record"}, indent=1))
    return found


def problems(found: Object) -> list[str]:
    return [finding["problem"] for finding in found["findings"]]


def test_a_healthy_run_has_none_and_says_what_was_seen(planted: Jobs) -> None:
    past(planted, "healthy", 30)
    found = diagnosed(planted, "healthy")
    assert problems(found) == [], found["findings"]
    assert any(sentence.startswith("time of the last ") for sentence in found["saw"])
    assert "agents asked: 2" in found["saw"]
    assert len(found["record"]["agents"]) == 6


def test_a_slow_reader(planted: Jobs) -> None:
    past(planted, "reads-slowly", 20)
    (finding,) = diagnosed(planted, "reads-slowly")["findings"]
    assert finding["problem"] == Problem.INPUT_BOTTLENECK
    assert finding["lost"] > 0.4


def test_a_slow_rank_is_named_with_its_node(planted: Jobs) -> None:
    job = planted.wait("one-is-slow", lambda job: job.get("status", {}).get("stragglers"))
    found = diagnosed(planted, "one-is-slow")
    slow = job["status"]["world"]["members"][1]
    assert problems(found)[0] == Problem.STRAGGLER
    assert f"rank 1 (replica {slow['replica']} on node {slow['node']})" in found["findings"][0]["sentence"]


def test_a_loss_that_becomes_nan_and_fails_the_job(planted: Jobs) -> None:
    planted.wait_true("explodes", "Failed")
    found = diagnosed(planted, "explodes")
    assert problems(found) == [Problem.LOSS_NAN]
    assert "the loss is" in found["findings"][0]["sentence"]


def test_a_script_that_goes_on_with_nan(planted: Jobs) -> None:
    past(planted, "tells-nan", 40)
    assert problems(diagnosed(planted, "tells-nan")) == [Problem.LOSS_NAN]


def test_a_file_tells_the_same(planted: Jobs, tmp_path: Path) -> None:
    """Both what kubectl writes, and what the command itself wrote: with its two readings."""
    saved, record = tmp_path / "job.yaml", tmp_path / "record.json"
    saved.write_text(planted.cluster.kubectl("get", "tj", "reads-slowly", "-n", planted.namespace, "-o", "yaml"))
    live = diagnosed(planted, "reads-slowly")
    record.write_text(json.dumps(live))
    assert problems(diagnosed(planted, str(saved))) == [Problem.INPUT_BOTTLENECK]
    assert diagnosed(planted, str(record))["findings"] == live["findings"]
