"""Hangs and containers that are started again in place, on a real API server."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from builders.operator import Jobs

pytestmark = pytest.mark.usefixtures("operator")
FAULTS = Path(__file__).resolve().parents[2] / "train/faults"


def test_a_hang_is_reported_with_its_stack_and_then_its_pod_is_replaced(jobs: Jobs, tmp_path: Path) -> None:
    """First hangAction is Report; the same hang after it was changed to Replace leads to a new pod."""
    data, fault = tmp_path / "data", tmp_path / "fault"
    build = [sys.executable, "-m", "concertina_trainer.cli", "data", "build", "--out", str(data), __file__]
    subprocess.run(build, check=True, capture_output=True, timeout=120)
    container = {
        "name": "trainer",
        "image": "concertina/trainer:test",
        "env": [{"name": "PYTHONPATH", "value": str(FAULTS)}, {"name": "FAULT", "value": str(fault)}],
    }
    model = {"layers": 1, "dim": 32, "heads": 2, "vocabSize": 256, "sequenceLength": 32}
    trainer = {"steps": 100000, "model": model, "data": {"uri": str(data)}, "globalBatchSize": 4}
    policy = {"hangTimeoutSeconds": 2, "hangAction": "Report"}
    jobs.create("a", replicas=2, trainer=trainer, pod={"containers": [container]}, failurePolicy=policy)
    job = jobs.wait("a", lambda job: job.get("status", {}).get("progress", {}).get("step", 0) > 5)
    victim, node = jobs.members(job)[1], jobs.members(job, "node")[1]
    fault.write_text("1 read_forever")
    job = jobs.wait_true("a", "Stalled")
    stalled = jobs.condition(job, "Stalled")
    assert stalled["reason"] == "Hang"
    assert f"rank 1 (replica {victim} on node {node}) is loading data" in stalled["message"]
    assert "read_forever (sitecustomize.py:" in stalled["message"]
    assert "read_forever" in jobs.events("a", "Hang")[0]["message"]
    assert "read_forever" in jobs.logs(victim)
    assert jobs.condition(job, "Running")["status"] == "True", "reported, and let be"

    jobs.patch("a", {"failurePolicy": {"hangAction": "Replace"}})
    jobs.wait_gone(f"pod/{victim}")
    fault.unlink()
    job = jobs.wait_training("a", 2, past=1)
    assert victim not in jobs.members(job)
    (entry,) = job["status"]["restarts"]["recent"]
    assert (entry["replica"], entry["reason"]) == (victim, "Hang")


def agent_pid(jobs: Jobs, replica: str) -> int:
    """Process 1 of the trainer container, as this machine counts."""
    for process in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            variables = (process / "environ").read_bytes().split(b"\0")
            numbers = re.search(r"NSpid:(.*)", (process / "status").read_text())
            mine = {f"CONCERTINA_REPLICA={replica}".encode(), f"CONCERTINA_JOB={jobs.namespace}/a".encode()}
            if mine <= set(variables) and numbers and numbers[1].split()[-1] == "1":
                return int(process.name)
    raise AssertionError(f"no process of {replica}")


def test_an_agent_that_dies_with_its_container_comes_back_in_place(jobs: Jobs) -> None:
    """As when the kernel kills all of a container for want of memory: the pod and its volume stay."""
    jobs.create("a", "import time; time.sleep(3600)", replicas=2, pod={"restartPolicy": "OnFailure"})
    job = jobs.wait_training("a", 2)
    before = jobs.members(job)
    os.kill(agent_pid(jobs, before[1]), signal.SIGKILL)
    job = jobs.wait("a", lambda job: job["status"].get("containerRestarts"))
    job = jobs.wait_training("a", 2, past=1)
    assert sorted(jobs.members(job)) == sorted(before)
    job = jobs.wait("a", lambda job: job["status"]["restarts"]["inWindow"] == 1)
    (entry,) = job["status"]["restarts"]["recent"]
    assert (entry["replica"], entry["reason"]) == (before[1], "ContainerRestarted")
    assert "exit code 137" in jobs.events("a", "ContainerRestarted")[0]["message"]
    assert [pod["metadata"]["name"] for pod in jobs.pods("a")] == sorted(before)
