"""A Job for each checkpoint, made by an operator with the chart's permissions, which is killed meanwhile."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from builders.cluster.operator_process import Jobs, Operator, paced

Object = dict[str, Any]
SCORE = """
import json, os, pathlib
folder = pathlib.Path(os.environ["CONCERTINA_CHECKPOINT_URI"].removeprefix("file://"))
step = json.loads((folder / "manifest.json").read_text())["id"]["step"]
assert step == int(os.environ["CONCERTINA_CHECKPOINT_STEP"]), step
raise SystemExit(0 if step % 2 == 0 else "an odd step")
"""


def template(jobs: Jobs, name: str) -> None:
    container = {"name": "score", "image": "concertina/trainer:test", "command": ["python3", "-c", SCORE]}
    body = {
        "apiVersion": "v1",
        "kind": "PodTemplate",
        "metadata": {"name": name},
        "template": {"spec": {"containers": [container]}},
    }
    jobs.cluster.api.call("POST", f"/api/v1/namespaces/{jobs.namespace}/podtemplates", body)


def made(jobs: Jobs) -> dict[str, Object]:
    items = jobs.cluster.api.call("GET", f"/apis/batch/v1/namespaces/{jobs.namespace}/jobs")["items"]
    return {item["metadata"]["name"]: item for item in items}


def marks(job: Object) -> list[Object]:
    return list(job.get("status", {}).get("evaluationJobs", ()))


def ended(job: Object) -> bool:
    return bool(marks(job)) and all(mark["state"] in ("Succeeded", "Failed") for mark in marks(job))


@pytest.mark.long(
    law="tests/unit/plan/lifecycle/test_evaluation_jobs.py::"
    "test_a_checkpoint_gets_one_job_which_is_listed_before_it_is_created"
)
def test_each_checkpoint_gets_one_job_over_a_restart_of_the_operator(
    jobs: Jobs, operator: Operator, data: Path, tmp_path: Path
) -> None:
    template(jobs, "score")
    model = {"layers": 1, "dim": 32, "heads": 2, "vocabSize": 256, "sequenceLength": 32}
    trainer = {"steps": 60, "model": model, "data": {"uri": str(data)}, "globalBatchSize": 4}
    jobs.create(
        "scored", trainer=trainer, pod={"containers": [paced()]},
        checkpoint={"uri": f"file://{tmp_path}/scored", "everySteps": 15, "keep": 20},
        evaluationJob={"podTemplate": "score", "keep": 9, "maxRunning": 2},
    )  # fmt: skip
    jobs.create(
        "refused", trainer={**trainer, "steps": 20}, pod={"containers": [paced()]},
        checkpoint={"uri": f"file://{tmp_path}/refused"}, evaluationJob={"podTemplate": "missing"},
    )  # fmt: skip
    jobs.wait("scored", marks)
    operator.end()
    operator.start()
    jobs.wait_true("scored", "Complete")
    status = jobs.wait("scored", lambda job: ended(job) and marks(job)[-1]["step"] == 60)["status"]
    listed = status["evaluationJobs"]
    found = {name: job for name, job in made(jobs).items() if name.startswith("scored-")}
    assert sorted(mark["name"] for mark in listed) == sorted(found), "one for each, and no other"
    assert {mark["step"]: mark["state"] for mark in listed} == {
        mark["step"]: "Failed" if mark["step"] % 2 else "Succeeded" for mark in listed
    }
    assert len({mark["step"] for mark in listed}) == len(listed) >= 2
    for job in found.values():
        (owner,) = job["metadata"]["ownerReferences"]
        assert (owner["kind"], owner["name"]) == ("TrainingJob", "scored")

    jobs.wait_true("refused", "Complete")
    (mark,) = jobs.wait("refused", ended)["status"]["evaluationJobs"]
    assert mark["state"] == "Failed"
    assert "create the PodTemplate missing" in mark["message"]
    assert "create the PodTemplate missing" in jobs.events("refused", "EvaluationJobFailed")[0]["message"]
    jobs.delete("scored")
    jobs.wait_gone("job", "--all")
