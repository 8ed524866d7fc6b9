"""The bundled trainer in a layout: members are killed, the size changes, and it computes the same as one worker."""

from __future__ import annotations

import dataclasses
import os
import re
import runpy
from pathlib import Path
from typing import Any

import pytest

from builders.cluster.drills import build_data
from builders.cluster.operator_process import Jobs, endless, paced
from builders.programs import AUDIO, AUDIO_FIELDS, FAULTS
from concertina.local.errors import LocalClusterError

Object = dict[str, Any]
pytestmark = pytest.mark.usefixtures("operator")
RATE = 0.001
"""Learning rate. With 0.003, rounding alone makes losses differ by 5e-4 after 120 steps, and by 8e-4 after 170."""
BOUND = 2e-4
"""Maximum relative difference of losses, as in test_balance.py."""
EVALUATION = re.compile(r"step (\d+): evaluation loss ([\d.]+) \(mean of")


@dataclasses.dataclass(frozen=True)
class Case:
    """Layout with blocks of two replicas."""

    parallelism: Object
    two: str
    """Text of status.world.layout for two blocks."""
    one: str
    workers: int = 2
    """Number of workers of each of four replicas."""
    model: Object = dataclasses.field(default_factory=dict)
    every: int = 3
    """Number of steps from one evaluation to the next."""


EXPERTS = {"count": 8, "activePerToken": 2, "hiddenDim": 32}
CASES = {
    "tensor": Case({"tensor": 2}, "shard 2 x tensor 2", "tensor 2", workers=1, every=10),
    "hsdp": Case({"shard": 4}, "replicate 2 x shard 4", "shard 4"),
    "tensor x fsdp": Case({"tensor": 4}, "shard 2 x tensor 4", "tensor 4"),
    "pipeline x fsdp": Case({"pipeline": 4}, "shard 2 x pipeline 4", "pipeline 4"),
    "context x fsdp": Case({"context": 4}, "shard 2 x context 4", "context 4"),
    "expert x fsdp": Case(
        {"expert": 4}, "shard 8, experts over 4", "shard 4, experts over 4", model={"experts": EXPERTS}
    ),
    "tensor x pipeline x fsdp": Case(
        {"tensor": 2, "pipeline": 2}, "shard 2 x pipeline 2 x tensor 2", "pipeline 2 x tensor 2"
    ),
}
OWN_MODEL = Case(
    {"shard": 2}, "replicate 2 x shard 2", "shard 2", workers=1, every=10,
    model={"entrypoint": "audio_model:spec", "options": {"dim": 32, "blocks": 2}, "sequenceLength": 32},
)  # fmt: skip
LAW = "tests/train/trainer/test_layouts.py::test_each_layout_goes_on_from_the_one_before"


def create(jobs: Jobs, case: Case, data: Path, **trainer: Any) -> Object:
    """Create a job `cut` of two blocks, and return it with what it trains."""
    configured, pace = endless(data, **trainer), 0.1
    if case.workers > 1:
        model = {"layers": 4, "heads": 4, **case.model}
        configured |= {"globalBatchSize": 8, "model": {**configured["model"], **model}}
        pace = 0.3 / case.parallelism.get("pipeline", 1)  # For each microbatch.
    elif case.model:
        configured["model"] = case.model
    container = paced(PACE=pace, PYTHONPATH=os.pathsep.join(map(str, (FAULTS, AUDIO))))
    pod = {"containers": [container], "terminationGracePeriodSeconds": 5}
    elastic = {"minReplicas": 2, "scaleUp": {"stabilizationWindowSeconds": 0}}
    jobs.create(
        "cut", replicas=4, elastic=elastic, trainer=configured, pod=pod, parallelism=case.parallelism,
        workersPerReplica=case.workers,
    )  # fmt: skip
    return configured


SLOW = pytest.mark.timeout(900)
"""Time limit in seconds: eight ranks on two cores, beside other tests, take minutes."""


@SLOW
@pytest.mark.long(law=LAW)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_blocks_are_killed_shrunk_and_grown_on_the_same_curve(jobs: Jobs, tmp_path: Path, case: Case) -> None:
    build_data(str(tmp_path / "data"), {}, "--validation", "0.3")
    check_one_curve(jobs, tmp_path / "data", case)


