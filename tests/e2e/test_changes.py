"""Changes of a job and its nodes by people and controllers, on real kubelets: no step is lost, no failure counts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from builders.cluster.e2e import JOB, Cluster, Object, reason

pytestmark = [pytest.mark.usefixtures("job"), pytest.mark.timeout(900)]


def node_to_drain(cluster: Cluster, status: Object) -> str:
    """Return the node of a member that is not the coordinator, without the operator on it if possible."""
    world = status["world"]
    spared = cluster.operator_nodes()
    others = [member["node"] for member in world["members"] if member["replica"] != world["coordinator"]]
    return next((node for node in others if node not in spared), others[0])


@contextmanager
def nothing_lost(cluster: Cluster) -> Iterator[Object]:
    """Check that the block causes no step to be trained again, and no failure to be counted."""
    before = cluster.training(3)
    yield before
    after = cluster.training(3)
    assert after.get("stepsReplayed", 0) == before.get("stepsReplayed", 0)
    assert after["restarts"].get("inWindow", 0) == before["restarts"].get("inWindow", 0)
    assert after["progress"]["step"] > before["progress"]["step"]


def test_kubectl_drain(cluster: Cluster) -> None:
    with nothing_lost(cluster) as before:
        node = node_to_drain(cluster, before)
        try:
            selector = f"--pod-selector=concertina.dev/job={JOB}"
            cluster.kubectl("drain", node, selector, "--ignore-daemonsets", "--delete-emptydir-data", "--force")
            shrunk = cluster.training(2, above=before["world"]["round"])
            assert node not in [member["node"] for member in shrunk["world"]["members"]]
        finally:
            cluster.kubectl("uncordon", node)


def test_kubectl_cordon(cluster: Cluster) -> None:
    """A cordon evicts no pod, so there is no hurry: the successor works elsewhere before the replica leaves."""
    with nothing_lost(cluster) as before:
        node = node_to_drain(cluster, before)
        try:
            cluster.kubectl("cordon", node)
            moved = cluster.until("a world of three off the node", lambda status: whole_without(status, node))
        finally:
            cluster.kubectl("uncordon", node)
        # Two replicas share a node now. The younger one leaves, and only the empty node has room for its successor.
        shared = [member for member in moved["world"]["members"] if member["replica"].rpartition("-")[2] != "0"]
        newest = max(shared, key=lambda member: int(member["replica"].rpartition("-")[2]))
        cluster.kubectl("delete", "pod", newest["replica"], "--wait=false")
        cluster.until("a replica on each node", lambda status: len(set(nodes_of(status))) == 3)


def nodes_of(status: Object) -> list[str]:
    return [member["node"] for member in status["world"]["members"]]


def whole_without(status: Object, node: str) -> bool:
    nodes = nodes_of(status)
    return reason(status) == "Training" and len(nodes) == 3 and node not in nodes


def test_kubectl_scale(cluster: Cluster) -> None:
    with nothing_lost(cluster) as before:
        cluster.kubectl("scale", "tj", JOB, "--replicas=2")
        cluster.training(2, above=before["world"]["round"])
        cluster.kubectl("scale", "tj", JOB, "--replicas=3")


def test_suspend_and_resume(cluster: Cluster) -> None:
    with nothing_lost(cluster):
        cluster.kubectl("patch", "tj", JOB, "--type=merge", "-p", '{"spec":{"suspend":true}}')
        pods = ("get", "pods", "-l", f"concertina.dev/job={JOB}", "-o", "name")
        still = cluster.until("no pod", lambda _: not cluster.kubectl(*pods).strip())
        assert still["lastCheckpoint"]["step"] == still["progress"]["step"]
        cluster.kubectl("patch", "tj", JOB, "--type=merge", "-p", '{"spec":{"suspend":false}}')
