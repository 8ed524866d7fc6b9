"""Behaviour of a TrainingJob in kubectl: scale, explain, columns, categories, status."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from concertina.api.accounting import Goodput
from concertina.api.internal import Internal
from concertina.api.restarts import Restart, Restarts
from concertina.api.status import CheckpointMark, Condition, JobProgress, JobStatus, SnapshotMark, rfc3339
from concertina.api.world import Base, Claim, Member, World
from concertina.local.cluster import LocalCluster
from concertina.local.errors import LocalClusterError

ROOT = Path(__file__).resolve().parents[3]
NOW = rfc3339(1_800_000_000.5)
EARLIER = rfc3339(1_700_000_000)
STATUS = JobStatus(
    observed_generation=1,
    conditions=(
        Condition(type="Ready", status="True", reason="Running", message="3 of 4 train", last_transition_time=NOW),
        Condition(type="Stalled", status="False", reason="Running", last_transition_time=NOW, observed_generation=1),
    ),
    start_time=EARLIER,
    completion_time=NOW,
    replicas=3,
    selector="concertina.dev/job=demo",
    internal=Internal(attempts=(0, 1, 0)),
    world=World(
        round=4,
        claim=Claim(round=5, claim_id="c", committed=True, at=NOW, reason="Grow", message="one more is ready"),
        size="3/4",
        replicas=3,
        workers=3,
        coordinator="demo-0-0",
        members=(Member(replica="demo-0-0", uid="u", instance="i", node="n", workers=1),),
        base=Base(round=3, step=100),
        since=NOW,
    ),
    progress=JobProgress(
        step=123, steps=400, percent=30.75, eta_seconds=8.5, loss=2.375, tokens_per_second=1e6, mfu=0.5, at=NOW
    ),
    last_snapshot=SnapshotMark(step=123, at=NOW),
    last_checkpoint=CheckpointMark(step=100, round=3, complete=False, uri="s3://demo/checkpoints/x", at=EARLIER),
    restarts=Restarts(
        in_window=1,
        budget=9,
        total=2,
        recent=(Restart(at=NOW, replica="demo-1-0", node="n", reason="WorkerFailed", step=99, counted=True),),
    ),
    rounds=4,
    steps_replayed=7,
    goodput=Goodput(percent=97.5, productive_seconds=39.0, startup_seconds=1.0, at=NOW),
)
pytestmark = pytest.mark.usefixtures("crd")


@pytest.fixture
def job(cluster: LocalCluster, namespace: str) -> str:
    """Create the demo's job, with a status as the operator would write it."""
    cluster.kubectl("-n", namespace, "apply", "-f", str(ROOT / "examples" / "demo.yaml"))
    patch = json.dumps({"status": STATUS.manifest()})
    cluster.kubectl("-n", namespace, "patch", "tj/demo", "--subresource=status", "--type=merge", "-p", patch)
    return "demo"


def test_the_whole_status_is_kept(cluster: LocalCluster, namespace: str, job: str) -> None:
    stored = json.loads(cluster.kubectl("-n", namespace, "get", "tj", job, "-o", "json"))["status"]
    assert stored == STATUS.manifest()
    assert JobStatus.model_validate(stored) == STATUS


def test_columns(cluster: LocalCluster, namespace: str, job: str) -> None:
    header, row = cluster.kubectl("-n", namespace, "get", "tj", job).splitlines()
    assert header.split() == ["NAME", "STATUS", "WORLD", "STEP", "PROGRESS%", "LOSS", "CHECKPOINT", "FAILURES", "AGE"]
    cells = row.split()
    assert cells[:6] == ["demo", "Running", "3/4", "123", "30", "2.375"]
    assert cells[6].endswith(("d", "y"))
    assert cells[7] == "2"


