"""Arbitrary content of objects in the API server: they are read, and plan() decides.

plan() deletes or ends only the job's own pods, by kind, uid, namespace and name together.
"""

from __future__ import annotations

import copy
import json
import random
import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from builders import jobs
from concertina.api.status import JobStatus
from concertina.kube.parse.views import OwnedPod, job_view, node_view, pod_view
from concertina.plan.actions import CreatePod, DeletePod, EndPod, Plan
from concertina.plan.observed import JobObservation
from concertina.plan.plan import plan

Raw = dict[str, Any]
SEEDS = st.integers(0, 2**48)
HERE = "tests/unit/plan/test_hostile_objects.py"
NUMBERS = (-(2**31), -1, 0, 1, 2, 78, 137, 143, 29400, 2**31 - 1, 2**53, 2**63 - 1)
WORDS = (
    "", "0", "-1", "999999999", "x" * 300, "\x00\n\ufffd", "a,b,,", "Running", "Failed", "Succeeded", "Error",
    "OOMKilled", "Unschedulable", "CrashLoopBackOff", "ImagePullBackOff", "True", "False", "Unknown", "Ready",
    "DisruptionTarget", "PodScheduled", "trainer", "concertina-agent", "demo", "demo-0-0", "demo-1-1", "other-0-0",
    "uid-1", "node-0", "2027-01-15T08:00:00Z", "1970-01-01T00:00:00Z", "9999-12-31T23:59:59Z", "10", "1e9Gi",
    "Always", "Never",
)  # fmt: skip
TIMES = (*(word for word in WORDS if word.endswith("Z")), "0001-01-01T00:00:00Z", "9999-12-31T23:59:59-14:00")
TIME = re.compile(r"\d{4}-\d\d-\d\dT.*Z")
QUANTITIES = ("0", "1", "1n", "100m", "1e3", "1.5Gi", "9E", "9223372036854775807", "100Pi")
"""Fields in which the API server accepts only times and quantities."""


def pod(index: int) -> Raw:
    name = f"demo-{index}-0"
    owner = {"apiVersion": "concertina.dev/v1beta1", "kind": "TrainingJob", "name": "demo", "uid": jobs.UID}
    trainer = {"name": "trainer", "ready": True, "restartCount": 1, "state": {"running": {}}, "lastState": {}}
    ended = {"exitCode": 1, "reason": "Error", "message": "it ended"}
    condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/3 nodes"}
    return {
        "metadata": {
            "name": name,
            "namespace": "default",
            "uid": f"pod-{index}-0",
            "creationTimestamp": "2027-01-15T08:00:00Z",
            "deletionTimestamp": "2027-01-15T08:00:30Z",
            "deletionGracePeriodSeconds": 30,
            "labels": {"concertina.dev/job": "demo", "concertina.dev/replica-index": str(index)},
            "annotations": {"concertina.dev/avoid-nodes": "node-1"},
            "ownerReferences": [{**owner, "controller": True}],
        },
        "spec": {
            "nodeName": f"node-{index}",
            "restartPolicy": "OnFailure",
            "terminationGracePeriodSeconds": 30,
            "priority": 0,
            "initContainers": [{"name": "concertina-agent"}],
            "containers": [
                {
                    "name": "trainer",
                    "ports": [{"name": "concertina", "containerPort": 29400}],
                    "resources": {"requests": {"cpu": "1", "memory": "1Gi"}},
                }
            ],
        },
        "status": {
            "phase": "Running",
            "podIP": f"127.0.0.{index + 1}",
            "reason": "Evicted",
            "message": "why",
            "conditions": [
                condition,
                {"type": "DisruptionTarget", "status": "True", "reason": "PreemptionByScheduler"},
            ],
            "containerStatuses": [{**trainer, "state": {"terminated": ended}}, {**trainer, "name": "sidecar"}],
            "initContainerStatuses": [{**trainer, "name": "concertina-agent", "lastState": {"terminated": ended}}],
        },
    }


def node(index: int) -> Raw:
    return {
        "metadata": {"name": f"node-{index}", "labels": {"topology.kubernetes.io/zone": "a"}},
        "spec": {"unschedulable": True, "taints": [{"key": "node.kubernetes.io/out-of-service", "value": "x"}]},
        "status": {
            "conditions": [{"type": "Ready", "status": "True"}],
            "allocatable": {"cpu": "8", "memory": "32Gi", "pods": "110"},
        },
    }


