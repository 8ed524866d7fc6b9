"""GPUs of a template's claims, by which `workersPerReplica: Auto` counts workers."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any, cast

import pytest

from builders.manifests import job
from concertina.api.world import Member, World
from concertina.controller.cache.job import CachedJob
from concertina.controller.claims import count_gpus, unread
from concertina.kube.client import Client
from concertina.kube.errors import NotFound
from concertina.kube.parse.views import job_view
from concertina.kube.resources import Raw, Resource
from concertina.plan.observed import JobObservation
from concertina.plan.plan import plan

NVIDIA = {"deviceClassName": "gpu.nvidia.com", "count": 4}


def cached(claims: list[Raw], used: list[Raw], limits: Raw | None = None, **spec: Any) -> CachedJob:
    resources = {"claims": used, **({"limits": limits} if limits else {})}
    container = {"name": "trainer", "image": "i", "command": ["x"], "resources": resources}
    manifest = job({"template": {"spec": {"containers": [container], "resourceClaims": claims}}, **spec})
    view = job_view(manifest)
    assert view.spec is not None, view.spec_error
    return CachedJob(view, 1, {})


class Server:
    def __init__(self, *requests: Raw) -> None:
        self.requests = requests
        self.asked: list[str] = []

    async def get(self, resource: Resource, namespace: str, name: str) -> Raw:
        self.asked.append(resource.path(namespace, name))
        if not self.requests:
            raise NotFound(404, "NotFound", "no such thing")
        claim = {"devices": {"requests": list(self.requests)}}
        return {"spec": {"spec": claim} if resource.plural.endswith("templates") else claim}


def count(job: CachedJob, *requests: Raw) -> Server:
    server = Server(*requests)
    asyncio.run(count_gpus(cast(Client, server), job))
    return server


TEMPLATE = [{"name": "gpus", "resourceClaimTemplateName": "t"}]
ALL_OF_IT = [{"name": "gpus"}]
CARD = {"name": "card", "exactly": {"deviceClassName": "roce.example.com", "count": 8}}


@pytest.mark.parametrize(
    ("used", "requests", "workers"),
    [
        (ALL_OF_IT, [{"name": "a", "exactly": NVIDIA}], 4),
        (ALL_OF_IT, [{"name": "a", "exactly": {"deviceClassName": "gpu.amd.com"}}, CARD], 1),
        (ALL_OF_IT, [{"name": "a", "exactly": NVIDIA}, {"name": "b", "exactly": NVIDIA}], 8),
        ([{"name": "gpus", "request": "b"}], [{"name": "a", "exactly": NVIDIA}, {"name": "b", "exactly": NVIDIA}], 4),
        (ALL_OF_IT, [{"name": "a", "firstAvailable": [{"name": "x", **NVIDIA}, {"name": "y", **NVIDIA}]}], 4),
        (ALL_OF_IT, [CARD], 1),
    ],
)
def test_a_worker_for_each_gpu(used: list[Raw], requests: list[Raw], workers: int) -> None:
    one = cached(TEMPLATE, used)
    assert unread(one.view)
    count(one, *requests)
    assert one.view.spec is not None
    assert (one.view.spec.workers, one.view.claims_error) == (workers, "")
    assert not unread(one.view)


def test_gpus_of_a_limit_count_as_well_and_a_number_stands() -> None:
    both = cached(TEMPLATE, ALL_OF_IT, limits={"nvidia.com/gpu": "2"})
    count(both, {"name": "a", "exactly": NVIDIA})
    assert both.view.spec is not None
    assert both.view.spec.workers == 6
    fixed = cached(TEMPLATE, ALL_OF_IT, workersPerReplica=2)
    assert count(fixed).asked == []


def test_a_claim_of_another_container_and_a_claim_by_name() -> None:
    other = cached([*TEMPLATE, {"name": "shared", "resourceClaimName": "c"}], [{"name": "shared"}])
    server = count(other, {"name": "a", "exactly": NVIDIA})
    assert server.asked == ["/apis/resource.k8s.io/v1/namespaces/n/resourceclaims/c"]
    assert count(other).asked == [], "once for each generation"


@pytest.mark.parametrize(
    ("requests", "says"),
    [
        ([], "names t, which does not exist"),
        ([{"name": "a", "exactly": {**NVIDIA, "allocationMode": "All"}}], "asks for all GPUs"),
        ([{"name": "a", "firstAvailable": [NVIDIA, {**NVIDIA, "count": 8}]}], "different numbers of GPUs"),
    ],
)
def test_what_cannot_be_counted_is_refused_by_name(requests: list[Raw], says: str) -> None:
    one = cached(TEMPLATE, ALL_OF_IT)
    count(one, *requests)
    assert says in one.view.claims_error
    made = plan(JobObservation(one.view, (), {}, {}, "claim"), 1_800_000_000.0)
    assert made.status.trouble is not None
    assert made.status.trouble.reason == "WorkersUnknown"
    assert "set spec.workersPerReplica" in made.status.trouble.message
    assert not made.actions


def test_a_job_with_a_round_keeps_the_workers_of_that_round() -> None:
    one = cached(TEMPLATE, ALL_OF_IT)
    members = tuple(Member(replica=f"j-{index}-0", uid="u", instance="i", workers=4) for index in range(2))
    world = World(round=1, members=members, workers=8)
    one.view = dataclasses.replace(one.view, status=one.view.status.model_copy(update={"world": world}))
    count(one)
    assert one.view.spec is not None
    assert (one.view.spec.workers, one.view.claims_error) == (4, "")
