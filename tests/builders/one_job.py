"""API server in memory that has one suspended job, and operators that make a pass when the test says so."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

from concertina.agents.connections import AgentConnections
from concertina.controller.cache.cluster_cache import ClusterCache
from concertina.controller.cache.queues import Service
from concertina.controller.master_keys import MasterKeys, key_id
from concertina.controller.reconcile import Reconciler
from concertina.controller.status_patches import StatusWriter
from concertina.controller.writes import ObjectWriter
from concertina.kube.client import Client
from concertina.kube.errors import TestFailed
from concertina.kube.manifests.agent_container import PodSettings
from concertina.kube.resources import Raw
from concertina.kube.watch.event_recorder import Events
from concertina.plan.actions import Event, Plan
from concertina.plan.observed import JobObservation, JobView
from concertina.plan.plan import plan

UID = "uid-a"


@dataclass
class ApiServer:
    """API server with one suspended job."""

    job: Raw = field(
        default_factory=lambda: {
            "metadata": {
                "name": "j", "namespace": "team", "uid": UID, "generation": 1, "resourceVersion": "1",
                "creationTimestamp": "2026-01-01T00:00:00Z",
            },
            "spec": {
                "suspend": True,
                "template": {"spec": {"containers": [{"name": "trainer", "image": "i", "command": ["x"]}]}},
            },
        }
    )  # fmt: skip
    writes: Counter[str] = field(default_factory=Counter)

    def client(self, name: str) -> Client:
        server = self

        class OneClient:
            async def get(self, *path: object) -> Raw:
                return copy.deepcopy(server.job)

            async def patch(self, kind: object, namespace: str, name_: str, patch: list[Raw], subresource: str) -> Raw:
                assert subresource == "status"
                for step in patch:
                    if step["op"] == "test" and server.at(step["path"]) != step["value"]:
                        raise TestFailed(422, "the test failed", {})
                server.write(name, patch[-1]["value"])
                return copy.deepcopy(server.job)

        return cast(Client, OneClient())

    def at(self, path: str) -> Any:
        found: Any = self.job
        for name in path.strip("/").split("/"):
            found = (found or {}).get(name)
        return found

    def write(self, name: str, status: Raw) -> None:
        self.job["status"] = copy.deepcopy(status)
        self.job["metadata"]["resourceVersion"] = str(int(self.job["metadata"]["resourceVersion"]) + 1)
        self.writes[name] += 1

    def condition(self, kind: str) -> tuple[str, str]:
        conditions = {each["type"]: each for each in self.job.get("status", {}).get("conditions", ())}
        return conditions[kind]["status"], conditions[kind]["reason"]


@dataclass
class ToldEvents:
    told: list[str] = field(default_factory=list)

    def post(self, job: JobView, event: Event) -> None:
        self.told.append(event.reason)


class Operator:
    def __init__(
        self, server: ApiServer, name: str, key: bytes, planner: Callable[[JobObservation, float], Plan] = plan
    ) -> None:
        self.server, self.said = server, ToldEvents()
        self.due: list[float] = []
        """Seconds after which the job's next pass was requested, other than by a pass itself."""
        self.kueue, self.looks = Service.ABSENT, 0
        keys, client, events = MasterKeys({}, {key_id(key): key}), server.client(name), cast(Events, self.said)
        self.connections = AgentConnections(lambda uid, at_once: None)
        self.cache = ClusterCache(lambda uid: None, self.connections.views, tuple(keys.by_id))
        self.reconciler = Reconciler(
            cache=self.cache,
            connections=self.connections,
            client=client,
            status=StatusWriter(client, self.cache, events),
            objects=ObjectWriter(client, self.cache, PodSettings("agent"), keys, lambda pod: None),
            events=events,
            plan=planner,
            keys=keys,
            trace=None,
            may_act=lambda: True,
            changed_within=lambda uid, seconds: self.due.append(seconds),
            look_for_queues=self._look_for_queues,
        )

    async def _look_for_queues(self) -> None:
        """Find out which APIs the server serves now."""
        self.looks += 1
        self.cache.queues.set_service(self.kueue)

    async def pass_(self) -> float | None:
        self.cache.on_job(copy.deepcopy(self.server.job))
        return await self.reconciler.run(UID)
