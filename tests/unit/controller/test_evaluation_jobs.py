"""Requests for the Jobs of checkpoints: none without the field, few with it, and no error harms the training."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, cast

import pytest

from builders.manifests import job
from concertina.api.status import EvaluationJobState
from concertina.controller import evaluation_jobs
from concertina.controller.cache.cluster_cache import ClusterCache
from concertina.controller.cache.job import CachedJob
from concertina.controller.master_keys import MasterKeys
from concertina.controller.writes import ObjectWriter
from concertina.kube.client import Client
from concertina.kube.errors import AlreadyExists, ApiError, Forbidden, Invalid, NotFound, Unreachable
from concertina.kube.manifests.agent_container import PodSettings
from concertina.kube.parse.views import job_view
from concertina.kube.resources import Raw, Resource
from concertina.plan.actions import CreateEvaluationJob, DeleteEvaluationJob

CREATE = CreateEvaluationJob("j-1-2", "s3://bucket/run/2", 2)
TEMPLATE = {"template": {"spec": {"containers": [{"name": "score", "image": "i"}]}}}
FIELD = {"podTemplate": "score"}
PENDING = [{"name": "j-1-2", "step": 2, "round": 1, "uri": "s3://bucket/run/2", "state": "Pending"}]


class Server:
    """API server with the PodTemplate `score`, and with Jobs. It answers requests of a kind with an error."""

    def __init__(self, errors: Mapping[str, ApiError] | None = None) -> None:
        self.jobs: dict[str, Raw] = {}
        self.errors = errors or {}
        self.asked: list[str] = []

    def ask(self, what: str) -> None:
        self.asked.append(what)
        if what in self.errors:
            raise self.errors[what]

    async def get(self, resource: Resource, namespace: str, name: str) -> Raw:
        self.ask(f"get {resource.plural}")
        return TEMPLATE if resource.plural == "podtemplates" else self.jobs[name]

    async def list_all(self, resource: Resource, namespace: str, labels: str) -> tuple[list[Raw], str]:
        self.ask(f"list {resource.plural}")
        return list(self.jobs.values()), "1"

    async def create(self, resource: Resource, namespace: str, body: Raw, **_: Any) -> Raw:
        self.ask(f"create {resource.plural}")
        name = body["metadata"]["name"]
        if name in self.jobs:
            raise AlreadyExists(409, "AlreadyExists", "it exists")
        body["metadata"]["uid"] = f"uid-of-{name}"
        self.jobs[name] = body
        return body

    async def delete(self, resource: Resource, namespace: str, name: str, **_: Any) -> None:
        self.ask(f"delete {resource.plural}")
        self.jobs.pop(name, None)


def setting(server: Server, field: Raw | None = None, marks: Any = PENDING) -> tuple[ObjectWriter, CachedJob]:
    cache = ClusterCache(lambda uid: None, lambda uid: {})
    spec: Raw = {"template": {"spec": {"containers": [{"name": "trainer", "image": "i", "command": ["x"]}]}}}
    spec["checkpoint"] = {"uri": "s3://bucket/run"}
    manifest = job(spec | ({"evaluationJob": field} if field else {}))
    manifest["metadata"]["resourceVersion"] = "1"
    manifest["status"] = {"evaluationJobs": marks}
    cache.on_job(manifest)
    cached = cache.job(job_view(manifest).uid)
    assert cached is not None
    objects = ObjectWriter(cast(Client, server), cache, PodSettings("agent"), MasterKeys({}, {}), lambda pod: None)
    return objects, cached


def look(server: Server, cached: CachedJob) -> list[str]:
    """Look if it is due, and return the uids of TrainingJobs of which there is news."""
    changed: list[str] = []

    async def scenario() -> None:
        evaluation_jobs.look_if_due(cast(Client, server), cached, changed.append)
        if cached.evaluation_look is not None:
            await cached.evaluation_look

    asyncio.run(scenario())
    return changed


def test_without_the_field_nothing_is_asked() -> None:
    server = Server()
    _, cached = setting(server)
    look(server, cached)
    assert server.asked == []
    assert cached.evaluation_jobs is None


@pytest.mark.parametrize(("state", "looks"), [("Succeeded", 1), ("Running", 2)])
def test_jobs_are_listed_once_and_then_only_while_one_has_not_ended(state: str, looks: int) -> None:
    server = Server()
    _, cached = setting(server, FIELD, [{**PENDING[0], "state": state}])
    assert look(server, cached) == [cached.view.uid], "there are none"
    assert look(server, cached) == []
    assert server.asked == ["list jobs"], "not twice in ten seconds"
    assert cached.evaluation_looked_at is not None
    cached.evaluation_looked_at -= 11
    look(server, cached)
    assert len(server.asked) == looks


def test_a_job_is_created_once_whoever_asks_again() -> None:
    server = Server()
    objects, cached = setting(server, FIELD)
    for _ in range(2):
        assert asyncio.run(objects.write(cached, CREATE))
        assert cached.evaluation_jobs is not None
        assert cached.evaluation_jobs["j-1-2"].state is EvaluationJobState.RUNNING
    assert list(server.jobs) == ["j-1-2"]
    asyncio.run(objects.write(cached, DeleteEvaluationJob("j-1-2")))
    assert (server.jobs, cached.evaluation_jobs) == ({}, {})


@pytest.mark.parametrize(
    ("errors", "said"),
    [
        ({"get podtemplates": NotFound(404, "NotFound", 'podtemplates "score" not found')}, "create the PodTemplate"),
        ({"create jobs": Invalid(422, "Invalid", "no image")}, "refused the Job: no image"),
        ({}, "another Job has the name"),
    ],
)
def test_what_prevents_a_job_is_its_result_and_no_refusal_of_pods(errors: Mapping[str, ApiError], said: str) -> None:
    server = Server(errors)
    server.jobs["j-1-2"] = {"metadata": {"name": "j-1-2"}}
    objects, cached = setting(server, FIELD)
    assert asyncio.run(objects.write(cached, CREATE))
    assert cached.evaluation_jobs is not None
    view = cached.evaluation_jobs["j-1-2"]
    assert view.state is EvaluationJobState.FAILED
    assert said in view.message
    assert cached.refused is None, "pods of the training are not concerned"


def test_an_api_server_that_does_not_answer_leaves_jobs_unknown() -> None:
    unreachable = Unreachable(503, "", "no answer")
    server = Server({"list jobs": unreachable, "create jobs": unreachable})
    objects, cached = setting(server, FIELD)
    look(server, cached)
    assert cached.evaluation_jobs is None
    with pytest.raises(Unreachable):
        asyncio.run(objects.write(cached, CREATE))
    assert cached.evaluation_jobs is None


def test_a_list_that_is_older_than_a_new_job_does_not_lose_it() -> None:
    server = Server()
    objects, cached = setting(server, FIELD)

    async def scenario() -> None:
        answered = asyncio.Event()

        async def list_all(*_: Any, **__: Any) -> tuple[list[Raw], str]:
            await answered.wait()
            return [], "1"

        server.list_all = list_all  # type: ignore[method-assign]
        evaluation_jobs.look_if_due(cast(Client, server), cached, lambda uid: None)
        assert cached.evaluation_look is not None
        await asyncio.sleep(0)  # the list begins
        await objects.write(cached, CREATE)
        answered.set()
        await cached.evaluation_look

    asyncio.run(scenario())
    assert cached.evaluation_jobs is not None
    assert list(cached.evaluation_jobs) == ["j-1-2"]


def test_a_refusal_that_may_pass_leaves_the_job_pending() -> None:
    """Just after its start, an API server does not know roles yet, and a quota may have room later."""
    server = Server({"create jobs": Forbidden(403, "Forbidden", "exceeded quota")})
    objects, cached = setting(server, FIELD)
    asyncio.run(objects.write(cached, CREATE))
    assert not cached.evaluation_jobs
    server.errors = {}
    asyncio.run(objects.write(cached, CREATE))
    assert cached.evaluation_jobs is not None
    assert cached.evaluation_jobs["j-1-2"].state is EvaluationJobState.RUNNING


def test_the_job_of_somebody_else_is_neither_listed_nor_deleted() -> None:
    server = Server()
    objects, cached = setting(server, FIELD)
    server.jobs["j-1-2"] = {"metadata": {"name": "j-1-2", "uid": "other"}, "status": {}}
    look(server, cached)
    assert cached.evaluation_jobs == {}
    asyncio.run(objects.write(cached, DeleteEvaluationJob("j-1-2")))
    assert list(server.jobs) == ["j-1-2"]
