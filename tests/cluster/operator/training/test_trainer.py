"""The bundled trainer under the operator: it reports problems with storage or data, and continues after a repair."""

from __future__ import annotations

import shutil
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from builders.cluster.drills import build_data
from builders.cluster.operator_process import Jobs, endless, paced
from concertina.local import s3

pytestmark = pytest.mark.usefixtures("operator")
Object = dict[str, Any]


@pytest.fixture(scope="module")
def storage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[s3.Server]:
    with s3.running(tmp_path_factory.mktemp("s3"), buckets=("there",)) as server:
        yield server


def secret(jobs: Jobs, storage: s3.Server, **changes: str) -> None:
    """Create the Secret `s3` in the jobs' namespace."""
    body = {"metadata": {"name": "s3"}, "stringData": {**storage.environment(), **changes}}
    jobs.cluster.api.call("POST", f"/api/v1/namespaces/{jobs.namespace}/secrets", body)


def create(jobs: Jobs, data: Path, steps: int = 12, bucket: str = "", **trainer: Any) -> None:
    """Create a job `a` of one replica that writes a checkpoint every 4 steps into the bucket, if one is named."""
    model = {"layers": 1, "dim": 32, "heads": 2, "vocabSize": 256, "sequenceLength": 32}
    spec: Object = {"steps": steps, "model": model, "data": {"uri": str(data)}, "globalBatchSize": 4, **trainer}
    checkpoint = {"uri": f"s3://{bucket}/{jobs.namespace}", "everySteps": 4, "secretName": "s3"}
    jobs.create("a", trainer=spec, **({"checkpoint": checkpoint} if bucket else {}))


def complete(jobs: Jobs, steps: int) -> Object:
    job = jobs.wait_true("a", "Complete")
    assert job["status"]["progress"]["step"] == steps
    return job


@pytest.mark.long(
    law="tests/unit/plan/lifecycle/test_beginning_and_end.py::test_training_goes_on_while_storage_fails_but_a_person_must_act"
)
def test_a_bucket_that_does_not_exist_is_waited_for(jobs: Jobs, storage: s3.Server, data: Path) -> None:
    bucket = f"b-{uuid.uuid4().hex[:8]}"
    secret(jobs, storage)
    create(jobs, data, bucket=bucket)
    job = jobs.wait_true("a", "Stalled")
    message = jobs.condition(job, "Stalled")["message"]
    assert bucket in message
    assert jobs.condition(job, "Failed")["status"] == "False"
    storage.create_bucket(bucket)
    job = complete(jobs, 12)
    assert job["status"]["lastCheckpoint"]["step"] == 12
    assert job["status"]["lastCheckpoint"]["uri"].startswith(f"s3://{bucket}/")
    assert job["status"]["restarts"]["total"] == 0


@pytest.mark.long(
    law="tests/unit/plan/lifecycle/test_beginning_and_end.py::test_training_goes_on_while_storage_fails_but_a_person_must_act"
)
def test_storage_that_refuses_the_credentials(jobs: Jobs, storage: s3.Server, data: Path) -> None:
    secret(jobs, storage, AWS_SECRET_ACCESS_KEY="wrong")
    create(jobs, data, bucket="there")
    job = jobs.wait_true("a", "Stalled")
    assert "credentials" in jobs.condition(job, "Stalled")["message"]
    assert jobs.condition(job, "Failed")["status"] == "False"
    # The Secret is repaired. Pods read it when they start.
    jobs.cluster.kubectl("delete", "secret", "s3", "-n", jobs.namespace)
    secret(jobs, storage)
    for pod in jobs.pods("a"):
        jobs.kill_pod(pod["metadata"]["name"])
    complete(jobs, 12)


@pytest.mark.long(law="tests/train/trainer/test_data.py::test_a_worker_says_bad_input_and_exits_78")
def test_a_shard_with_a_wrong_checksum_fails_the_job_with_its_name(jobs: Jobs, data: Path, tmp_path: Path) -> None:
    broken = tmp_path / "data"
    shutil.copytree(data, broken)
    (shard,) = broken.glob("*.bin")
    content = bytearray(shard.read_bytes())
    content[100] ^= 1
    shard.write_bytes(content)
    create(jobs, broken)
    job = jobs.wait_true("a", "Failed")
    message = jobs.condition(job, "Failed")["message"]
    assert shard.name in message
    assert "is damaged" in message
    assert jobs.condition(job, "Stalled")["reason"] == "Damaged", "by which the alert knows it"
    assert job["status"].get("rounds", 0) == 1, "what can't be helped was tried again"


@pytest.mark.long(law="tests/drill/test_drills.py::test_the_drill_passes[storage-outage]")
def test_a_storage_that_is_restarted_while_checkpoints_are_written(jobs: Jobs, storage: s3.Server, data: Path) -> None:
    secret(jobs, storage)
    create(jobs, data, steps=400, bucket="there", globalBatchSize=8)
    jobs.wait("a", lambda job: job.get("status", {}).get("lastCheckpoint", {}).get("step", 0) >= 4)
    storage.kill()
    seen = jobs.get("a")["status"].get("progress", {}).get("step", 0)
    jobs.wait("a", lambda job: job["status"]["progress"]["step"] > seen)
    storage.start()
    job = complete(jobs, 400)
    assert job["status"]["lastCheckpoint"]["step"] == 400
    assert job["status"]["restarts"]["total"] == 0


