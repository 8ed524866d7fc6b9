"""Real torchrun (`launcher: Torchrun`): members come and go, the store is lost, the job ends."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from builders.cluster.operator_process import Jobs, Operator
from builders.until import until

pytestmark = [pytest.mark.usefixtures("operator"), pytest.mark.timeout(280)]
Object = dict[str, Any]
HERE = "tests/cluster/operator/lifecycle/test_torchrun.py"
SCRIPT = """
import datetime, os, pathlib, socket, time, torch
import torch.distributed as dist

shared = pathlib.Path("/shared")
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
while True:
    end = torch.tensor(float((shared / "stop").exists()))
    dist.all_reduce(end)
    with (shared / "told").open("a") as told:
        told.write(f"{dist.get_world_size()} {socket.gethostname()}\\n")
    if end:
        break
    time.sleep(0.2)
dist.destroy_process_group()
"""
WITHOUT_TORCH = """
import os, pathlib, socket, time

shared = pathlib.Path("/shared")
while not (shared / "stop").exists():
    with (shared / "told").open("a") as told:
        told.write(f"{os.environ['WORLD_SIZE']} {socket.gethostname()}\\n")
    time.sleep(0.2)
"""
"""Script without torch for tests of torchrun alone, so that its workers begin at once."""


def create(jobs: Jobs, shared: Path, script: str, **spec: Any) -> None:
    (shared / "train.py").write_text(script)
    container = {
        "name": "trainer",
        "image": "concertina/trainer:test",
        "command": ["torchrun", "/shared/train.py"],
        "volumeMounts": [{"name": "shared", "mountPath": "/shared"}],
    }
    volume = {"name": "shared", "hostPath": {"path": str(shared)}}
    jobs.create("a", pod={"containers": [container], "volumes": [volume]}, launcher="Torchrun", **spec)


class Told:
    """Lines that the workers have written since the last call."""

    def __init__(self, jobs: Jobs, shared: Path) -> None:
        self.jobs, self.file = jobs, shared / "told"

    def forget(self) -> None:
        self.file.write_text("")

    def wait(self, *lines: str) -> None:
        """Wait until all of these lines (`world size` and `pod`) were written."""

        def told() -> bool:
            return self.file.exists() and set(lines) <= set(self.file.read_text().splitlines())

        until(told, f"what {' and '.join(lines)} write", self.describe)

    def describe(self) -> str:
        logs = [f"{pod['metadata']['name']}:\n{self.jobs.logs(pod['metadata']['name'])}" for pod in self.jobs.pods("a")]
        return "\n".join([self.file.read_text()[-500:] if self.file.exists() else "", self.jobs.describe("a"), *logs])


ELASTIC_LAW = f"{HERE}::test_an_elastic_torchrun_job_recovers_grows_shrinks_and_completes"


@pytest.mark.parametrize(
    "script",
    [
        pytest.param(WITHOUT_TORCH, id="without torch"),
        pytest.param(SCRIPT, id="gloo", marks=pytest.mark.long(law=f"{ELASTIC_LAW}[without torch]")),
    ],
)
def test_an_elastic_torchrun_job_recovers_grows_shrinks_and_completes(jobs: Jobs, tmp_path: Path, script: str) -> None:
    lines = Told(jobs, tmp_path)
    create(jobs, tmp_path, script, replicas=2, elastic={"minReplicas": 1})
    lines.wait("2 a-0-0", "2 a-1-0")
    job = jobs.wait_reason("a", "Training")
    assert "members" not in job["status"]["world"] or not job["status"]["world"]["members"], "nobody can know them"
    assert job["status"]["replicas"] == 2

    jobs.kill_pod("a-0-0")
    lines.wait("2 a-0-1")
    assert jobs.get("a")["status"]["world"]["round"] == 1, "torchrun took it in by itself"
    jobs.cluster.kubectl("scale", "tj", "a", "--replicas=3", "-n", jobs.namespace)
    lines.wait("3 a-2-0")
    jobs.cluster.kubectl("scale", "tj", "a", "--replicas=2", "-n", jobs.namespace)
    jobs.wait_gone("pod/a-2-0")

    lines.forget()
    jobs.kill_pod("a-rendezvous-1")
    job = jobs.wait("a", lambda job: job["status"]["world"].get("round", 0) == 2)
    until(lambda: "2 " in lines.file.read_text(), "a world of two", lines.describe)
    assert jobs.events("a", "RendezvousLost")
    (tmp_path / "stop").touch()
    job = jobs.wait_true("a", "Complete")
    assert job["status"]["restarts"].get("inWindow", 0) == 0
    jobs.wait("a", lambda _: all(pod["status"]["phase"] != "Running" for pod in jobs.pods("a")))


@pytest.mark.long(
    law="tests/unit/plan/lifecycle/test_torchrun.py::test_a_member_that_is_killed_is_replaced_within_the_round"
)
def test_a_member_that_goes_unseen_is_replaced_under_another_name(
    jobs: Jobs, operator: Operator, tmp_path: Path
) -> None:
    """The operator learns of the deletion and the end in one burst, as when it is slow."""
    lines = Told(jobs, tmp_path)
    create(jobs, tmp_path, WITHOUT_TORCH, replicas=2, elastic={"minReplicas": 1})
    lines.wait("2 a-0-0", "2 a-1-0")
    assert operator.process is not None
    operator.process.send_signal(signal.SIGSTOP)
    try:
        jobs.kill_pod("a-0-0")
        jobs.wait_gone("pod/a-0-0")
    finally:
        operator.process.send_signal(signal.SIGCONT)
    lines.wait("2 a-0-1")
    assert jobs.get("a")["status"]["internal"]["attempts"] == [1]
    assert "was deleted" in jobs.events("a", "ReplicaReplaced")[0]["message"]


@pytest.mark.long(law=ELASTIC_LAW)
def test_a_job_of_fixed_size_is_made_anew_when_it_is_scaled_or_resumed(jobs: Jobs, tmp_path: Path) -> None:
    """torchrun can't change a fixed size, so all pods are replaced, in a rendezvous of their own."""
    lines = Told(jobs, tmp_path)
    create(jobs, tmp_path, WITHOUT_TORCH, replicas=2)
    lines.wait("2 a-0-0", "2 a-1-0")
    jobs.cluster.kubectl("scale", "tj", "a", "--replicas=1", "-n", jobs.namespace)
    lines.wait("1 a-0-1")
    jobs.wait_gone("pod/a-1-0")
    world = jobs.get("a")["status"]["world"]
    assert (world["round"], world["claim"]["round"], world["claim"]["committed"]) == (2, 2, True)

    jobs.patch("a", {"suspend": True})
    jobs.wait_true("a", "Suspended")
    jobs.wait("a", lambda _: not jobs.pods("a"))
    assert jobs.get("a")["status"]["world"]["claim"]["round"] == 3, "no round follows it"
    jobs.patch("a", {"suspend": False})
    lines.wait("1 a-0-2")
    assert jobs.get("a")["status"]["world"]["round"] == 4
    (tmp_path / "stop").touch()
    job = jobs.wait_true("a", "Complete")
    assert job["status"]["restarts"].get("inWindow", 0) == 0


