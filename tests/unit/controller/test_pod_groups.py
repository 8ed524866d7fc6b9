"""Writes of a job's pod group: before its pods, once, updated, and deleted."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from builders.manifests import job
from concertina.controller.cache.cluster_cache import ClusterCache
from concertina.controller.cache.job import CachedJob
from concertina.controller.master_keys import MasterKeys
from concertina.controller.status_patches import PreconditionFailed
from concertina.controller.writes import ObjectWriter
from concertina.kube.client import Client
from concertina.kube.errors import AlreadyExists, Forbidden
from concertina.kube.manifests.agent_container import PodSettings
from concertina.kube.parse.views import job_view
from concertina.kube.resources import Raw, Resource
from concertina.kube.watch.gang_apis import served_gang_apis
from concertina.plan.actions import ApplyPodGroup, CreatePod, DeletePodGroup, Rendezvous
from concertina.plan.observed import GangApi, PodGroup

TWO = PodGroup(GangApi.VOLCANO, "j-0f1e2d3c", 2)
THREE = PodGroup(GangApi.VOLCANO, "j-0f1e2d3c", 3)


class Server:
    """API server that has at most one pod group."""

    def __init__(self, stored: Raw | None = None, refuses: bool = False) -> None:
        self.stored, self.refuses = stored, refuses
        self.asked: list[str] = []

    async def create(self, resource: Resource, namespace: str, body: Raw, **_: Any) -> Raw:
        self.asked.append(f"create {body['kind']}")
        if body["kind"] == "PodGroup":
            if self.refuses:
                raise Forbidden(403, "Forbidden", "podgroups is forbidden: cannot create resource")
            if self.stored is not None:
                raise AlreadyExists(409, "AlreadyExists", "it exists")
            self.stored = body
        return {**body, "metadata": {**body["metadata"], "uid": "p", "creationTimestamp": "2026-01-01T00:00:00Z"}}

    async def get(self, resource: Resource, namespace: str, name: str) -> Raw:
        self.asked.append("get")
        assert self.stored is not None
        return self.stored

    async def patch(self, resource: Resource, namespace: str, name: str, patch: Raw) -> Raw:
        self.asked.append(f"patch {patch}")
        return {}

    async def delete(self, resource: Resource, namespace: str, name: str) -> None:
        self.asked.append(f"delete {resource.path(namespace, name)}")


def writer(server: Server) -> tuple[ObjectWriter, CachedJob]:
    cache = ClusterCache(lambda uid: None, lambda uid: {})
    manifest = job({"template": {"spec": {"containers": [{"name": "trainer", "image": "i", "command": ["x"]}]}}})
    manifest["metadata"]["resourceVersion"] = "1"
    cache.on_job(manifest)
    objects = ObjectWriter(
        cast(Client, server), cache, PodSettings("agent"), MasterKeys({}, {}), assume=lambda pod: None
    )
    cached = cache.job(job_view(manifest).uid)
    assert cached is not None
    return objects, cached


def test_the_group_comes_before_its_pods_and_once() -> None:
    server = Server()
    objects, cached = writer(server)
    rendezvous = Rendezvous("a:1", 1, 1)

    async def scenario() -> None:
        pods = [CreatePod(index, 0, rendezvous=rendezvous, pod_group=TWO) for index in range(3)]
        await asyncio.gather(*(objects.write(cached, pod) for pod in pods))

    asyncio.run(scenario())
    assert server.asked == ["create PodGroup", "create Pod", "create Pod", "create Pod"]
    assert cached.pod_group == TWO


def test_a_group_that_is_there_is_brought_up_to_date() -> None:
    server = Server({"metadata": {}, "spec": {"minMember": 2, "queue": "default"}})
    objects, cached = writer(server)
    asyncio.run(objects.write(cached, ApplyPodGroup(TWO)))
    assert server.asked == ["create PodGroup", "get"]
    asyncio.run(objects.write(cached, ApplyPodGroup(THREE)))
    assert server.asked[2:] == ["create PodGroup", "get", "patch {'spec': {'minMember': 3}}"]
    assert cached.pod_group == THREE


def test_a_group_that_is_being_deleted_is_waited_for() -> None:
    objects, cached = writer(Server({"metadata": {"deletionTimestamp": "2026-01-01T00:00:00Z"}}))
    with pytest.raises(PreconditionFailed, match="is being deleted"):
        asyncio.run(objects.write(cached, ApplyPodGroup(TWO)))
    assert cached.pod_group is None


def test_a_refused_group_is_a_refused_job() -> None:
    objects, cached = writer(Server(refuses=True))
    with pytest.raises(PreconditionFailed):
        asyncio.run(objects.write(cached, ApplyPodGroup(TWO)))
    assert cached.refused is not None
    assert "podgroups is forbidden" in cached.refused.message


def test_a_deleted_group_is_written_again() -> None:
    server = Server()
    objects, cached = writer(server)
    asyncio.run(objects.write(cached, ApplyPodGroup(TWO)))
    asyncio.run(objects.write(cached, DeletePodGroup(TWO.api, TWO.name)))
    assert server.asked[1] == "delete /apis/scheduling.volcano.sh/v1beta1/namespaces/n/podgroups/j-0f1e2d3c"
    assert (cached.pod_group, cached.pod_group_deleted) == (None, True)
    server.stored = None
    asyncio.run(objects.write(cached, ApplyPodGroup(TWO)))
    assert not cached.pod_group_deleted


def test_an_api_counts_as_served_if_it_has_pod_groups() -> None:
    class Discovery:
        async def api_versions(self) -> frozenset[str]:
            return frozenset({"scheduling.k8s.io/v1", GangApi.POD_GROUP, GangApi.VOLCANO, GangApi.KARTA})

        async def resources_of(self, api_version: str) -> frozenset[str]:
            return {GangApi.POD_GROUP: frozenset({"workloads"}), GangApi.KARTA: frozenset({"kartas"})}.get(
                GangApi(api_version), frozenset({"podgroups"})
            )

    served = asyncio.run(served_gang_apis(cast(Client, Discovery())))
    assert served == {GangApi.VOLCANO, GangApi.KARTA}
