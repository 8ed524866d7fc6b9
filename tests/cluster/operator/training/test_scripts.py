"""Users' own scripts under the operator: plain DDP with checkpoints of its own, and one that uses `trainingjob`."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from builders.cluster.operator_process import Jobs
from builders.programs import PROGRAMS
from builders.until import until

pytestmark = [pytest.mark.usefixtures("operator"), pytest.mark.timeout(900)]
ROOT = Path(__file__).resolve().parents[4]
ELASTIC = {"minReplicas": 1, "scaleUp": {"stabilizationWindowSeconds": 1}}
ENDLESS = 10**9
Object = dict[str, Any]


def template(shared: Path, script: Path, *arguments: str) -> Object:
    """Return a pod whose script appends its output to a file of the shared folder, which all replicas see.

    It trains with the processor time that others leave, because its steps have no pace.
    """
    line = f'exec nice -n 19 python3 -u "$0" "$@" >> {shared}/log 2>&1'
    container = {
        "name": "trainer",
        "image": "concertina/trainer:test",
        "command": ["sh", "-c", line, str(script), *arguments],
        "volumeMounts": [{"name": "shared", "mountPath": str(shared)}, {"name": "code", "mountPath": str(ROOT)}],
    }
    volumes = [{"name": "shared", "hostPath": {"path": str(shared)}}, {"name": "code", "hostPath": {"path": str(ROOT)}}]
    return {"spec": {"terminationGracePeriodSeconds": 10, "containers": [container], "volumes": volumes}}


def printed(shared: Path, pattern: str) -> list[tuple[int, ...]]:
    path = shared / "log"
    text = path.read_text(errors="replace") if path.exists() else ""
    return [tuple(map(int, match if isinstance(match, tuple) else (match,))) for match in re.findall(pattern, text)]


def workers(script: Path, argument: str) -> dict[int, int]:
    """Return the pid by rank, of the processes that run this script with this argument."""
    pids = {}
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
            if words[2:3] == [str(script)] and argument in words:
                variables = Path(f"/proc/{pid}/environ").read_text().split("\0")
                pids[int(next(v for v in variables if v.startswith("RANK="))[5:])] = int(pid)
    return pids


@pytest.mark.long(
    law="tests/cluster/operator/training/test_scripts.py::test_a_script_that_uses_trainingjob_has_progress_and_loses_no_step_to_a_change"
)
def test_a_plain_ddp_script_goes_on_from_its_own_checkpoints(jobs: Jobs, tmp_path: Path) -> None:
    script = ROOT / "examples" / "scripts" / "ddp.py"

    def pod(steps: int) -> Object:
        arguments = ("--steps", str(steps), "--checkpoints", str(tmp_path / "checkpoints"))
        return template(tmp_path, script, *arguments)

    def saved() -> int:
        return max((step for (step,) in printed(tmp_path, r"saved step (\d+)")), default=0)

    def starts(world: int) -> list[int]:
        return [step for _, step in printed(tmp_path, rf"rank (\d+) of {world} starts at step (\d+)")]

    def past(step: int) -> Callable[[], bool]:
        return lambda: saved() > step

    jobs.create("a", replicas=3, elastic=ELASTIC, template=pod(ENDLESS))
    jobs.wait_training("a", 3)
    until(past(20), "a checkpoint past step 20", lambda: (tmp_path / "log").read_text()[-3000:])
    assert set(starts(3)) == {0}
    os.kill(workers(script, str(tmp_path / "checkpoints"))[2], signal.SIGKILL)
    until(lambda: len(starts(3)) == 6, "a second start of three", lambda: jobs.describe("a"))
    assert min(starts(3)[3:]) > 0

    before = saved()
    jobs.cluster.kubectl("scale", "tj", "a", "--replicas=2", "-n", jobs.namespace)
    until(lambda: len(starts(2)) == 2, "a start of two", lambda: jobs.describe("a"))
    assert min(starts(2)) >= before
    until(past(max(starts(2))), "a checkpoint of two", lambda: jobs.describe("a"))

    jobs.patch("a", {"suspend": True})
    jobs.wait_true("a", "Suspended")
    jobs.wait("a", lambda _: not jobs.pods("a"))
    last = torch.load(tmp_path / "checkpoints" / "latest.pt")["step"]  # The step was saved before the kill.
    assert last in (saved(), saved() + 10)
    jobs.patch("a", {"replicas": 3, "template": pod(last + 20)})
    jobs.patch("a", {"suspend": False})
    job = jobs.wait_true("a", "Complete")
    assert set(starts(3)[6:]) == {last}
    through = printed(tmp_path, r"rank (\d) of 3 is through at step (\d+)")
    assert sorted(through) == [(rank, last + 20) for rank in range(3)]
    assert job["status"]["restarts"]["total"] == 1


def test_a_script_that_uses_trainingjob_has_progress_and_loses_no_step_to_a_change(jobs: Jobs, tmp_path: Path) -> None:
    script = PROGRAMS / "scripted.py"
    jobs.create("a", replicas=2, elastic=ELASTIC, template=template(tmp_path, script, str(tmp_path), str(ENDLESS)))
    jobs.wait_training("a", 2)
    job = jobs.wait("a", lambda job: (job["status"].get("progress") or {}).get("step", 0) > 20)
    progress = job["status"]["progress"]
    assert (progress["steps"], progress["tokensPerSecond"]) == (ENDLESS, 7.0)
    assert progress["loss"] == pytest.approx(1 / progress["step"], abs=1e-6)

    jobs.cluster.kubectl("scale", "tj", "a", "--replicas=3", "-n", jobs.namespace)
    trains_on(jobs, jobs.wait_training("a", 3))
    victim = jobs.members(jobs.get("a"))[1]
    jobs.cluster.kubectl("delete", "pod", victim, "-n", jobs.namespace, "--wait=false")
    jobs.wait("a", lambda job: victim not in jobs.members(job))
    trains_on(jobs, jobs.wait_training("a", 3))

    saves, starts = printed(tmp_path, r"saves step (\d+)"), printed(tmp_path, r"rank \d+ of \d starts at step (\d+)")
    assert {step for (step,) in saves} == {step for (step,) in starts} - {0}, "a round did not begin where one ended"
    assert len(saves) >= 5
    assert len(set(saves)) >= 2
    status = jobs.get("a")["status"]
    assert (status.get("stepsReplayed", 0), status["restarts"]["total"]) == (0, 0)


def trains_on(jobs: Jobs, job: Object) -> None:
    """Wait until the current round of this job has finished some steps."""
    step = job["status"]["progress"]["step"]
    jobs.wait("a", lambda job: job["status"]["progress"]["step"] > step)


@pytest.mark.long(
    law="tests/train/scripts/test_state.py::test_what_no_memory_holds_comes_back_from_storage_and_the_end_is_in_it[s3]"
)
def test_a_script_that_keeps_its_state_goes_on_from_memory_and_from_storage(jobs: Jobs, tmp_path: Path) -> None:
    script = PROGRAMS / "stateful.py"
    pod = template(tmp_path, script, "ddp")
    checkpoint = {"uri": f"file://{tmp_path}/checkpoints", "everySeconds": 3600}
    jobs.create("a", replicas=3, elastic=ELASTIC, template=pod, checkpoint=checkpoint)
    job = jobs.wait("a", lambda job: (job.get("status", {}).get("lastSnapshot") or {}).get("step", 0) > 5)
    assert job["status"]["progress"]["step"] >= job["status"]["lastSnapshot"]["step"]
    assert job["status"].get("lastCheckpoint") is None

    os.kill(workers(script, "ddp")[1], signal.SIGKILL)
    jobs.wait("a", lambda job: job["status"]["restarts"]["total"] == 1)
    trains_on(jobs, jobs.wait_training("a", 3))
    first, *later = sorted({step for (step,) in printed(tmp_path, r"rank \d of 3 starts at step (\d+)")})
    assert first == 0
    assert later, jobs.describe("a")
    assert jobs.get("a")["status"].get("stepsReplayed", 0) <= 2

    request = {"metadata": {"annotations": {"concertina.dev/checkpoint-create": "one"}}}
    jobs.cluster.kubectl("patch", "tj", "a", "-n", jobs.namespace, "--type=merge", "-p", json.dumps(request))
    job = jobs.wait("a", lambda job: (job["status"].get("checkpointRequest") or {}).get("state") == "Done")
    assert job["status"]["lastCheckpoint"]["step"] >= job["status"]["checkpointRequest"]["step"]

    jobs.patch("a", {"suspend": True})
    job = jobs.wait_true("a", "Suspended")
    jobs.wait("a", lambda _: not jobs.pods("a"))
    saved = jobs.get("a")["status"]["lastCheckpoint"]["step"]
    assert saved == max(step for (step,) in printed(tmp_path, r"step (\d+) loss")) + 1, "a step was lost"
    jobs.patch("a", {"suspend": False})
    trains_on(jobs, jobs.wait_training("a", 3))
    assert printed(tmp_path, r"rank \d of 3 starts at step (\d+)")[-1] == (saved,)
    steps = {step for (step,) in printed(tmp_path, r"step (\d+) loss")}
    assert steps == set(range(max(steps) + 1)), "a step was left out"
