"""The bundled trainer in a layout: members are killed, fewer and more are asked for, and it computes as one worker."""

from __future__ import annotations

import os
import re
import runpy
from pathlib import Path
from typing import Any

import pytest

from builders.cluster.drills import build_data
from builders.cluster.operator import Jobs, endless, paced
from builders.programs import AUDIO, FAULTS

pytestmark = pytest.mark.usefixtures("operator")
LAW = (
    "tests/cluster/operator/training/test_layouts.py::test_tensor_groups_are_killed_shrunk_and_grown_on_the_same_curve"
)
IMAGE = os.pathsep.join(map(str, (FAULTS, AUDIO)))
EVERY = 10
BOUND = 2e-4
"""Of losses, relatively, as in test_balance.py."""
EVALUATION = re.compile(r"step (\d+): evaluation loss ([\d.]+) \(mean of")


def test_tensor_groups_are_killed_shrunk_and_grown_on_the_same_curve(jobs: Jobs, tmp_path: Path) -> None:
    build_data(str(tmp_path / "data"), {}, "--validation", "0.3")
    check_one_curve(jobs, endless(tmp_path / "data"), {"tensor": 2}, ("shard 2 x tensor 2", "tensor 2"))


@pytest.mark.long(law=LAW)
def test_so_is_a_model_of_one_s_own_and_its_copies(jobs: Jobs, tmp_path: Path) -> None:
    """The example's, on its features."""
    runpy.run_path(str(AUDIO / "make_features.py"))["main"](tmp_path / "features", 60)
    build_data(str(tmp_path / "data"), {}, "--validation", "0.3", "--classes", "8", source=tmp_path / "features")
    model = {"entrypoint": "audio_model:spec", "options": {"dim": 32, "blocks": 2}, "sequenceLength": 32}
    trainer = endless(tmp_path / "data", model=model)
    check_one_curve(jobs, trainer, {"shard": 2}, ("replicate 2 x shard 2", "shard 2"))


def check_one_curve(jobs: Jobs, trainer: dict[str, Any], parallelism: dict[str, int], layouts: tuple[str, str]) -> None:
    """`layouts`: of four replicas and of two. The image has the example's model."""
    container = paced(PYTHONPATH=IMAGE)
    trainer = {
        **trainer,
        "optimizer": {"learningRate": 0.003, "warmupSteps": 5},
        "evaluation": {"everySteps": EVERY, "sequences": 16},
    }
    elastic = {"minReplicas": 2, "growAfterSeconds": 0}
    pod = {"containers": [container], "terminationGracePeriodSeconds": 5}
    jobs.create("cut", replicas=4, elastic=elastic, trainer=trainer, pod=pod, parallelism=parallelism)
    job = jobs.wait_training("cut", 4)
    assert job["status"]["world"]["layout"] == layouts[0]
    logs = [evaluations(jobs, job)]

    broken, whole = jobs.members(job)[:2], jobs.members(job)[2:]
    jobs.kill_pod(broken[1])
    job = jobs.wait_training("cut", 2, past=1)
    assert jobs.members(job) == whole, "who is left of the broken pair stands by"
    assert job["status"]["world"]["layout"] == layouts[1]
    job = jobs.wait_training("cut", 4, past=2)
    # In which order is the nodes' affair: the replacement may be on the node of one that is left.
    assert {broken[0], *whole} < set(jobs.members(job))
    logs.append(evaluations(jobs, job))
    replayed = job["status"].get("stepsReplayed", 0)

    jobs.patch("cut", {"replicas": 2})
    job = jobs.wait_training("cut", 2, past=3)
    logs.append(evaluations(jobs, job))
    jobs.patch("cut", {"replicas": 4})
    job = jobs.wait_training("cut", 4, past=4)
    step = job["status"]["progress"]["step"]
    job = jobs.wait("cut", lambda job: job["status"]["progress"]["step"] > step + EVERY)
    logs.append(evaluations(jobs, job))
    assert job["status"]["stepsReplayed"] == replayed, "no step is lost to another size"
    assert job["status"]["restarts"]["total"] == 1
    jobs.delete("cut")

    seen = {step: loss for each in logs for step, loss in each.items()}
    container["env"] = [{"name": "PYTHONPATH", "value": IMAGE}]
    pod = {"containers": [container]}
    jobs.create("whole", trainer={**trainer, "reproduction": {"lastStep": max(seen)}}, pod=pod)
    expected = evaluations(jobs, jobs.wait_true("whole", "Complete"))
    assert len(seen) > 3
    for step, loss in seen.items():
        assert loss == pytest.approx(expected[step], rel=BOUND), step


def evaluations(jobs: Jobs, job: dict[str, Any]) -> dict[int, float]:
    """By step, as the lead has logged them so far."""
    return {int(step): float(loss) for step, loss in EVALUATION.findall(jobs.logs(jobs.members(job)[0]))}
