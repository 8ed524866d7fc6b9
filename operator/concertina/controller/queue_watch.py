"""Watches of Kueue's objects. They run only while the API server serves Kueue's API."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from typing import Any

from concertina import backoff
from concertina.controller.cache.cluster_cache import ClusterCache
from concertina.controller.cache.queues import Service
from concertina.controller.workload_writes import drop_orphan
from concertina.kube.client import Client
from concertina.kube.errors import ApiError, NotFound
from concertina.kube.parse.workloads import flavor_view, priority_class_view, workload_view
from concertina.kube.reflector import Reflector
from concertina.kube.resources import (
    KUEUE,
    PRIORITY_CLASSES,
    RESOURCE_FLAVORS,
    WORKLOAD_PRIORITY_CLASSES,
    WORKLOADS,
    Raw,
)
from concertina.plan.kueue import WorkloadView
from concertina_protocol.log import log_event

CHECK_SECONDS = 60.0
"""Seconds between two checks of whether the API server serves Kueue's API."""
FIRST_SECONDS, LONGEST_SECONDS = 0.2, 10.0
"""Shortest and longest delay in seconds before a failed check is repeated."""
ORPHAN_SECONDS = 1.0
"""Seconds between two searches for Workloads whose TrainingJob no longer exists."""


class QueueWatch:
    """Watches that keep the cache of Kueue's objects up to date.

    The event `known` is set once the cache is complete.
    """

    def __init__(
        self,
        client: Client,
        cache: ClusterCache,
        namespaces: Sequence[str | None],
        may_act: Callable[[], bool],
    ) -> None:
        """Prepare the watches of Kueue's objects. They start in `run`.

        Args:
            client: Client of the API server.
            cache: Cache to update.
            namespaces: Namespaces to watch; None stands for all namespaces.
            may_act: Function that returns whether this operator is the leader.
        """
        self._client = client
        self._cache = cache
        self._namespaces = namespaces
        self._may_act = may_act
        self._workloads: dict[str | None, Reflector[WorkloadView]] = {}
        self._others: list[Reflector[Any]] = []
        """Reflectors of flavors and priority classes."""
        self.known = asyncio.Event()
        """Event that is set once the operator knows whether the API server serves Kueue's API.

        If it does, Kueue's objects are in the cache by then.
        """
        self._asked = asyncio.Event()
        """Event that is set to start the next check of Kueue's API at once."""

    def assume(self, workload: Raw) -> None:
        """Store a Workload that the API server returned for a write of this operator.

        The cache then contains the new version before the watch reports it.
        """
        reflector = self._workloads.get(workload["metadata"]["namespace"]) or self._workloads.get(None)
        if reflector is not None:
            reflector.assume(workload)

    async def look(self) -> None:
        """Check now whether Kueue's API is served, and return once the result is known.

        Kueue may have been installed since the last periodic check. Without a new check, a job with a queue would start
        without quota.
        """
        if self._cache.queues.served:
            return
        self.known.clear()
        self._asked.set()
        await self.known.wait()

    async def run(self) -> None:
        """Check periodically whether the API server serves Kueue's API, and watch Kueue's objects while it does."""
        while True:
            self._asked.clear()
            if not await self._is_served():
                self._cache.queues.set_service(Service.ABSENT)
                if not self._asked.is_set():  # otherwise this answer may be older than the request
                    self.known.set()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._asked.wait(), CHECK_SECONDS)
                continue
            log_event("queues watched")
            async with asyncio.TaskGroup() as tasks:
                watches = [tasks.create_task(reflector.run()) for reflector in self._reflectors()]
                state = tasks.create_task(self._follow_state())
                while await self._is_served() or await self._is_served():  # one negative answer is no proof
                    await asyncio.sleep(CHECK_SECONDS)
                for task in (*watches, state):
                    task.cancel()
            log_event("the operator no longer watches queues")

    async def _is_served(self) -> bool:
        failures = 0
        while True:
            try:
                await self._client.get(KUEUE, None, "")
                return True
            except NotFound:
                return False
            except ApiError as error:
                log_event("kueue unknown", message=error.message)
                await asyncio.sleep(backoff.seconds(failures, FIRST_SECONDS, LONGEST_SECONDS))
                failures += 1

    def _reflectors(self) -> list[Reflector[Any]]:
        queues, client = self._cache.queues, self._client
        self._workloads = {
            namespace: Reflector(client, WORKLOADS, workload_view, queues.on_workload, namespace)
            for namespace in self._namespaces
        }
        self._others = [
            Reflector(client, RESOURCE_FLAVORS, flavor_view, queues.on_flavor),
            Reflector(client, WORKLOAD_PRIORITY_CLASSES, priority_class_view, queues.on_workload_class),
            Reflector(client, PRIORITY_CLASSES, priority_class_view, queues.on_pod_class),
        ]
        return [*self._workloads.values(), *self._others]

    async def _follow_state(self) -> None:
        """Set the event `known` after the first lists, and record whether the operator may read Workloads."""
        everything = [*self._workloads.values(), *self._others]
        await asyncio.gather(*(reflector.answered.wait() for reflector in everything))
        while not all(reflector.synced.is_set() for reflector in self._workloads.values()):
            self._cache.queues.set_service(Service.UNREADABLE)
            self.known.set()
            await asyncio.sleep(1.0)
        self._cache.queues.set_service(Service.READY)
        self.known.set()

    async def drop_orphans(self) -> None:
        """Remove the finalizers of Workloads whose TrainingJob no longer exists, once no pods of the job are left."""
        while True:
            await asyncio.sleep(ORPHAN_SECONDS)
            for workload in list(self._cache.queues.orphans()) if self._may_act() else ():
                try:
                    await drop_orphan(self._client, workload)
                except ApiError as error:
                    log_event("orphaned workload stays", workload=workload.name, message=error.message)
