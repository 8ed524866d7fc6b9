"""Faults that the API server alone can make, on any cluster. Each is a context manager: hurt, yield a Blow, heal."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress

from concertina.drill.site import Blow, Site
from concertina.kube.errors import ApiError
from concertina.kube.resources import PODS

SIGNAL = "import os, sys; os.kill(int(sys.argv[1]), int(sys.argv[2]))"
KILL, STOP, CONTINUE = "9", "19", "18"


def kill_worker(site: Site) -> AbstractAsyncContextManager[Blow]:
    """SIGKILL to a training process."""
    return _signal_worker(site, "SIGKILL", KILL)


def hang(site: Site) -> AbstractAsyncContextManager[Blow]:
    """SIGSTOP to a training process: it stands still, its connections stay open."""
    return _signal_worker(site, "SIGSTOP", STOP)


@asynccontextmanager
async def _signal_worker(site: Site, name: str, number: str) -> AsyncIterator[Blow]:
    """What was stopped, and is still there, goes on afterwards."""
    member = await site.victim()
    pid = await site.worker(member)
    at = time.time()
    await site.run_python(member.replica, SIGNAL, pid, number)
    try:
        yield Blow(at, f"{name} to the worker of {member.replica} on {member.node}")
    finally:
        if number == STOP:
            with suppress(ApiError):  # it was killed, and its pod perhaps with it
                await site.run_python(member.replica, SIGNAL, pid, CONTINUE)


@asynccontextmanager
async def kill_lead_pod(site: Site) -> AsyncIterator[Blow]:
    """Delete the lead's pod without any grace: its kubelet kills all of it."""
    lead = await site.lead()
    at = time.time()
    await site.client.delete(PODS, site.namespace, lead.replica, uid=lead.uid, grace=0)
    yield Blow(at, f"deleted the lead's pod {lead.replica} on {lead.node}, without grace")


@asynccontextmanager
async def evict(site: Site) -> AsyncIterator[Blow]:
    """Evict a pod as `kubectl drain` does: SIGTERM, and its grace."""
    member = await site.victim()
    at = time.time()
    eviction = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": member.replica}}
    await site.client.create_below(PODS, site.namespace, member.replica, "eviction", eviction)
    yield Blow(at, f"evicted {member.replica} from {member.node}")


@asynccontextmanager
async def delete_operator(site: Site) -> AsyncIterator[Blow]:
    """Delete the acting operator's pod without any grace."""
    pod = await site.operator()
    at = time.time()
    await site.client.delete(PODS, pod["metadata"]["namespace"], pod["metadata"]["name"], grace=0)
    yield Blow(at, f"deleted the operator's pod {pod['metadata']['name']}, without grace")
