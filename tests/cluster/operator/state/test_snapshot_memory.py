"""Job whose pods have exactly the memory that the check requires: it is enough, however the world changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from builders.cluster.drills import build_data
from builders.cluster.operator_process import Jobs, bundled
from concertina.api.parse import parse_spec
from concertina.plan.state import snapshot_memory

pytestmark = pytest.mark.usefixtures("operator")
Object = dict[str, Any]


def just_enough(spec: Object, replicas: int) -> str:
    """Return the memory in bytes with which a container passes the check."""
    return str(-(-snapshot_memory.needed(parse_spec({"spec": spec}), replicas) * 10 // 9))


@pytest.mark.long(law="tests/train/trainer/state/test_room.py::test_a_round_after_a_failure_has_room_though")
def test_rounds_after_failures_fit_into_the_memory_that_was_checked(jobs: Jobs, tmp_path: Path) -> None:
    build_data(str(tmp_path / "data"), {})
    parts = bundled(tmp_path / "data", tmp_path / "no-fault")
    trainer = {**parts["trainer"], "snapshot": {"everySteps": 1}}
    # A snapshot is larger than the allowance for headers and the agent's files, which are few here.
    trainer["model"] = {**trainer["model"], "layers": 3, "dim": 256}
    checkpoint = {"uri": (tmp_path / "checkpoints").as_uri(), "everySteps": 5}
    spec = {"replicas": 2, "template": {"spec": {"containers": [{"name": "trainer", "image": "x"}]}},
            "trainer": trainer, "checkpoint": checkpoint}  # fmt: skip
    (container,) = parts["pod"]["containers"]
    container["resources"] = {"limits": {"memory": just_enough(spec, 2)}}
    jobs.create("a", pod=parts["pod"], replicas=2, trainer=trainer, checkpoint=checkpoint, elastic={"minReplicas": 2})

    past = 0
    for what in ("worker", "pod", "worker", "nothing"):
        jobs.wait_training("a", 2, past)
        job = jobs.wait("a", has_used_every_slot)
        past, replica = job["status"]["world"]["round"], jobs.members(job)[1]
        if what == "worker":
            jobs.kill_worker("a", replica)
        elif what == "pod":
            jobs.kill_pod(next(pod["metadata"]["name"] for pod in jobs.pods("a") if replica in pod["metadata"]["name"]))
            jobs.wait("a", lambda job, replica=replica: replica not in jobs.members(job))
    restarts, last = job["status"]["restarts"], job["status"].get("lastFailure")
    assert restarts["total"] == 3, last


def has_used_every_slot(job: Object) -> bool:
    world, snapshot = job["status"]["world"], job["status"].get("lastSnapshot", {})
    return len(world["members"]) == 2 and snapshot.get("step", 0) > world["base"]["step"] + 10
