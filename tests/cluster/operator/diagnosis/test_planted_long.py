"""Further planted problems in real runs, found by the commands of docs/diagnosis.md and reported by their alerts."""

from __future__ import annotations

import contextlib
import itertools
import socket
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest

from builders.cluster.operator_process import Jobs
from builders.cluster.planted import Alerts, bundled, fault, follow, past
from builders.prometheus import needed
from builders.stores.hostile import proxy
from builders.throttled import throttled
from builders.until import until
from concertina.diagnosis.problems import Problem
from concertina.local import s3

LAW = "tests/cluster/operator/diagnosis/test_planted.py::test_its_alert_fires_and_no_other[reads-slowly]"
pytestmark = [pytest.mark.timeout(600), pytest.mark.long(law=LAW), needed]

LARGER = {"layers": 2, "dim": 128, "heads": 4, "vocabSize": 256, "sequenceLength": 128}
"""Model whose steps are mostly arithmetic, which is slow on a throttled rank."""

# --- those that keep a processor busy, one after the other ------------------------------------------------------------


def test_batches_too_small(jobs: Jobs, data: Path, shell: Mapping[str, str], alerts: Alerts) -> None:
    bundled(jobs, data, "tiny", pace="0", replicas=2, trainer={"globalBatchSize": 2})
    past(jobs, "tiny", 200)
    follow(shell, "Batches too small", "tiny")
    alerts.wait("tiny", Problem.EXPOSED_COMMUNICATION)
    jobs.delete("tiny")


def test_a_rank_that_does_not_call_a_collective(
    jobs: Jobs, data: Path, shell: Mapping[str, str], alerts: Alerts, tmp_path: Path
) -> None:
    file, policy = tmp_path / "fault", {"hangTimeoutSeconds": 5, "onHang": "Report"}
    bundled(jobs, data, "hangs", file, pace="0.1", replicas=2, failurePolicy=policy)
    past(jobs, "hangs", 20)
    file.write_text("1 compute_forever")
    follow(shell, "A hang", "hangs")
    alerts.wait("hangs", Problem.HANG)
    file.unlink()
    jobs.delete("hangs")


def test_a_rank_that_gets_little_processor_time(
    jobs: Jobs, data: Path, shell: Mapping[str, str], alerts: Alerts
) -> None:
    bundled(jobs, data, "throttled", replicas=2, trainer={"model": LARGER})
    slow = jobs.members(past(jobs, "throttled", 3))[1]
    with throttled(jobs.worker("throttled", slow), 0.05):
        alerts.wait("throttled", Problem.STRAGGLER, frozenset({Problem.EXPOSED_COMMUNICATION}))
        jobs.wait("throttled", lambda job: job["status"].get("stragglers"))
        # The slow rank's own collectives are slow too, which counts as communication.
        follow(shell, "A slow rank", "throttled", alone=False)
    jobs.delete("throttled")


def test_workers_that_are_killed(jobs: Jobs, data: Path, shell: Mapping[str, str], alerts: Alerts) -> None:
    """Workers are killed until the alert fires, because the failures soon leave the window that it looks at."""
    bundled(jobs, data, "killed", failurePolicy={"maxRestarts": 100})

    def told(round: int) -> bool:
        job = jobs.wait_training("killed", 1, past=round)
        past(jobs, "killed", (job["status"].get("progress") or {}).get("step", 0) + 3)
        jobs.kill_worker("killed", jobs.members(job)[0])
        return alerts.firing("killed") == {Problem.FREQUENT_FAILURES}

    rounds = itertools.count()
    until(lambda: told(next(rounds)), "the alert", lambda: [alerts.firing("killed"), jobs.describe("killed")])
    jobs.wait_training("killed", 1, past=next(rounds))
    follow(shell, "Workers that are killed again and again", "killed")
    jobs.delete("killed")


# --- those that pause most of the time, side by side ------------------------------------------------------------------


class Run(NamedTuple):
    name: str
    problem: Problem


