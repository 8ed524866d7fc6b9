"""Cluster with the operator from its chart and one long-lived job, on which all drills of this folder run.

It is deleted before the next tests, which would have to share the processors with the job.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from builders.cluster import drills
from builders.cluster.drills import JOB, verdict
from builders.cluster.operator_process import Object, paced
from builders.until import until
from concertina.demo import stage as stages
from concertina.demo.stage import Stage
from concertina.local.state import lifetime

DATA = f"s3://{stages.BUCKET}/data"


@pytest.fixture(scope="module")
def stage(request: pytest.FixtureRequest) -> Iterator[Stage]:
    name = f"drill-{os.getpid()}"

    @contextmanager
    def step(text: str) -> Iterator[Callable[[str], None]]:
        yield print

    with stages.standing(name, getattr(request.module, "NODES", 3), step) as standing:
        drills.build_data(DATA, standing.storage.environment())
        yield standing
    if not request.session.testsfailed:
        lifetime.forget(name)


@pytest.fixture(scope="module")
def pace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the path of the file that slows down the job's steps while it exists."""
    file = tmp_path_factory.mktemp("pace") / "while"
    file.touch()
    return file


def manifest(pace: Path) -> Object:
    """Return a job with one replica on each node, each of which has one GPU."""
    resources = {"limits": {"nvidia.com/gpu": 1}, "requests": {"cpu": "50m"}}
    container = {**paced(PACE_WHILE=pace), "resources": resources}
    checkpoint = {"uri": f"s3://{stages.BUCKET}/{JOB}", "everySeconds": 3}
    return drills.manifest({"spec": {"containers": [container]}}, DATA, checkpoint)


@pytest.fixture(scope="module")
def job(stage: Stage, pace: Path) -> str:
    """Return the job's name, as soon as all of its replicas train."""
    stage.cluster.kubectl("apply", "-f", "-", stdin=json.dumps(manifest(pace)))

    def training() -> bool:
        status = stage.job(JOB).get("status", {})
        return status.get("world", {}).get("size") == "3/3" and status.get("lastCheckpoint") is not None

    until(training, "a job of three with a checkpoint", lambda: json.dumps(stage.job(JOB).get("status"), indent=1))
    return JOB


@pytest.fixture
def drill(stage: Stage, job: str, pace: Path, request: pytest.FixtureRequest) -> Iterator[Callable[[str], Any]]:
    """Yield a function that runs a scenario with the real command, and returns its verdict from the JSON output."""

    def play(scenario: str) -> Any:
        if scenario == "straggle":  # This slows computation, but not pauses.
            pace.unlink()
        done = drills.drill(scenario, "-o", "json", KUBECONFIG=str(stage.cluster.kubeconfig))
        return verdict(done, request.config)

    yield play
    pace.touch()
