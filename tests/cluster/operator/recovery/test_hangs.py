"""Hangs, and containers that are restarted in place, on a real API server."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from builders.cluster.operator_process import Jobs, bundled

pytestmark = pytest.mark.usefixtures("operator")


@pytest.mark.long(
    law="tests/simulation/stories/test_verdicts.py::test_a_hang_is_found_and_its_replica_replaced_or_only_reported"
)
def test_a_hang_is_reported_with_its_stack_and_then_its_pod_is_replaced(jobs: Jobs, data: Path, tmp_path: Path) -> None:
    """With onHang: Report, the hang is reported. After a change to Replace, the same hang leads to a new pod."""
    fault = tmp_path / "fault"
    policy = {"hangTimeoutSeconds": 2, "onHang": "Report"}
    jobs.create("a", **bundled(data, fault), replicas=2, failurePolicy=policy)
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

    jobs.patch("a", {"failurePolicy": {"onHang": "Replace"}})
    jobs.wait_gone(f"pod/{victim}")
    fault.unlink()
    job = jobs.wait_training("a", 2, past=1)
    assert victim not in jobs.members(job)
    (entry,) = job["status"]["restarts"]["recent"]
    assert (entry["replica"], entry["reason"]) == (victim, "Hang")


@pytest.mark.long(
    law="tests/simulation/stories/test_verdicts.py::test_a_straggler_is_found_and_replaced_where_that_is_wanted"
)
def test_a_straggler_is_replaced_on_another_node_and_nothing_is_lost(jobs: Jobs, data: Path, tmp_path: Path) -> None:
    """The straggler's pod leaves as after a notice, and its node is avoided."""
    fault = tmp_path / "fault"
    fault.write_text("1 slow 0.2")
    policy = {"onStraggler": "Replace"}
    elastic = {"minReplicas": 1, "scaleUp": {"stabilizationWindowSeconds": 0}}
    jobs.create("a", **bundled(data, fault), replicas=2, elastic=elastic, failurePolicy=policy)
    job = jobs.wait_training("a", 2)
    victim, node = jobs.members(job)[1], jobs.members(job, "node")[1]
    jobs.wait("a", lambda job: job["status"]["restarts"].get("recent"))
    fault.unlink()
    assert f"rank 1 (replica {victim} on node {node}) is a straggler" in jobs.events("a", "Straggler")[0]["message"]
    jobs.wait_gone(f"pod/{victim}")
    job = jobs.wait("a", lambda job: len(jobs.members(job)) == 2 and victim not in jobs.members(job))
    status = job["status"]
    (entry,) = status["restarts"]["recent"]
    assert (entry["replica"], entry["reason"], entry["counted"]) == (victim, "Straggler", False)
    assert [avoided["node"] for avoided in status["avoidedNodes"]] == [node]
    assert node not in jobs.members(job, "node")
    assert (status.get("stepsReplayed", 0), status["restarts"].get("inWindow", 0)) == (0, 0)


@pytest.mark.long(
    law="tests/train/agent/test_commands.py::test_an_agent_started_again_remembers_what_it_saw_and_is_another_instance"
)
def test_an_agent_that_dies_with_its_container_comes_back_in_place(jobs: Jobs) -> None:
    """The kernel kills all processes of a container for lack of memory. The pod and its volume stay."""
    jobs.create("a", "import time; time.sleep(3600)", replicas=2)
    job = jobs.wait_training("a", 2)
    before = jobs.members(job)
    os.kill(jobs.process("a", before[1]), signal.SIGKILL)
    job = jobs.wait("a", lambda job: job["status"].get("internal", {}).get("containerRestarts"))
    job = jobs.wait_training("a", 2, past=1)
    assert sorted(jobs.members(job)) == sorted(before)
    job = jobs.wait("a", lambda job: job["status"]["restarts"].get("inWindow", 0) == 1)
    (entry,) = job["status"]["restarts"]["recent"]
    assert (entry["replica"], entry["reason"]) == (before[1], "ContainerRestarted")
    assert "exit code 137" in jobs.events("a", "ContainerRestarted")[0]["message"]
    assert [pod["metadata"]["name"] for pod in jobs.pods("a")] == sorted(before)
