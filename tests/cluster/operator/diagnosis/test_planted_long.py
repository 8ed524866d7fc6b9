"""More problems that are planted in real runs, found by the commands of docs/diagnosis.md and told by their alerts."""

from __future__ import annotations

import itertools
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from builders.cluster.operator import Jobs
from builders.cluster.planted import Alarms, bundled, fault, follow, past
from builders.prometheus import needed
from builders.stores.hostile import proxy
from builders.throttled import throttled
from builders.until import until
from concertina.diagnosis.problems import Problem
from concertina.local import s3

LAW = "tests/cluster/operator/diagnosis/test_planted.py::test_its_alert_fires_and_no_other[reads-slowly]"
pytestmark = [pytest.mark.timeout(600), pytest.mark.long(law=LAW), needed]
Found = Callable[..., None]


@pytest.fixture
def found(jobs: Jobs, shell: Mapping[str, str], alarms: Alarms) -> Found:
    """By the problem's alert and no other, and by the section of the page."""

    def look(name: str, section: str, problem: Problem, **more: Any) -> None:
        follow(shell, section, name, **more)
        alarms.wait(name, problem)
        jobs.delete(name)

    return look


def test_batches_too_small(jobs: Jobs, data: Path, found: Found) -> None:
    bundled(jobs, data, "tiny", pace="0", replicas=2, trainer={"globalBatchSize": 2})
    past(jobs, "tiny", 200)
    found("tiny", "Batches too small", Problem.EXPOSED_COMMUNICATION)


def test_a_slow_line_between_two_ranks(jobs: Jobs, data: Path, found: Found) -> None:
    bundled(jobs, data, "far-apart", replicas=2, environment={"LINE_DELAY": "0.05"})
    past(jobs, "far-apart", 20)
    found("far-apart", "A slow line between two replicas", Problem.EXPOSED_COMMUNICATION)


def test_a_rank_that_is_throttled(jobs: Jobs, data: Path, found: Found) -> None:
    bundled(jobs, data, "throttled", replicas=2)
    job = past(jobs, "throttled", 3)
    with throttled(jobs.worker("throttled", jobs.members(job)[1]), 0.03):
        jobs.wait("throttled", lambda job: job.get("status", {}).get("stragglers"))
        found("throttled", "A slow rank", Problem.STRAGGLER)


def test_workers_that_are_killed(jobs: Jobs, data: Path, shell: Mapping[str, str], alarms: Alarms) -> None:
    """Again and again until the alert fires: what it looks at is soon over."""
    bundled(jobs, data, "killed", failurePolicy={"maxRestarts": 100})

    def told(round: int) -> bool:
        job = jobs.wait_training("killed", 1, past=round)
        past(jobs, "killed", (job["status"].get("progress") or {}).get("step", 0) + 3)
        jobs.kill_worker("killed", jobs.members(job)[0])
        return alarms.firing("killed") == {Problem.FREQUENT_FAILURES}

    rounds = itertools.count()
    until(lambda: told(next(rounds)), "the alert", lambda: [alarms.firing("killed"), jobs.describe("killed")])
    jobs.wait_training("killed", 1, past=next(rounds))
    follow(shell, "Workers that are killed again and again", "killed")
    jobs.delete("killed")


def test_a_slow_store(jobs: Jobs, data: Path, found: Found, tmp_path: Path) -> None:
    with (
        s3.running(tmp_path / "s3", buckets=("there",)) as storage,
        proxy(storage.environment()["AWS_ENDPOINT_URL"]) as way,
    ):
        way.delay = 4.0
        variables = {**storage.environment(), "AWS_ENDPOINT_URL": way.url}
        body = {"metadata": {"name": "slow"}, "stringData": variables}
        jobs.cluster.api.call("POST", f"/api/v1/namespaces/{jobs.namespace}/secrets", body)
        checkpoint = {"uri": "s3://there/slow-store", "everySeconds": 2, "secretName": "slow"}
        bundled(jobs, data, "slow-store", checkpoint=checkpoint)
        past(jobs, "slow-store", 60)
        found("slow-store", "A slow store for checkpoints", Problem.CHECKPOINT_OLD)


def test_a_flipped_bit(jobs: Jobs, data: Path, found: Found, tmp_path: Path) -> None:
    uri = f"file://{tmp_path}/run"
    bundled(jobs, data, "saved", checkpoint={"uri": uri, "everySteps": 5}, trainer={"steps": 10})
    jobs.wait_true("saved", "Complete")
    checkpoint = jobs.get("saved")["status"]["lastCheckpoint"]["uri"]
    (shard,) = Path(checkpoint.removeprefix("file://")).glob("*.safetensors")
    content = bytearray(shard.read_bytes())
    content[-100] ^= 1
    shard.write_bytes(content)
    resumed = {"uri": f"file://{tmp_path}/next", "resumeFrom": uri}
    bundled(jobs, data, "flipped", checkpoint=resumed, failurePolicy={"maxRestarts": 1})
    jobs.wait_true("flipped", "Failed")
    found("flipped", "A flipped bit in a checkpoint", Problem.CORRUPT_STATE, uri=uri)


def test_a_full_disk(jobs: Jobs, data: Path, found: Found) -> None:
    full = {"name": "full", "emptyDir": {"medium": "Memory", "sizeLimit": "64Ki"}}
    mounted = {"volumeMounts": [{"name": "full", "mountPath": "/full"}]}
    checkpoint = {"uri": "file:///full/run", "everySteps": 5}
    bundled(jobs, data, "full-disk", checkpoint=checkpoint, container=mounted, volumes=[full])
    jobs.wait_true("full-disk", "Stalled")
    found("full-disk", "A full disk", Problem.STORAGE_REFUSES)


def test_memory_that_grows(jobs: Jobs, data: Path, found: Found, tmp_path: Path) -> None:
    bundled(jobs, data, "leaks", fault(tmp_path, "0 leak 1000000"))
    past(jobs, "leaks", 20)
    found("leaks", "Memory that grows", Problem.MEMORY_GROWS)


def test_a_tracker_that_hangs(jobs: Jobs, data: Path, found: Found) -> None:
    """Connections are taken, by the kernel, and nobody ever answers."""
    with socket.create_server(("127.0.0.1", 0)) as hanging:
        tracking = {"backend": "MLflow", "uri": f"http://127.0.0.1:{hanging.getsockname()[1]}"}
        bundled(jobs, data, "untracked", tracking=tracking, environment={"MLFLOW_HTTP_REQUEST_TIMEOUT": "2"})
        jobs.wait("untracked", lambda job: job.get("status", {}).get("tracking"))
        found("untracked", "A tracker that hangs", Problem.TRACKER_UNREACHABLE)