@SLOW
@pytest.mark.long(law=LAW)
def test_so_is_a_model_of_one_s_own_and_its_copies(jobs: Jobs, tmp_path: Path) -> None:
    """The custom model is the example's, on its features."""
    runpy.run_path(str(AUDIO / "make_features.py"))["main"](tmp_path / "features", 60)
    build_data(str(tmp_path / "data"), {}, "--validation", "0.3", *AUDIO_FIELDS, source=tmp_path / "features")
    check_one_curve(jobs, tmp_path / "data", OWN_MODEL)


def check_one_curve(jobs: Jobs, data: Path, case: Case) -> None:
    trainer = create(
        jobs, case, data, optimizer={"learningRate": RATE, "warmupSteps": 5},
        evaluation={"everySteps": case.every, "sequences": 16},
    )  # fmt: skip
    job = jobs.wait_training("cut", 4)
    assert job["status"]["world"]["layout"] == case.two
    logs = [evaluations(jobs, "cut")]

    broken, whole = jobs.members(job)[:2], jobs.members(job)[2:]
    jobs.kill_pod(broken[1])
    job = jobs.wait_training("cut", 2, past=1)
    assert jobs.members(job) == whole, "who is left of the broken block stands by"
    assert job["status"]["world"]["layout"] == case.one
    job = jobs.wait_training("cut", 4, past=2)
    assert job["status"]["world"]["layout"] == case.two
    # Their order depends on the nodes: the successor may be on the node of a remaining member.
    assert {broken[0], *whole} < set(jobs.members(job))
    logs.append(evaluations(jobs, "cut"))
    replayed = job["status"].get("stepsReplayed", 0)

    jobs.patch("cut", {"replicas": 2})
    job = jobs.wait_training("cut", 2, past=3)
    logs.append(evaluations(jobs, "cut"))
    jobs.patch("cut", {"replicas": 4})
    job = jobs.wait_training("cut", 4, past=4)
    step = job["status"]["progress"]["step"]
    job = jobs.wait("cut", lambda job: job["status"]["progress"]["step"] > step + case.every)
    logs.append(evaluations(jobs, "cut"))
    assert job["status"].get("stepsReplayed", 0) == replayed, "no step is lost to another size"
    assert job["status"]["restarts"]["total"] == 1
    jobs.delete("cut")

    seen = {step: loss for each in logs for step, loss in each.items()}
    alone = {
        "name": "trainer",
        "image": "concertina/trainer:test",
        "env": [{"name": "PYTHONPATH", "value": str(AUDIO)}],
    }
    reproduced = {**trainer, "reproduction": {"lastStep": max(seen)}}
    jobs.create("whole", trainer=reproduced, pod={"containers": [alone]})
    jobs.wait_true("whole", "Complete")
    expected = evaluations(jobs, "whole")
    assert len(seen) > 3
    for step, loss in seen.items():
        assert loss == pytest.approx(expected[step], rel=BOUND), step


@pytest.mark.long(law="tests/simulation/stories/test_blocks.py::test_a_lost_member_takes_its_block_out_and_no_state")
def test_who_is_left_of_two_blocks_makes_one_at_once(jobs: Jobs, data: Path) -> None:
    create(jobs, CASES["tensor x pipeline x fsdp"], data)
    before = jobs.members(jobs.wait_training("cut", 4))
    lost, left = before[1::2], before[::2]
    for replica in lost:
        jobs.kill_pod(replica)
    job = jobs.wait("cut", lambda job: set(jobs.members(job)) == set(left))
    assert job["status"]["world"]["layout"] == "pipeline 2 x tensor 2"
    assert job["status"]["world"]["base"]["source"] == "Memory"
    job = jobs.wait_training("cut", 4, past=job["status"]["world"]["round"])
    assert set(left) < set(jobs.members(job))


def evaluations(jobs: Jobs, name: str) -> dict[int, float]:
    """Return the evaluations by step, as the coordinators of all rounds have logged them so far.

    Rounds whose pods are gone are left out.

    Raises:
        LocalClusterError: If the log can not be read for another reason than a missing pod.
    """
    running = [pod["metadata"]["name"] for pod in jobs.pods(name) if pod["status"]["phase"] != "Pending"]
    loss_by_step: dict[int, float] = {}
    for pod in running:
        try:
            logs = jobs.logs(pod)
        except LocalClusterError as error:
            if "NotFound" not in str(error):
                raise
            continue  # The pod was deleted meanwhile.
        loss_by_step |= {int(step): float(loss) for step, loss in EVALUATION.findall(logs)}
    return loss_by_step