@pytest.mark.long(
    law="tests/cluster/operator/recovery/test_escalation.py::test_a_script_that_always_fails_the_same_way_is_a_bug"
)
def test_a_script_that_always_fails_uses_up_the_budget(jobs: Jobs) -> None:
    container = {"name": "trainer", "image": "concertina/trainer:test", "command": ["torchrun", "/nowhere.py"]}
    container["env"] = [{"name": "PET_MAX_RESTARTS", "value": "0"}]  # type: ignore[assignment]
    jobs.create("a", pod={"containers": [container]}, launcher="Torchrun", failurePolicy={"maxRestarts": 0})
    job = jobs.wait_true("a", "Failed")
    assert "torchrun gave up" in jobs.condition(job, "Failed")["message"]
    failure = job["status"]["lastFailure"]
    assert (failure["replica"], failure["exitCode"]) == ("a-0-0", 1)
    jobs.wait_gone("pod/a-rendezvous-1")
    (left,) = jobs.pods("a")
    assert (left["metadata"]["name"], left["status"]["phase"]) == ("a-0-0", "Failed")
    assert "can't open file '/nowhere.py'" in jobs.logs("a-0-0")
    assert any("ChildFailedError" in line for line in failure["lastLines"])


@pytest.mark.long(
    law="tests/train/agent/test_worlds.py::test_torchrun_in_a_shells_file_is_reported_by_the_coordinator_once_all_replicas_have_it"
)
def test_torchrun_in_a_file_under_the_agent_is_told_and_stops_nothing(jobs: Jobs, tmp_path: Path) -> None:
    """The operator can't read the script's file, but the agents see the processes that it starts."""
    (tmp_path / "train.py").write_text(WITHOUT_TORCH)
    (tmp_path / "run.sh").write_text("torchrun --nproc_per_node=1 /shared/train.py\n")
    container = {
        "name": "trainer",
        "image": "concertina/trainer:test",
        "command": ["bash", "/shared/run.sh"],
        "volumeMounts": [{"name": "shared", "mountPath": "/shared"}],
    }
    volume = {"name": "shared", "hostPath": {"path": str(tmp_path)}}
    jobs.create("a", pod={"containers": [container], "volumes": [volume]}, replicas=2)
    Told(jobs, tmp_path).wait("1 a-0-0", "1 a-1-0")
    job = jobs.wait_true("a", "Degraded")
    degraded = jobs.condition(job, "Degraded")
    assert degraded["reason"] == "WorldMismatch"
    assert "WORLD_SIZE=1 were started by torchrun in a round of 2 workers" in degraded["message"]
    assert "set launcher: Torchrun" in degraded["message"]
    assert jobs.condition(job, "Running")["status"] == "True"
    (tmp_path / "stop").touch()
    job = jobs.wait_true("a", "Complete")
    assert "each replica trains alone" in jobs.condition(job, "Complete")["message"]
    assert job["status"].get("rounds", 0) == 1
    (event,) = jobs.events("a", "WorldMismatch")
    assert (event["type"], event["message"]) == ("Warning", degraded["message"])