def test_wide_columns_and_selectable_fields(cluster: LocalCluster, namespace: str, job: str) -> None:
    cluster.kubectl("-n", namespace, "label", "tj", job, "kueue.x-k8s.io/queue-name=research")
    header, row = cluster.kubectl("-n", namespace, "get", "tj", job, "-o", "wide").splitlines()
    assert header.split()[-4:] == ["REPLICAS", "ROUND", "QUEUE", "MESSAGE"]
    assert row.endswith("3 of 4 train")
    assert row.split()[9:12] == ["3", "4", "research"]
    selected = cluster.kubectl("-n", namespace, "get", "tj", "--field-selector", "spec.suspend=false", "-o", "name")
    assert selected.split() == ["trainingjob.concertina.dev/demo"]


def test_the_manager_of_a_job_never_changes(cluster: LocalCluster, namespace: str, job: str) -> None:
    patch = json.dumps({"spec": {"managedBy": "kueue.x-k8s.io/multikueue"}})
    with pytest.raises(LocalClusterError, match="managedBy can't be changed"):
        cluster.kubectl("-n", namespace, "patch", "tj", job, "--type=merge", "-p", patch)


@pytest.mark.parametrize("words", ["trainingjobs", "trainingjob", "tj", "concertina"])
def test_names_and_categories(cluster: LocalCluster, namespace: str, job: str, words: str) -> None:
    assert "trainingjob.concertina.dev/demo" in cluster.kubectl("-n", namespace, "get", words, "-o", "name")


def test_what_deletes_all_of_a_namespace_spares_jobs(cluster: LocalCluster, namespace: str, job: str) -> None:
    """`kubectl delete all --all` deletes pods and Services. It must not end a run."""
    assert "trainingjob" not in cluster.kubectl("-n", namespace, "get", "all", "-o", "name")


def test_scale(cluster: LocalCluster, namespace: str, job: str) -> None:
    cluster.kubectl("-n", namespace, "scale", "tj", job, "--replicas=5")
    path = f"/apis/concertina.dev/v1beta1/namespaces/{namespace}/trainingjobs/{job}/scale"
    scale = json.loads(cluster.kubectl("get", "--raw", path))
    assert scale["spec"] == {"replicas": 5}
    assert scale["status"] == {"replicas": 3, "selector": "concertina.dev/job=demo"}


@pytest.mark.parametrize(
    ("replicas", "message"),
    [(1, "elastic.minReplicas is larger than replicas"), (0, "should be greater than or equal to 1")],
)
def test_scale_to_a_size_that_can_not_be(
    cluster: LocalCluster, namespace: str, job: str, replicas: int, message: str
) -> None:
    with pytest.raises(LocalClusterError, match=message):
        cluster.kubectl("-n", namespace, "scale", "tj", job, f"--replicas={replicas}")


@pytest.mark.parametrize(
    ("field", "text"),
    [
        ("tj.spec.elastic", "Smallest number of replicas with which training continues"),
        ("tj.spec.trainer.model", "Width of the residual stream."),
        ("tj.spec.checkpoint.uri", "Two running jobs can't share a folder."),
        ("tj.spec.template.spec.containers.command", "Absent: the bundled trainer."),
        ("tj.status.world", "The highest round claimed."),
    ],
)
def test_explain(cluster: LocalCluster, field: str, text: str) -> None:
    assert text in " ".join(cluster.kubectl("explain", field).split())


def test_spec_and_status_are_written_apart(cluster: LocalCluster, namespace: str, job: str) -> None:
    """A status write can't change the spec, and a spec write can't change the status."""
    patch = json.dumps({"spec": {"replicas": 9}, "status": {"rounds": 5}})
    cluster.kubectl("-n", namespace, "patch", "tj/demo", "--subresource=status", "--type=merge", "-p", patch)
    cluster.kubectl("-n", namespace, "patch", "tj/demo", "--type=merge", "-p", '{"status": {"rounds": 6}}')
    stored = json.loads(cluster.kubectl("-n", namespace, "get", "tj", job, "-o", "json"))
    assert (stored["spec"]["replicas"], stored["status"].get("rounds", 0)) == (3, 5)
