"""Drills in tests: the job that they run on, the real command that runs them, and the figures of all drills."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from concertina.api.status import JobStatus, unix_seconds
from concertina.demo import text

Object = dict[str, Any]
JOB = "drilled"
FIGURES = pytest.StashKey[list[str]]()
"""Figures of the session: one line for each drill and each change, printed at its end (tests/conftest.py)."""
SHOWN = ("claimed", "committed", "first_step", "named", "told", "whole", "checkpoint")
TRAINER: Object = {
    "steps": 1_000_000,
    "model": {"layers": 1, "dim": 32, "heads": 2, "vocabSize": 256, "sequenceLength": 64},
    "globalBatchSize": 12,
}


def manifest(pod: Object, data: str, checkpoint: Object) -> Object:
    """Return a job of three small replicas that trains until it is deleted.

    `pod` is the template, and `data` the URI of its shards.
    """
    return {
        "apiVersion": "concertina.dev/v1beta1",
        "kind": "TrainingJob",
        "metadata": {"name": JOB},
        "spec": {
            "replicas": 3,
            "elastic": {"minReplicas": 2, "scaleUp": {"stabilizationWindowSeconds": 1}},
            "failurePolicy": {"maxRestarts": 100},
            "template": pod,
            "trainer": {**TRAINER, "data": {"uri": data}},
            "checkpoint": {"keep": 2, "secretName": "s3", **checkpoint},
        },
    }


def build_data(uri: str, environment: Mapping[str, str], *options: str, source: Path | None = None) -> None:
    """Build token shards of `source`, or of a short text that is always the same."""
    with tempfile.TemporaryDirectory() as folder:
        sources = [source] if source else text.write(Path(folder), 10, 10_000)
        build = [sys.executable, "-m", "concertina_trainer.cli", "data", "build", "--out", uri, *options]
        command = [*build, *map(str, sources)]
        subprocess.run(command, env=os.environ | environment, check=True, capture_output=True, timeout=120)


def drill(scenario: str, *options: str, job: str = JOB, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the real command to its end."""
    command = [sys.executable, "-m", "concertina.cli", "drill", job, "--scenario", scenario, *options]
    return subprocess.run(
        command, env=os.environ | environment, capture_output=True, text=True, timeout=800, check=False
    )


def verdict(played: subprocess.CompletedProcess[str], config: pytest.Config) -> Any:
    """Return the verdict that the command printed as JSON, and keep its figures for the end of the session."""
    assert played.stdout, played.stderr
    printed = json.loads(played.stdout)
    assert played.returncode == (0 if printed["passed"] else 1)
    print(json.dumps(printed, indent=1))
    seen = printed["seen"]
    seconds = [f"{name} {seen['seconds'][name]:.1f}" for name in SHOWN if seen["seconds"][name] is not None]
    steps = f"{seen['replayed']} steps again, {seen['counted']} counted"
    keep(config, printed["scenario"], "PASS" if printed["passed"] else "FAIL", *seconds, steps)
    return printed


def keep(config: pytest.Config, what: str, *figures: str) -> None:
    """Keep one line for the end of the session, with the machine's load."""
    line = f"{what:<44} {', '.join(figures)} (load {os.getloadavg()[0]:.1f})"
    config.stash.setdefault(FIGURES, []).append(line)


def each_second_is_in_one_class(job: Object) -> None:
    """Check that the classes of status.goodput add up to the time since the job's creation.

    The time in which an operator was killed or stopped is included.
    """
    goodput = JobStatus.model_validate(job["status"]).goodput
    assert goodput.at is not None
    passed = unix_seconds(goodput.at) - unix_seconds(job["metadata"]["creationTimestamp"])
    assert sum(goodput.by_class.values()) == pytest.approx(passed, rel=0.005)
    caused = sum(entry.seconds for entry in goodput.recovery)
    assert caused == pytest.approx(goodput.recovery_seconds, abs=0.1)
