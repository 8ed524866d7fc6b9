"""A cluster with the operator from its chart and one long-lived job, which all drills of this folder are played on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from builders.operator import Object, until
from concertina.cli.demo import stage as stages
from concertina.cli.demo.stage import Stage
from concertina.local import lifetime

JOB = "drilled"


@pytest.fixture(scope="session")
def stage(request: pytest.FixtureRequest) -> Iterator[Stage]:
    name = f"drill-{os.getpid()}"

    @contextmanager
    def step(text: str) -> Iterator[Callable[[str], None]]:
        yield print

    with stages.standing(name, 3, step) as standing:
        build = [sys.executable, "-m", "concertina_trainer.cli", "data", "build", "--out", f"s3://{stages.BUCKET}/data"]
        environment = os.environ | standing.storage.environment()
        subprocess.run([*build, __file__], env=environment, check=True, capture_output=True, timeout=120)
        yield standing
    if not request.session.testsfailed:
        lifetime.forget(name)


def manifest() -> Object:
    """Three small replicas, one a node, that train until they are deleted."""
    trainer = {
        "steps": 1_000_000,
        "model": {"layers": 1, "dim": 32, "heads": 2, "vocabSize": 256, "sequenceLength": 64},
        "data": {"uri": f"s3://{stages.BUCKET}/data"},
        "globalBatchSize": 12,
        "logEverySteps": 1,
    }
    resources = {"limits": {"nvidia.com/gpu": 1}, "requests": {"cpu": "50m"}}
    container = {"name": "trainer", "image": "concertina/trainer:test", "resources": resources}
    return {
        "apiVersion": "concertina.dev/v1alpha1",
        "kind": "TrainingJob",
        "metadata": {"name": JOB},
        "spec": {
            "replicas": 3,
            "elastic": {"minReplicas": 2, "growAfterSeconds": 1},
            "failurePolicy": {"maxRestarts": 100},
            "template": {"spec": {"containers": [container]}},
            "trainer": trainer,
            "checkpoint": {"uri": f"s3://{stages.BUCKET}/{JOB}", "everySeconds": 3, "keep": 2, "secretName": "s3"},
        },
    }


@pytest.fixture(scope="session")
def job(stage: Stage) -> str:
    """The job's name, as soon as all of it trains."""
    stage.cluster.kubectl("apply", "-f", "-", stdin=json.dumps(manifest()))

    def training() -> bool:
        status = stage.job(JOB).get("status", {})
        return status.get("world", {}).get("size") == "3/3" and status.get("lastCheckpoint") is not None

    until(training, lambda: json.dumps(stage.job(JOB).get("status"), indent=1))
    return JOB


@pytest.fixture
def drill(stage: Stage, job: str) -> Callable[[str], Any]:
    """Plays a scenario with the real command; the verdict that it prints as JSON."""

    def play(scenario: str) -> Any:
        command = [sys.executable, "-m", "concertina.cli", "drill", job, "--scenario", scenario, "-o", "json"]
        environment = os.environ | {"KUBECONFIG": str(stage.cluster.kubeconfig)}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, check=False)
        assert done.stdout, done.stderr
        verdict = json.loads(done.stdout)
        assert done.returncode == (0 if verdict["passed"] else 1)
        print(json.dumps(verdict, indent=1))
        return verdict

    return play
