"""Faults that need only access to the API server, and therefore work on any cluster.

Each fault is a context manager.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress

from concertina.drill.target import DrillTarget, Injection
from concertina.kube.errors import ApiError
from concertina.kube.parse.fault_conditions import DRILL
from concertina.kube.resources import NODES, PODS, Raw
from concertina.terminal.cluster_connection import UserError

SIGNAL = "import os, sys; os.kill(int(sys.argv[1]), int(sys.argv[2]))"
KILL, STOP, CONTINUE = "9", "19", "18"


def kill_worker(target: DrillTarget) -> AbstractAsyncContextManager[Injection]:
    """Send SIGKILL to a training process."""
    return _signal_worker(target, "SIGKILL", KILL)


def hang(target: DrillTarget) -> AbstractAsyncContextManager[Injection]:
    """Send SIGSTOP to a training process. The process stops, and its connections stay open."""
    return _signal_worker(target, "SIGSTOP", STOP)


@asynccontextmanager
async def _signal_worker(target: DrillTarget, name: str, number: str) -> AsyncIterator[Injection]:
    """Send the signal `number` to a training process. If the signal is SIGSTOP, send SIGCONT on exit."""
    member = await target.victim()
    pid = await target.worker(member)
    at = time.time()
    await target.run_python(member.replica, SIGNAL, pid, number)
    try:
        yield Injection(at, f"{name} to the worker of {member.replica} on {member.node}")
    finally:
        if number == STOP:
            with suppress(ApiError):  # The worker may be dead, and its pod may be gone.
                await target.run_python(member.replica, SIGNAL, pid, CONTINUE)


@asynccontextmanager
async def kill_coordinator_pod(target: DrillTarget) -> AsyncIterator[Injection]:
    """Delete the pod of the coordinator (the agent of rank 0) without a grace period.

    The kubelet then kills all processes of the pod.
    """
    coordinator = await target.coordinator()
    at = time.time()
    await target.client.delete(PODS, target.namespace, coordinator.replica, uid=coordinator.uid, grace=0)
    yield Injection(at, f"deleted the coordinator's pod {coordinator.replica} on {coordinator.node}, without grace")


@asynccontextmanager
async def evict(target: DrillTarget) -> AsyncIterator[Injection]:
    """Evict a pod as `kubectl drain` does: by SIGTERM, and with the pod's grace period."""
    member = await target.victim()
    at = time.time()
    eviction = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": member.replica}}
    await target.client.create_below(PODS, target.namespace, member.replica, "eviction", eviction)
    yield Injection(at, f"evicted {member.replica} from {member.node}")


@asynccontextmanager
async def report_faulty_node(target: DrillTarget) -> AsyncIterator[Injection]:
    """Give the node of a member a condition that says that it is faulty for this job, and remove it on exit.

    Other jobs and other controllers ignore the condition.

    Raises:
        UserError: When the cluster has no other node for the replica.
    """
    member = await target.victim()
    used = {each.node for each in (await target.status()).world.members}
    nodes, _ = await target.client.list_all(NODES, None)
    if all(node["metadata"]["name"] in used or node["spec"].get("unschedulable") for node in nodes):
        raise UserError(f"{target.name} uses all nodes, so its replica would stay. Add a node to run this drill.")
    at = time.time()
    condition = {"type": DRILL, "status": "True", "reason": "Drill", "message": f"{target.namespace}/{target.name}"}
    patch: list[Raw] = [{"op": "add", "path": "/status/conditions/-", "value": condition}]
    await target.client.patch(NODES, None, member.node, patch, "status")
    try:
        yield Injection(at, f"gave node {member.node} of {member.replica} the condition {DRILL}")
    finally:
        await _remove_condition(target, member.node)


async def _remove_condition(target: DrillTarget, node: str) -> None:
    conditions = (await target.client.get(NODES, None, node))["status"]["conditions"]
    for index in reversed([index for index, each in enumerate(conditions) if each["type"] == DRILL]):
        path = f"/status/conditions/{index}"
        patch: list[Raw] = [{"op": "test", "path": f"{path}/type", "value": DRILL}, {"op": "remove", "path": path}]
        await target.client.patch(NODES, None, node, patch, "status")


@asynccontextmanager
async def delete_operator(target: DrillTarget) -> AsyncIterator[Injection]:
    """Delete the pod of the leading operator without a grace period."""
    pod = await target.operator()
    at = time.time()
    await target.client.delete(PODS, pod["metadata"]["namespace"], pod["metadata"]["name"], grace=0)
    yield Injection(at, f"deleted the operator's pod {pod['metadata']['name']}, without grace")
