"""Termination notices on a real control plane: replicas leave before their pods die, and no step is lost.

Tests in which nothing is stored use a trainer without torch.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from builders.cluster.operator_process import Jobs, Operator, endless, paced
from builders.programs import STAND_IN
from builders.until import until

pytestmark = pytest.mark.usefixtures("operator")
Object = dict[str, Any]
SERVES = {"taints": None, "unschedulable": None}
TAINT = "aws-node-termination-handler/spot-itn"


def node_names(jobs: Jobs) -> list[str]:
    return jobs.cluster.kubectl("get", "nodes", "-o", "jsonpath={.items[*].metadata.name}").split()


@pytest.fixture
def nodes(jobs: Jobs) -> Iterator[None]:
    """Yield the nodes, and make every node schedulable again after the test."""
    yield
    jobs.cluster.kubectl("patch", "nodes", *node_names(jobs), "--type=merge", "-p", json.dumps({"spec": SERVES}))


def create(jobs: Jobs, data: Path, container: Object | None = None, grace: int = 30, **spec: Any) -> Object:
    """Create the job `a` of three replicas, which trains for as long as the test needs; return it once it trains."""
    pod = {"containers": [container or paced(PYTHONPATH=STAND_IN)], "terminationGracePeriodSeconds": grace}
    elastic = {"minReplicas": 2, "scaleUp": {"stabilizationWindowSeconds": 0}}
    jobs.create("a", replicas=3, pod=pod, trainer=endless(data, globalBatchSize=12), elastic=elastic, **spec)
    return trains_without(jobs, 3)


def trains_without(jobs: Jobs, replicas: int, *gone: str, past: int = 0) -> Object:
    """Return the status once this number of replicas train without the named ones, and have finished a step."""
    job = jobs.wait(
        "a",
        lambda job: (
            jobs.condition(job, "Ready").get("reason") == "Training"
            and len(job["status"]["world"].get("members", ())) == replicas
            and not set(jobs.members(job)) & set(gone)
            and job["status"]["world"]["round"] > past
        ),
    )
    step = job["status"].get("progress", {}).get("step", 0)
    return jobs.wait("a", lambda job: job["status"].get("progress", {}).get("step", 0) > step)


def unharmed(job: Object) -> None:
    """Check that no step was lost, and that nothing counts as a failure."""
    status = job["status"]
    assert status.get("stepsReplayed", 0) == 0, status["world"]
    assert status["restarts"].get("inWindow", 0) == 0, status["restarts"]


def member(job: Object, place: int) -> Object:
    entry: Object = job["status"]["world"]["members"][place]
    return entry


def alone(job: Object) -> Object:
    """Return a member that is alone on its node, because neighbours that leave together are another test's subject."""
    members = job["status"]["world"]["members"]
    nodes = [each["node"] for each in members]
    return next(each for each in members if nodes.count(each["node"]) == 1)


@pytest.mark.usefixtures("nodes")
def test_a_taint_a_cordon_a_drain_and_a_deletion(jobs: Jobs, data: Path) -> None:
    """The notices come one after the other, each to another member, the coordinator among them."""
    kubectl = jobs.cluster.kubectl
    job = create(jobs, data)
    coordinator = member(job, 0)
    assert len(node_names(jobs)) == 3

    kubectl("taint", "node", coordinator["node"], f"{TAINT}=event:NoSchedule")
    job = trains_without(jobs, 3, coordinator["replica"])
    unharmed(job)
    assert coordinator["node"] not in [each["node"] for each in job["status"]["world"]["members"]]
    jobs.wait_gone(f"pod/{coordinator['replica']}")
    kubectl("taint", "node", coordinator["node"], f"{TAINT}-")

    moved = alone(job)
    kubectl("cordon", moved["node"])
    job = trains_without(jobs, 3, moved["replica"])
    unharmed(job)
    # The successor was created before the member left: no round was smaller than the previous one.
    assert {event["reason"] for event in jobs.events("a", "ReplicaMoving")} == {"ReplicaMoving"}
    kubectl("uncordon", moved["node"])

    evicted = alone(job)
    selector = f"--pod-selector=concertina.dev/job-uid={job['metadata']['uid']}"
    kubectl("drain", evicted["node"], "--force", "--delete-emptydir-data", "--ignore-daemonsets", selector)
    job = trains_without(jobs, 3, evicted["replica"])
    unharmed(job)
    kubectl("uncordon", evicted["node"])

    deleted = member(job, 1)
    kubectl("delete", "pod", deleted["replica"], "-n", jobs.namespace, "--wait=false")
    unharmed(trains_without(jobs, 3, deleted["replica"]))


