"""Faults that need the local cluster: its nodes, its control plane and its S3 server are processes of this machine."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from concertina.cli.connection import Complaint
from concertina.cli.drill.site import OUTAGE, Blow, Site, environment_of
from concertina.local import processes

API_SERVER = "kube-apiserver"


def _kill(environment: dict[str, str], what: str) -> float:
    """SIGKILL to process 1 of a container; when, in Unix seconds."""
    found = processes.container(environment)
    if found is None:
        raise Complaint(f"The process of {what} was not found on this machine.")
    at = time.time()
    found.signal(signal.SIGKILL)
    return at


@asynccontextmanager
async def kill_lead(site: Site) -> AsyncIterator[Blow]:
    """SIGKILL to the lead's agent, with which its container ends."""
    lead, uid = await site.lead(), (await site.job())["metadata"]["uid"]
    at = await asyncio.to_thread(_kill, environment_of(uid, lead.replica), lead.replica)
    yield Blow(at, f"SIGKILL to the agent of the lead, {lead.replica} on {lead.node}")


@asynccontextmanager
async def kill_operator(site: Site) -> AsyncIterator[Blow]:
    """SIGKILL to the acting operator; its container is started again."""
    name = (await site.operator())["metadata"]["name"]
    at = await asyncio.to_thread(_kill, {"POD_NAME": name}, name)
    yield Blow(at, f"SIGKILL to the operator {name}")


@asynccontextmanager
async def kill_node(site: Site) -> AsyncIterator[Blow]:
    """SIGKILL to every process of a node; it is booted again."""
    node = await site.victim_node()
    at = time.time()
    try:
        await asyncio.to_thread(site.cluster.kill_node, node)
        yield Blow(at, f"killed node {node} with every process on it")
    finally:
        await asyncio.to_thread(site.cluster.start_node, node)
        await asyncio.to_thread(site.cluster.wait_nodes, [node])


@asynccontextmanager
async def stop_node(site: Site) -> AsyncIterator[Blow]:
    """SIGSTOP to every process of a node: it falls silent, connections stay open; then it goes on where it was."""
    node = await site.victim_node()
    at = time.time()
    try:
        await asyncio.to_thread(site.cluster.stop_node, node)
        yield Blow(at, f"stopped node {node} with every process on it")
    finally:
        await asyncio.to_thread(site.cluster.cont_node, node)
        await asyncio.to_thread(site.cluster.wait_nodes, [node])


@asynccontextmanager
async def kill_apiserver(site: Site) -> AsyncIterator[Blow]:
    """SIGKILL to the API server; it is started again, with its address and data."""
    at = time.time()
    try:
        await asyncio.to_thread(site.cluster.kill_component, API_SERVER)
        yield Blow(at, "SIGKILL to the API server", watched=False)
        await _last(at)
    finally:
        await asyncio.to_thread(site.cluster.start_component, API_SERVER)
        await asyncio.to_thread(site.cluster.wait_api)


@asynccontextmanager
async def kill_storage(site: Site) -> AsyncIterator[Blow]:
    """SIGKILL to the cluster's S3 server; it is started again, with its address and data."""
    server = site.cluster.s3
    if server is None:
        raise Complaint("This local cluster has no S3 server of its own: start one with `concertina local up --s3`.")
    at = time.time()
    try:
        await asyncio.to_thread(server.kill)
        yield Blow(at, "SIGKILL to the S3 server")
        await _last(at)
    finally:
        await asyncio.to_thread(server.start)


async def _last(since: float) -> None:
    """Until the outage has lasted."""
    await asyncio.sleep(max(0.0, since + OUTAGE - time.time()))
