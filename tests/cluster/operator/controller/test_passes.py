"""Pass that raises, on a real API server: it is reported on its job, repeated, and delays no other job."""

from __future__ import annotations

import asyncio
import base64
from typing import Any
from unittest.mock import AsyncMock

import pytest

from builders.cluster.operator_process import Jobs
from builders.counted import counted
from concertina.agents.connections import AgentConnections
from concertina.controller.cache.cluster_cache import ClusterCache
from concertina.controller.master_keys import parse
from concertina.controller.queue import KeyedQueue
from concertina.controller.reconcile import Reconciler
from concertina.controller.status_patches import PreconditionFailed, StatusWriter
from concertina.controller.writes import ObjectWriter
from concertina.kube import access
from concertina.kube.client import Client
from concertina.kube.manifests.agent_container import PodSettings
from concertina.kube.resources import TRAINING_JOBS
from concertina.kube.watch.event_recorder import Events
from concertina.local.cluster import LocalCluster
from concertina.plan.actions import Plan
from concertina.plan.observed import JobObservation
from concertina.plan.plan import plan

GIVE_UP = 60.0


class Broken:
    """Replacement of plan() that raises for the job named `bad` while `on`.

    Once, it raises for another job as if its observation were outdated.
    """

    on, outdated = True, False

    def __call__(self, observed: JobObservation, now: float) -> Plan:
        if observed.job.name == "good" and not self.outdated:
            self.outdated = True
            raise PreconditionFailed("the claim is another's")
        if self.on and observed.job.name == "bad":
            raise ZeroDivisionError("division by zero")
        return plan(observed, now)


@pytest.mark.usefixtures("installed")
def test_a_pass_that_raises_is_told_on_its_job_and_delays_no_other(cluster: LocalCluster, jobs: Jobs) -> None:
    for name in ("bad", "good"):
        jobs.create(name, "pass", suspend=True)
    errors = counted("controller_runtime_reconcile_errors_total", controller="trainingjob")
    given_up = counted("concertina_reconcile_aborted_total", reason="PreconditionFailed")

    async def scenario(client: Client) -> None:
        keys = parse({"key": base64.b64encode(b"k" * 32).decode()})
        connections = AgentConnections(lambda uid, at_once: None)
        cache = ClusterCache(lambda uid: queue.add(uid), connections.views, tuple(keys.by_id))
        events = Events(client, "test")
        broken = Broken()
        reconciler = Reconciler(
            cache=cache,
            connections=connections,
            client=client,
            status=StatusWriter(client, cache, events),
            objects=ObjectWriter(client, cache, PodSettings("agent"), keys, lambda pod: None),
            events=events,
            plan=broken,
            keys=keys,
            trace=None,
            may_act=lambda: True,
            changed_within=lambda uid, seconds: queue.add_within(uid, seconds),
            look_for_queues=AsyncMock(),
        )
        queue = KeyedQueue(reconciler.run)
        writing = asyncio.create_task(events.run())
        for name in ("bad", "good"):
            cache.on_job(await client.get(TRAINING_JOBS, jobs.namespace, name))
        queue.start()

        async def until(name: str, kind: str, status: str) -> dict[str, Any]:
            while True:
                job = await client.get(TRAINING_JOBS, jobs.namespace, name)
                if jobs.condition(job, kind).get("status", "") == status:
                    return jobs.condition(job, kind)
                await asyncio.sleep(0.05)

        told = await until("bad", "ReconcileError", "True")
        assert "ZeroDivisionError: division by zero" in told["message"]
        assert (await until("bad", "Stalled", "True"))["reason"] == "ReconcileError"
        await until("good", "Suspended", "True")
        await asyncio.to_thread(jobs.events, "bad", "ReconcileError")
        broken.on = False
        await until("bad", "Suspended", "True")
        await until("bad", "ReconcileError", "False")
        await until("bad", "Stalled", "False")
        mended = await client.get(TRAINING_JOBS, jobs.namespace, "bad")
        assert "ReconcileError" not in {condition["type"] for condition in mended["status"]["conditions"]}, "it is gone"
        writing.cancel()
        await queue.close()
        connections.close()

    async def inside() -> None:
        async with asyncio.timeout(GIVE_UP), Client(await access.load(str(cluster.kubeconfig))) as client:
            await scenario(client)

    asyncio.run(inside())
    assert counted("controller_runtime_reconcile_errors_total", controller="trainingjob") > errors
    assert counted("concertina_reconcile_aborted_total", reason="PreconditionFailed") == given_up + 1