REQUIRED = frozenset(
    {
        *("metadata", "name", "namespace", "uid", "creationTimestamp", "kind", "controller", "key", "type", "status"),
        *("exitCode", "containers", "containerPort"),
    }
)
"""Fields that the API server ensures."""


def altered(value: Any, draw: random.Random, name: str = "", odds: float = 0.12) -> Any:
    """Return the same structure, with other content of the same type in some leaves, and parts left out or doubled."""
    if isinstance(value, dict):
        kept = {key: each for key, each in value.items() if key in REQUIRED or draw.random() > odds}
        return {key: altered(each, draw, key, odds) for key, each in kept.items()}
    if isinstance(value, list):
        items = [altered(each, draw, name, odds) for each in value if draw.random() > odds]
        return items * draw.choice((1, 1, 1, 2))
    if draw.random() > odds or name == "namespace":
        return value
    if isinstance(value, str) and TIME.fullmatch(value):
        return draw.choice(TIMES)
    if name in ("cpu", "memory", "pods"):
        return draw.choice(QUANTITIES)
    if isinstance(value, bool):
        return not value
    return draw.choice(NUMBERS if isinstance(value, int) else WORDS)


TRAINS = (jobs.running(jobs.spec()), jobs.running(jobs.command_spec()))
STORES = replace(TRAINS[0], job=replace(TRAINS[0].job, spec=jobs.spec(checkpoint={"uri": "s3://bucket/x"})))


def seen(draw: random.Random, trains: JobObservation) -> tuple[JobObservation, set[str]]:
    """Return a job that trains, read from altered objects, and the uids of its own pods."""
    status = json.loads(json.dumps(trains.job.status.manifest()))
    observed_view = job_view(
        {
            "metadata": {
                "name": "demo",
                "namespace": "default",
                "uid": jobs.UID,
                "generation": 1,
                "creationTimestamp": "2027-01-15T08:00:00Z",
            },
            "spec": {},
            "status": altered(status, draw, odds=0.04),
        }
    )
    raw = [altered(copy.deepcopy(pod(index)), draw) for index in range(4)]
    owned: list[OwnedPod] = [view for view in map(pod_view, raw) if view.job_uid == jobs.UID]
    pods = {view.view.name: view.view for view in owned}
    own = {
        each["metadata"]["uid"]
        for each in raw
        for owner in each["metadata"].get("ownerReferences", ())
        if (owner.get("uid"), owner.get("name"), owner["kind"]) == (jobs.UID, "demo", "TrainingJob")
        if each["metadata"]["name"].startswith("demo-")
    }
    nodes = {view.name: view for view in (node_view(altered(node(index), draw)) for index in range(4))}
    job = replace(trains.job, status=observed_view.status)
    return replace(trains, job=job, pods=tuple(sorted(pods.values(), key=lambda pod: pod.order)), nodes=nodes), own


def check(made: Plan, observed: JobObservation, own: set[str]) -> None:
    for action in made.actions:
        if isinstance(action, DeletePod | EndPod):
            assert action.uid in own, action
        if isinstance(action, CreatePod):
            assert 0 <= action.index < 11_000, action
            assert action.attempt >= 0, action
    stored = json.dumps(made.status.manifest(), allow_nan=False)
    assert len(stored) < 1_000_000
    JobStatus.model_validate_json(stored)
    if observed.job.status.completion_time and any(
        condition.type in ("Complete", "Failed") and condition.status == "True"
        for condition in observed.job.status.conditions
    ):
        assert made.status.completion_time, "a job that has ended goes on"


def play(seed: int) -> None:
    draw = random.Random(seed)
    observed, own = seen(draw, draw.choice((*TRAINS, STORES)))
    for wait in (20.0, 21.0, 200.0):
        made = plan(observed, jobs.T0 + wait)
        check(made, observed, own)
        observed = jobs.then(observed, made, fresh_claim=f"claim-{wait}")


@given(seed=SEEDS)
@settings(max_examples=300)
def test_any_objects_are_planned_on_and_only_own_pods_are_deleted(seed: int) -> None:
    play(seed)


@pytest.mark.long(law=f"{HERE}::test_any_objects_are_planned_on_and_only_own_pods_are_deleted")
@pytest.mark.timeout(1200)
@given(seed=SEEDS)
@settings(max_examples=50_000)
def test_so_are_many_more(seed: int) -> None:
    play(seed)
