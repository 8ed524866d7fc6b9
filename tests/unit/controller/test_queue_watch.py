"""Discovery of Kueue's API by the operator: every minute, and before the first pass of a job that names a queue."""

from __future__ import annotations

import asyncio
from typing import cast

from builders.one_job import ApiServer, Operator
from builders.until import until_async
from concertina.controller.cache.cluster_cache import ClusterCache
from concertina.controller.cache.queues import Service
from concertina.controller.queue_watch import QueueWatch
from concertina.kube.client import Client
from concertina.kube.errors import NotFound
from concertina.kube.manifests.workload import QUEUE_NAME
from concertina.kube.resources import Raw, Resource
from concertina.plan.actions import Plan
from concertina.plan.observed import JobObservation


class WithoutKueue:
    """API server that answers a look when the test says so."""

    def __init__(self) -> None:
        self.looks = 0
        self.answers = asyncio.Event()

    async def get(self, resource: Resource, namespace: str | None, name: str) -> Raw:
        self.looks += 1
        await self.answers.wait()
        raise NotFound(404, "NotFound", "the server could not find the requested resource")


def test_a_question_is_answered_by_a_look_that_began_after_it() -> None:
    """Kueue may have been installed while an earlier look was under way."""

    async def scenario() -> None:
        server = WithoutKueue()
        cache = ClusterCache(lambda uid: None, lambda uid: {})
        watch = QueueWatch(cast(Client, server), cache, (None,), lambda: True)
        running = asyncio.create_task(watch.run())
        await until_async(lambda: server.looks == 1, "the first look")
        asked = asyncio.create_task(watch.look())
        await asyncio.sleep(0)
        server.answers.set()
        await asyncio.wait_for(asked, 30)
        assert server.looks == 2
        await asyncio.wait_for(watch.look(), 30)
        assert server.looks == 3
        running.cancel()

    asyncio.run(scenario())


def test_a_job_with_a_queue_is_not_planned_without_a_look() -> None:
    """Kueue was installed after the last look: without another one, the job would start without quota."""
    queues = []

    def plan(observed: JobObservation, _: float) -> Plan:
        queues.append(observed.quota and observed.quota.queue)
        return Plan(observed.job.status)

    server = ApiServer()
    server.job["metadata"]["labels"] = {QUEUE_NAME: "team"}
    operator = Operator(server, "operator", b"k" * 32, plan)
    operator.kueue = Service.READY
    for _ in range(2):
        asyncio.run(operator.pass_())
    assert queues == ["team", "team"]
    assert operator.looks == 1
