"""Concurrent passes of many jobs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from builders.until import until_async
from concertina.agents.connections import AgentConnections
from concertina.controller.cache.cluster_cache import ClusterCache
from concertina.controller.queue import KeyedQueue
from concertina.controller.reconcile import Planner, Reconciler
from concertina.plan.actions import Plan
from concertina.plan.observed import JobObservation

JOBS = 100
Watched = Callable[[], bool]


def reconciler(plan: Planner, may_act: Watched) -> Reconciler:
    """Make a reconciler of jobs whose status never changes."""
    nothing: Any = SimpleNamespace(write=None, of=lambda id: None)
    connections = AgentConnections(lambda uid, at_once: None)
    cache = ClusterCache(lambda uid: None, connections.views)
    for number in range(JOBS):
        metadata = {"name": f"j{number}", "namespace": "n", "uid": f"u{number}", "generation": 1}
        more = {"resourceVersion": "1", "creationTimestamp": "2026-01-01T00:00:00Z"}
        cache.on_job({"metadata": metadata | more, "status": {"conditions": []}})
    return Reconciler(
        cache, connections, nothing, nothing, nothing, nothing, plan, nothing, None, may_act, lambda *of: None, nothing
    )


def test_the_event_loop_serves_everything_else_between_two_decisions() -> None:
    """A change that concerns a thousand jobs would otherwise block the event loop and the Lease until all are done."""
    turn, decided_in = 0, list[int]()

    def plan(observed: JobObservation, _: float) -> Plan:
        decided_in.append(turn)
        return Plan(observed.job.status)

    async def count() -> None:
        nonlocal turn
        while True:
            turn += 1
            await asyncio.sleep(0)

    async def scenario() -> None:
        counting = asyncio.create_task(count())
        passes = reconciler(plan, lambda: True)
        queue = KeyedQueue(passes.run)
        queue.start()
        for number in range(JOBS):
            queue.add(f"u{number}")
        await until_async(lambda: len(decided_in) == JOBS, "all of them", lambda: len(decided_in))
        assert len(set(decided_in)) == JOBS
        counting.cancel()
        await queue.close()

    asyncio.run(scenario())


def test_a_pass_that_waited_does_not_decide_once_another_operator_may_act() -> None:
    decided = list[str]()

    def plan(observed: JobObservation, _: float) -> Plan:
        decided.append(observed.job.uid)
        return Plan(observed.job.status)

    async def scenario() -> None:
        passes = reconciler(plan, lambda: not decided)
        await asyncio.gather(*(passes.run(f"u{number}") for number in range(JOBS)))
        assert len(decided) == 1

    asyncio.run(scenario())