RUNS = {
    "A slow line between two replicas": Run("far-apart", Problem.EXPOSED_COMMUNICATION),
    "A slow store for checkpoints": Run("slow-store", Problem.CHECKPOINT_OLD),
    "A flipped bit in a checkpoint": Run("flipped", Problem.CORRUPT_STATE),
    "A full disk": Run("full-disk", Problem.STORAGE_REFUSES),
    "A tracker that hangs": Run("untracked", Problem.TRACKER_UNREACHABLE),
    "Memory that grows": Run("leaks", Problem.MEMORY_GROWS),
}
"""Runs by heading."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("planted")


@pytest.fixture(scope="module")
def planted(jobs: Jobs, data: Path, alerts: Alerts, folder: Path) -> Iterator[Jobs]:
    """Start all of RUNS at once, and wait until they train, or have failed."""
    with contextlib.ExitStack() as healed:
        bundled(jobs, data, "saved", checkpoint={"uri": saved(folder), "everySteps": 5}, trainer={"steps": 10})
        bundled(jobs, data, "far-apart", replicas=2, environment={"LINE_DELAY": "0.05"})
        bundled(jobs, data, "leaks", fault(folder, "0 leak 1000000"))
        full_disk(jobs, data)
        healed.enter_context(slow_store(jobs, data, folder))
        healed.enter_context(tracker_that_hangs(jobs, data))
        jobs.wait_true("saved", "Complete")
        flipped_bit(jobs, data, folder)
        yield jobs


def saved(folder: Path) -> str:
    return f"file://{folder}/run"


def flipped_bit(jobs: Jobs, data: Path, folder: Path) -> None:
    checkpoint = jobs.get("saved")["status"]["lastCheckpoint"]["uri"]
    (shard,) = Path(checkpoint.removeprefix("file://")).glob("*.safetensors")
    content = bytearray(shard.read_bytes())
    content[-100] ^= 1
    shard.write_bytes(content)
    resumed = {"uri": f"file://{folder}/next", "resumeFrom": saved(folder)}
    bundled(jobs, data, "flipped", checkpoint=resumed, failurePolicy={"maxRestarts": 1})


def full_disk(jobs: Jobs, data: Path) -> None:
    full = {"name": "full", "emptyDir": {"medium": "Memory", "sizeLimit": "64Ki"}}
    mounted = {"volumeMounts": [{"name": "full", "mountPath": "/full"}]}
    checkpoint = {"uri": "file:///full/run", "everySteps": 5}
    bundled(jobs, data, "full-disk", checkpoint=checkpoint, container=mounted, volumes=[full])


@contextlib.contextmanager
def slow_store(jobs: Jobs, data: Path, folder: Path) -> Iterator[None]:
    with (
        s3.running(folder / "s3", buckets=("there",)) as storage,
        proxy(storage.environment()["AWS_ENDPOINT_URL"]) as way,
    ):
        way.delay = 4.0
        variables = {**storage.environment(), "AWS_ENDPOINT_URL": way.url}
        body = {"metadata": {"name": "slow"}, "stringData": variables}
        jobs.cluster.api.call("POST", f"/api/v1/namespaces/{jobs.namespace}/secrets", body)
        checkpoint = {"uri": "s3://there/slow-store", "everySeconds": 2, "secretName": "slow"}
        bundled(jobs, data, "slow-store", checkpoint=checkpoint)
        yield


@contextlib.contextmanager
def tracker_that_hangs(jobs: Jobs, data: Path) -> Iterator[None]:
    """Serve a tracker whose connections the kernel accepts, and that never answers."""
    with socket.create_server(("127.0.0.1", 0)) as hanging:
        tracking = {"backend": "MLflow", "uri": f"http://127.0.0.1:{hanging.getsockname()[1]}"}
        bundled(jobs, data, "untracked", tracking=tracking, environment={"MLFLOW_HTTP_REQUEST_TIMEOUT": "2"})
        yield


Looked = Mapping[str, Future[None]]


@pytest.fixture(scope="module")
def looked(planted: Jobs, shell: Mapping[str, str], alerts: Alerts, folder: Path) -> Iterator[Looked]:
    """Wait for all alerts at once, then run the commands, because most of the time is waiting."""

    def look(section: str, run: Run) -> None:
        alerts.wait(run.name, run.problem)
        follow(shell, section, run.name, uri=saved(folder))

    with ThreadPoolExecutor(len(RUNS)) as beside:
        yield {section: beside.submit(look, section, run) for section, run in RUNS.items()}


@pytest.mark.parametrize("section", RUNS)
def test_what_is_planted_is_found_and_its_alert_fires_alone(looked: Looked, section: str) -> None:
    looked[section].result()
