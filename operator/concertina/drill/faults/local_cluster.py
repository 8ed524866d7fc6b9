"""Faults for the local cluster, whose nodes, control plane and S3 server are processes of this machine."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager

from concertina.drill.target import OUTAGE, STANDSTILL, DrillTarget, Fault, Injection, ProgressSource, environment_of
from concertina.local.cluster import LocalCluster
from concertina.local.host import processes
from concertina.local.host.processes import ProcessIdentity
from concertina.terminal.cluster_connection import UserError

API_SERVER = "kube-apiserver"
# Prints the storage endpoint that the container's environment contains.
_ENDPOINT = "import os; print(os.environ.get('AWS_ENDPOINT_URL', ''))"


def _container(environment: dict[str, str], name: str) -> ProcessIdentity:
    """Return the first process of the container that has the given environment variables.

    Args:
        environment: Variables that identify the container.
        name: Name of the container for the error message.

    Raises:
        UserError: When this machine has no such process.
    """
    process = processes.container(environment)
    if process is None:
        raise UserError(f"The process of {name} was not found on this machine.")
    return process


def _kill(environment: dict[str, str], name: str) -> float:
    """Send SIGKILL to the first process of a container, which ends the container.

    The result is the Unix time of the signal in seconds.
    """
    process, at = _container(environment, name), time.time()
    process.signal(signal.SIGKILL)
    return at


@asynccontextmanager
async def kill_coordinator(target: DrillTarget) -> AsyncIterator[Injection]:
    """Send SIGKILL to the coordinator, which is the agent of rank 0. The agent's container then ends too."""
    coordinator, uid = await target.coordinator(), (await target.job())["metadata"]["uid"]
    at = await asyncio.to_thread(_kill, environment_of(uid, coordinator.replica), coordinator.replica)
    yield Injection(at, f"SIGKILL to the agent of the coordinator, {coordinator.replica} on {coordinator.node}")


@asynccontextmanager
async def kill_operator(target: DrillTarget) -> AsyncIterator[Injection]:
    """Send SIGKILL to the leading operator. The kubelet restarts its container."""
    name = (await target.operator())["metadata"]["name"]
    at = await asyncio.to_thread(_kill, {"POD_NAME": name}, name)
    yield Injection(at, f"SIGKILL to the operator {name}")


@asynccontextmanager
async def stop_operator(target: DrillTarget) -> AsyncIterator[Injection]:
    """Send SIGSTOP to the leading operator, and SIGCONT some seconds later. The operator's connections stay open."""
    name = (await target.operator())["metadata"]["name"]
    operator = await asyncio.to_thread(_container, {"POD_NAME": name}, name)
    at = time.time()
    try:
        operator.signal(signal.SIGSTOP)
        yield Injection(at, f"SIGSTOP to the operator {name}", ProgressSource.LOGS)
        await asyncio.sleep(max(0.0, at + STANDSTILL - time.time()))
    finally:
        operator.signal(signal.SIGCONT)


def _on_a_node(
    inject: Callable[[LocalCluster, str], object], revert: Callable[[LocalCluster, str], object], description: str
) -> Fault:
    @asynccontextmanager
    async def fault(target: DrillTarget) -> AsyncIterator[Injection]:
        node = await target.victim_node()
        at = time.time()
        try:
            await asyncio.to_thread(inject, target.cluster, node)
            yield Injection(at, description.format(node=node))
        finally:
            await asyncio.to_thread(revert, target.cluster, node)
            await asyncio.to_thread(target.cluster.wait_nodes, [node])

    return fault


kill_node = _on_a_node(
    LocalCluster.kill_node, LocalCluster.start_node, "killed node {node} with every process on it"
)  # fmt: skip
"""Fault that kills every process of a node with SIGKILL. The node is started again on exit."""
stop_node = _on_a_node(
    LocalCluster.stop_node, LocalCluster.cont_node, "stopped node {node} with every process on it"
)  # fmt: skip
"""Fault that stops every process of a node with SIGSTOP. Connections stay open. The processes continue on exit."""


def kill_apiserver(target: DrillTarget) -> AbstractAsyncContextManager[Injection]:
    """Send SIGKILL to the API server. On exit, start the API server again with the same address and data."""

    def start() -> None:
        target.cluster.start_component(API_SERVER)
        target.cluster.wait_api()

    injection = Injection(time.time(), "SIGKILL to the API server", sight=ProgressSource.NOTHING)
    return _outage(lambda: target.cluster.kill_component(API_SERVER), start, injection)


@asynccontextmanager
async def kill_storage(target: DrillTarget) -> AsyncIterator[Injection]:
    """Send SIGKILL to the cluster's S3 server. On exit, start the server again with the same address and data.

    Raises:
        UserError: When the cluster has no S3 server, or the job does not use it.
    """
    server = target.cluster.s3
    if server is None:
        raise UserError("This local cluster has no S3 server of its own: start one with `concertina local up --s3`.")
    uri = str((await target.job())["spec"]["checkpoint"]["uri"])
    endpoint = await target.run_python((await target.coordinator()).replica, _ENDPOINT)
    if not uri.startswith("s3://") or endpoint != server.endpoint:
        raise UserError(
            f"{target.name} saves to {uri}{f' at {endpoint}' if endpoint else ''}, which is not on this "
            f"cluster's S3 server ({server.endpoint}), so the fault would not affect it."
        )
    async with _outage(server.kill, server.start, Injection(time.time(), "SIGKILL to the S3 server")) as injection:
        yield injection


@asynccontextmanager
async def _outage(
    stop: Callable[[], object], start: Callable[[], object], injection: Injection
) -> AsyncIterator[Injection]:
    """Stop a component. On exit, start it again, but not before OUTAGE seconds have passed."""
    try:
        await asyncio.to_thread(stop)
        yield injection
        await asyncio.sleep(max(0.0, injection.at + OUTAGE - time.time()))
    finally:
        await asyncio.to_thread(start)
