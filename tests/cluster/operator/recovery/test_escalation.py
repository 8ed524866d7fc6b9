"""Escalation of failures on a real API server and scheduler: a bug ends the job early, a bad node does not."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from builders.cluster.drills import build_data
from builders.cluster.operator_process import Jobs, bundled
from concertina_data.data_manifest import parse

pytestmark = pytest.mark.usefixtures("operator")
BAD_NODES = "tests/unit/plan/pods/test_bad_nodes.py"
Object = dict[str, Any]


def recovery_actions(job: Object) -> dict[str, int]:
    """Return how many failures each recovery action has answered."""
    return {use["action"]: use["inWindow"] for use in job["status"]["restarts"].get("recoveryActions", ())}


def test_a_script_that_always_fails_the_same_way_is_a_bug(jobs: Jobs) -> None:
    script = "import os, time; time.sleep(0.2); raise ValueError(f'cannot read shard {os.getpid()}')"
    jobs.create("a", script, replicas=2)
    job = jobs.wait_true("a", "Failed")
    failed = jobs.condition(job, "Failed")
    assert failed["reason"] == "RepeatedFailure"
    assert "failed 3 times soon after its start with the same error" in failed["message"]
    assert "a bug in the script" in failed["message"]
    assert "ValueError: cannot read shard" in failed["message"]
    assert (job["status"].get("rounds", 0), job["status"]["restarts"]["total"]) == (3, 3)
    assert {each["error"] for each in job["status"]["restarts"]["recent"]} == {
        "Rank # exited with code 1: ValueError: cannot read shard #"
    }


@pytest.mark.long(law="tests/unit/plan/rounds/test_rounds.py::test_failures_use_up_the_budget")
def test_failures_that_differ_use_up_the_budget(jobs: Jobs) -> None:
    script = "import os; raise ValueError('abcdefghij'[int(os.environ['TORCHELASTIC_RESTART_COUNT']) % 10])"
    jobs.create("a", script, failurePolicy={"maxRestarts": 3})
    job = jobs.wait_true("a", "Failed")
    failed = jobs.condition(job, "Failed")
    assert failed["reason"] == "ReachedMaxRestarts"
    assert "The job failed 4 times within 3600 s, and failurePolicy.maxRestarts is 3." in failed["message"]
    assert (job["status"].get("rounds", 0), job["status"]["restarts"]["total"]) == (4, 4)


@pytest.mark.long(
    law="tests/cluster/operator/recovery/test_escalation.py::test_a_script_that_always_fails_the_same_way_is_a_bug"
)
def test_the_bundled_trainer_on_data_that_it_can_not_digest(jobs: Jobs, tmp_path: Path) -> None:
    """One token is beyond the vocabulary that the manifest names, so the same step fails on any replica."""
    text = ("a" * 40 + "\n") * 150
    (tmp_path / "text").write_text(text[:3000] + "\x7f" + text[3000:])
    build_data(str(tmp_path / "data"), {}, source=tmp_path / "text")
    manifest = tmp_path / "data/manifest.json"
    wrong = dataclasses.replace(parse(manifest.read_bytes(), str(tmp_path)), vocab_size=127)
    manifest.write_bytes(wrong.to_json())
    model = {"layers": 1, "dim": 32, "heads": 2, "vocabSize": 127, "sequenceLength": 32}
    spec = {"steps": 100, "model": model, "data": {"uri": str(tmp_path / "data")}, "globalBatchSize": 4}
    jobs.create(
        "a", trainer=spec, replicas=2, elastic={"minReplicas": 1, "scaleUp": {"stabilizationWindowSeconds": 30}}
    )
    job = jobs.wait_true("a", "Failed")
    failed = jobs.condition(job, "Failed")
    assert failed["reason"] == "RepeatedFailure", failed["message"]
    steps = {each["step"] for each in job["status"]["restarts"]["recent"]}
    assert len(steps) == 1
    assert f"failed 3 times at step {steps.pop()} with the same error" in failed["message"]
    assert "IndexError" in failed["message"]
    assert job["status"].get("rounds", 0) == 3


@pytest.mark.long(law="tests/unit/plan/pods/test_bad_nodes.py::test_which_nodes_are_avoided")
def test_a_bad_node_is_avoided_and_the_job_completes(jobs: Jobs, tmp_path: Path) -> None:
    """Every worker fails on the node on which the first worker started."""
    script = (
        "import os, pathlib, time; "
        f"bad, node = pathlib.Path({str(tmp_path / 'bad')!r}), os.environ['CONCERTINA_NODE']; "
        "os.environ['RANK'] == '0' and not bad.exists() and bad.write_text(node); "
        "time.sleep(0.5); "
        "assert bad.read_text() != node, 'the GPU has fallen off the bus'"
    )
    jobs.create("a", script, replicas=2)
    job = jobs.wait_true("a", "Complete")
    bad = (tmp_path / "bad").read_text()
    (avoided,) = job["status"]["avoidedNodes"]
    assert avoided["node"] == bad
    assert "the GPU has fallen off the bus" in avoided["reason"]
    assert bad not in jobs.members(job, "node")
    assert recovery_actions(job) == {"RestartWorkers": 1, "RecreatePod": 1}
    assert any(bad in event["message"] for event in jobs.events("a", "NodeAvoided"))
    assert any("failed again" in event["message"] for event in jobs.events("a", "RecreatePod"))


@pytest.mark.long(law=f"{BAD_NODES}::test_a_job_that_can_not_run_otherwise_takes_its_bad_nodes_back")
def test_a_job_that_fits_nowhere_else_gets_its_bad_node_back(jobs: Jobs, tmp_path: Path) -> None:
    """The template allows one node only, which the operator can't know.

    The pod finds no node, and then the node is forgiven.
    """
    nodes = jobs.cluster.api.call("GET", "/api/v1/nodes")["items"]
    name = nodes[0]["metadata"]["name"]
    script = (
        "import os, pathlib; "
        f"tries = pathlib.Path({str(tmp_path)!r}); "
        "(tries / os.environ['TORCHELASTIC_RESTART_COUNT']).touch(); "
        "assert len(list(tries.iterdir())) > 2, 'not yet'"
    )
    jobs.create("a", script, pod={"nodeSelector": {"kubernetes.io/hostname": name}})
    job = jobs.wait(
        "a", lambda job: any(each["node"] == name for each in job.get("status", {}).get("avoidedNodes", ()))
    )
    assert job["status"]["restarts"].get("inWindow", 0) == 2
    job = jobs.wait_true("a", "Complete")
    assert jobs.members(job, "node") == [name]


@pytest.mark.long(
    law="tests/unit/plan/recovery/test_escalation.py::test_the_whole_job_restarts_where_memory_is_suspected"
)
def test_a_memory_that_cannot_be_restored_twice_leads_to_a_whole_restart(
    jobs: Jobs, data: Path, tmp_path: Path
) -> None:
    """The restart is from the durable checkpoint, whatever is in node memory. The pods stay."""
    fault = tmp_path / "fault"
    checkpoint = {"uri": f"file://{tmp_path}/checkpoints", "everySteps": 10}
    jobs.create("a", **bundled(data, fault), replicas=2, checkpoint=checkpoint)
    job = jobs.wait("a", lambda job: job.get("status", {}).get("lastCheckpoint"))
    before = [pod["metadata"]["uid"] for pod in jobs.pods("a")]
    fault.write_text("0 memory_is_lost")
    jobs.kill_worker("a", jobs.members(job)[1])
    job = jobs.wait("a", lambda job: "RestartFromCheckpoint" in recovery_actions(job))
    assert recovery_actions(job) == {"RestartWorkers": 2, "RestartFromCheckpoint": 1}
    recent = job["status"]["restarts"]["recent"]
    assert [each["reason"] for each in recent] == ["WorkerSignaled", "RestoreFailed", "RestoreFailed"]
    events = jobs.events("a", "RestartFromCheckpoint")
    assert any("The state in node memory cannot be restored" in event["message"] for event in events)
    job = jobs.wait_training("a", 2, past=3)
    assert job["status"]["world"]["base"]["source"] == "Storage"
    assert [pod["metadata"]["uid"] for pod in jobs.pods("a")] == before