@pytest.mark.long(law="tests/drill/test_drills.py::test_the_drill_passes[storage-outage]")
def test_a_requested_checkpoint_is_in_storage_when_the_command_returns(
    jobs: Jobs, storage: s3.Server, data: Path
) -> None:
    secret(jobs, storage)
    checkpoint = {"uri": f"s3://there/{jobs.namespace}", "everySteps": 1_000_000, "secretName": "s3"}
    jobs.create("a", trainer=endless(data), pod={"containers": [paced()]}, checkpoint=checkpoint)
    jobs.wait("a", lambda job: job.get("status", {}).get("progress", {}).get("step", 0) >= 4)
    kubeconfig = str(jobs.cluster.kubeconfig)
    command = [str(Path(sys.executable).with_name("concertina")), "checkpoint", "create", "a", "-n", jobs.namespace]
    done = subprocess.run([*command, "--kubeconfig", kubeconfig], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    status = jobs.get("a")["status"]
    assert status["checkpointRequest"]["state"] == "Done"
    assert status["lastCheckpoint"]["step"] >= status["checkpointRequest"]["step"] >= 5
    assert status["world"]["round"] == 1, "training went on"


@pytest.mark.long(law="tests/train/data/test_reading.py::test_a_store_that_is_away_when_a_round_begins_is_waited_for")
def test_data_whose_store_is_away_are_waited_for(jobs: Jobs, storage: s3.Server) -> None:
    secret(jobs, storage)
    uri = f"s3://there/{jobs.namespace}-data"
    build_data(uri, storage.environment())
    container = {"name": "trainer", "image": "concertina/trainer:test", "envFrom": [{"secretRef": {"name": "s3"}}]}
    model = {"layers": 1, "dim": 32, "heads": 2, "vocabSize": 256, "sequenceLength": 32}
    trainer: Object = {"steps": 12, "model": model, "globalBatchSize": 4}
    storage.kill()
    try:
        asked = {**trainer, "data": {"uri": uri}}
        jobs.create("a", pod={"containers": [container]}, trainer=asked, failurePolicy={"maxRestarts": 0})
        job = jobs.wait_true("a", "Stalled")
        stalled = jobs.condition(job, "Stalled")
        assert stalled["reason"] == "DataUnavailable"
        assert "training waits for data: http://127.0.0.1" in stalled["message"]
        assert "can't be reached" in stalled["message"]
    finally:
        storage.start()
    job = complete(jobs, 12)
    assert job["status"]["restarts"]["total"] == 0
    assert jobs.condition(job, "Stalled")["status"] == "False"


@pytest.mark.long(law="tests/train/agent/test_bundled.py::test_drain_loses_no_step_and_waits_for_the_peers_copies")
def test_who_leaves_while_storage_is_away_leaves_its_snapshot_with_a_peer(
    jobs: Jobs, storage: s3.Server, data: Path
) -> None:
    """There are two replicas and no fewer.

    The round would be saved before it ends, but its grace is too short for that.
    """
    secret(jobs, storage)
    checkpoint = {"uri": f"s3://there/{jobs.namespace}", "everySteps": 1_000_000, "secretName": "s3"}
    pod = {"containers": [paced()], "terminationGracePeriodSeconds": 6}
    jobs.create("a", replicas=2, pod=pod, trainer=endless(data), checkpoint=checkpoint)
    job = jobs.wait("a", lambda job: job.get("status", {}).get("progress", {}).get("step", 0) >= 4)
    leaves = job["status"]["world"]["members"][1]["replica"]
    storage.kill()
    try:
        jobs.cluster.kubectl("delete", "pod", leaves, "-n", jobs.namespace, "--wait=false")
        jobs.wait_gone(f"pod/{leaves}")
        before = jobs.get("a")["status"]["progress"]["step"]
        job = jobs.wait(
            "a",
            lambda job: leaves not in jobs.members(job) and job["status"]["progress"]["step"] > before,
        )
    finally:
        storage.start()
    assert job["status"].get("stepsReplayed", 0) == 0
    assert job["status"]["restarts"].get("inWindow", 0) == 0
    assert "lastCheckpoint" not in job["status"]


@pytest.mark.long(
    law="tests/unit/plan/lifecycle/test_beginning_and_end.py::test_a_job_whose_last_step_is_in_storage_is_complete_at_once"
)
def test_a_job_created_again_on_a_complete_checkpoint_is_complete_at_once(
    jobs: Jobs, storage: s3.Server, data: Path
) -> None:
    secret(jobs, storage)
    create(jobs, data, bucket="there")
    complete(jobs, 12)
    jobs.delete("a")
    jobs.wait_gone("tj/a")
    create(jobs, data, bucket="there")
    job = jobs.wait_true("a", "Complete")
    assert job["status"].get("rounds", 0) == 0