@pytest.mark.long(law="tests/cluster/operator/rounds/test_notices.py::test_a_taint_a_cordon_a_drain_and_a_deletion")
def test_a_replica_that_the_scheduler_preempts(jobs: Jobs, data: Path) -> None:
    """Each replica has one of its node's two GPUs. A pod of a higher priority requests both GPUs of one node."""
    cluster = jobs.cluster
    container = {**paced(PYTHONPATH=STAND_IN), "resources": {"limits": {"nvidia.com/gpu": "1"}}}
    job = create(jobs, data, container, workersPerReplica=1)
    victim = member(job, 1)
    priority = {"metadata": {"name": jobs.namespace}, "value": 1000000}
    cluster.api.call("POST", "/apis/scheduling.k8s.io/v1/priorityclasses", priority)
    greedy = {
        "name": "main",
        "image": "concertina/trainer:test",
        "command": ["sleep", "3600"],
        "resources": {"limits": {"nvidia.com/gpu": "2"}},
    }
    spec = {
        "priorityClassName": jobs.namespace,
        "nodeSelector": {"kubernetes.io/hostname": victim["node"]},
        "containers": [greedy],
        "terminationGracePeriodSeconds": 0,
    }
    body = {"metadata": {"name": "greedy"}, "spec": spec}
    try:
        cluster.api.call("POST", f"/api/v1/namespaces/{jobs.namespace}/pods", body)
        job = trains_without(jobs, 3, victim["replica"])
        unharmed(job)
        (event, *_) = jobs.events("a", "ReplicaLeaving")
        assert "PreemptionByScheduler" in event["message"]
    finally:
        cluster.api.call("DELETE", f"/apis/scheduling.k8s.io/v1/priorityclasses/{jobs.namespace}")


@pytest.mark.long(
    law="tests/simulation/stories/test_verdicts.py::test_a_notice_costs_no_step_where_there_is_time[preempt_all]"
)
def test_all_are_evicted_and_the_state_waits_in_storage(jobs: Jobs, data: Path, tmp_path: Path) -> None:
    checkpoint = {"uri": f"file://{tmp_path}/run", "everySeconds": 100000}
    job = create(jobs, data, paced(), grace=20, checkpoint=checkpoint)
    selector = f"concertina.dev/job-uid={job['metadata']['uid']}"
    old, reached = jobs.members(job), job["status"]["progress"]["step"]
    jobs.cluster.kubectl("delete", "pod", "-n", jobs.namespace, "-l", selector, "--wait=false")
    job = trains_without(jobs, 3, *old)
    unharmed(job)
    assert job["status"]["lastCheckpoint"]["step"] > reached, "the last step was saved, not only one before"
    # This is the first round without them; later rounds grow from memory.
    messages = [event["message"] for event in jobs.events("a", "RoundCommitted")]
    assert any("starts from the checkpoint of step" in message for message in messages), messages


@pytest.mark.long(
    law="tests/unit/plan/rounds/test_notices.py::test_neighbours_that_go_together_hand_over_what_only_they_hold"
)
def test_neighbours_of_whom_one_coordinates_leave_together_without_storage(jobs: Jobs, data: Path) -> None:
    """The members that stay are too few, and don't hold all state: successors fetch it within the grace period."""
    job = create(jobs, data, grace=120)
    leaving = jobs.members(job)[:2]
    jobs.cluster.kubectl("delete", "pod", *leaving, "-n", jobs.namespace, "--wait=false")
    unharmed(trains_without(jobs, 3, *leaving))
    for name in leaving:
        jobs.wait_gone(f"pod/{name}")


@pytest.mark.long(law="tests/unit/plan/rounds/test_notices.py::test_who_is_alone_hands_over_to_whoever_takes_its_place")
@pytest.mark.usefixtures("nodes")
def test_who_trains_alone_hands_its_state_over_without_storage(jobs: Jobs, data: Path) -> None:
    """No neighbour has a copy, so the successor fetches the state from the replica that leaves."""
    pod = {"containers": [paced(PYTHONPATH=STAND_IN)], "terminationGracePeriodSeconds": 60}
    jobs.create("a", replicas=1, pod=pod, trainer=endless(data, globalBatchSize=12))
    moved = member(trains_without(jobs, 1), 0)
    jobs.cluster.kubectl("cordon", moved["node"])
    job = trains_without(jobs, 1, moved["replica"])
    unharmed(job)
    jobs.cluster.kubectl("uncordon", moved["node"])
    deleted = member(job, 0)["replica"]
    jobs.cluster.kubectl("delete", "pod", deleted, "-n", jobs.namespace, "--wait=false")
    unharmed(trains_without(jobs, 1, deleted))


@pytest.mark.long(law="tests/unit/plan/rounds/test_notices.py::test_an_exit_after_a_notice_is_no_failure")
def test_a_notice_while_the_operator_is_away(jobs: Jobs, data: Path, operator: Operator) -> None:
    job = create(jobs, data)
    coordinator, leaver = jobs.members(job)[:2]
    ended = rounds_ended(jobs, coordinator)
    operator.end()
    try:
        jobs.cluster.kubectl("delete", "pod", leaver, "-n", jobs.namespace, "--wait=false")
        until(lambda: '"event":"agent_exits"' in logs_while_there(jobs, leaver), "the end of the agent that leaves")
        until(
            lambda: rounds_ended(jobs, coordinator) == ended + 1,
            "the end of the coordinator's worker",
            lambda: jobs.logs(coordinator)[-3000:],
        )
    finally:
        operator.start()
    unharmed(trains_without(jobs, 3, leaver, past=1))


def rounds_ended(jobs: Jobs, pod: str) -> int:
    return jobs.logs(pod).count('"event":"worker_ended"')


def logs_while_there(jobs: Jobs, pod: str) -> str:
    """Return the last output of a pod that may be gone by now, which means that it has left."""
    try:
        return jobs.logs(pod)
    except Exception:
        return '"event":"agent_exits"'
