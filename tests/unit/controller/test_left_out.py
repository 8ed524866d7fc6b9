"""A namespace of several that may not be listed keeps the operator from no other, and is served once it may be."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from aiohttp import web

from builders.api_server import api_server, group, kind, no_success
from builders.until import until_async
from concertina.controller import master_keys, operator
from concertina.controller.settings import from_environment
from concertina.kube import access, reflector
from concertina.kube.client import Client
from concertina.kube.resources import Raw
from concertina.kube.watch import kopf_session
from concertina.kube.watch.lease import Lease
from concertina.kube.watch.trainingjobs import TrainingJobs

ENVIRONMENT = {
    "CONCERTINA_NAMESPACE": "concertina",
    "CONCERTINA_MASTER_KEY_SECRET": "key",
    "CONCERTINA_IMAGE_AGENT": "agent",
}
LIMIT = 20.0  # only to give up


def job(namespace: str) -> Raw:
    container = {"name": "trainer", "image": "i", "command": ["x"]}
    metadata = {
        "name": "j", "namespace": namespace, "uid": f"uid-{namespace}", "generation": 1, "resourceVersion": "5",
        "creationTimestamp": "2026-01-01T00:00:00Z",
    }  # fmt: skip
    return {"metadata": metadata, "spec": {"suspend": True, "template": {"spec": {"containers": [container]}}}}


@dataclass
class ApiServer:
    """A job in each namespace; `refused` are lists that it refuses: "b/pods", or "/trainingjobs" of all namespaces."""

    refused: set[str]
    listed: list[str] = field(default_factory=list)
    watched: list[str] = field(default_factory=list)

    async def answer(self, request: web.Request) -> web.StreamResponse:
        path = request.path
        namespace = path.split("/namespaces/")[1].split("/")[0] if "/namespaces/" in path else ""
        what = f"{namespace}/{path.rsplit('/', 1)[1]}"
        if request.method == "GET" and what.endswith(("/pods", "/trainingjobs", "/nodes")):
            if what in self.refused:
                message = f"{what} is forbidden"
                return no_success(403, message)
            return await self._watch(request, what) if "watch" in request.query else self._list(namespace, what)
        if path.startswith("/apis/kueue.x-k8s.io"):
            return no_success(404, "not found")
        known: dict[str, Raw] = {
            "/api": {"versions": ["v1"]},
            "/api/v1": {"resources": [kind("namespaces", "Namespace", False), kind("events", "Event", True)]},
            "/apis": {"groups": [group("apiextensions.k8s.io", "v1"), group("concertina.dev", "v1beta1")]},
            "/apis/apiextensions.k8s.io/v1": {
                "resources": [kind("customresourcedefinitions", "CustomResourceDefinition", False)]
            },
            "/apis/concertina.dev/v1beta1": {"resources": [kind("trainingjobs", "TrainingJob", True)]},
        }
        return web.json_response(known[path]) if path in known else web.json_response({}, status=503)

    def _list(self, namespace: str, what: str) -> web.Response:
        self.listed.append(what)
        items = [job(namespace or "a")] if what.endswith("/trainingjobs") else []
        return web.json_response({"metadata": {"resourceVersion": "9"}, "items": items})

    async def _watch(self, request: web.Request, what: str) -> web.StreamResponse:
        self.watched.append(what)
        response = web.StreamResponse()
        await response.prepare(request)
        await asyncio.sleep(LIMIT)
        return response


@contextlib.asynccontextmanager
async def acting(folder: Path, server: ApiServer, namespaces: str) -> AsyncIterator[operator.Operator]:
    """Run an operator of these namespaces."""
    settings = from_environment(ENVIRONMENT | {"CONCERTINA_WATCH_NAMESPACES": namespaces})
    keys = master_keys.MasterKeys({}, {"id": b"k" * 32})
    stop = asyncio.Event()
    async with contextlib.AsyncExitStack() as stack:
        reached = await access.load(str(await stack.enter_async_context(api_server(folder, server.answer))))
        client = await stack.enter_async_context(Client(reached, give_up_after=0.0))
        known = operator.Operator(settings, client, client, Lease(client, "concertina", "l", "me"), keys, None)
        jobs = TrainingJobs(client, "me", settings.watch_namespaces)
        await stack.enter_async_context(jobs.running())
        running = asyncio.create_task(known.run(stop, jobs, asyncio.Event()))
        try:
            async with asyncio.timeout(LIMIT):
                yield known
                assert not running.done()
                stop.set()
                assert await running == 0
        finally:
            running.cancel()
            await asyncio.wait([running])


def served(known: operator.Operator) -> list[str]:
    return sorted(found.name for found in known._cache.jobs())


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reflector, "FIRST_SECONDS", 0.01)
    monkeypatch.setattr(reflector, "LONGEST_FORBIDDEN_SECONDS", 0.01)
    monkeypatch.setattr(kopf_session, "UNKNOWN_SECONDS", 0.01)


@pytest.mark.parametrize("refused", [{"b/pods", "b/trainingjobs"}, {"b/pods"}, {"b/trainingjobs"}])
def test_a_namespace_that_may_not_be_listed_keeps_from_no_other_and_is_served_later(
    tmp_path: Path, refused: set[str], caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    waits_for_jobs = "b is not served until the operator may list its TrainingJobs: b/tr"

    async def scenario() -> None:
        server = ApiServer(set(refused))
        async with acting(tmp_path, server, "b,a") as known:
            await until_async(lambda: "a/trainingjobs" in server.watched, "kopf's watch", lambda: server)
            assert served(known) == ["a/j"]
            assert server.listed.count("a/trainingjobs") == 1
            if "b/pods" not in refused:
                await until_async(lambda: waits_for_jobs in caplog.text, "the second try", lambda: caplog.text)
            server.refused.clear()
            await until_async(lambda: "b/j" in served(known), "the other job", lambda: server.listed)
            assert known._pods["b"].synced.is_set(), "no pass is made on pods that are not known"

    with caplog.at_level(logging.WARNING, "concertina"):
        asyncio.run(scenario())
    said = caplog.text + capsys.readouterr().err
    assert (waits_for_jobs in said) == (refused == {"b/trainingjobs"})
    assert ("namespace not served until the operator may list its pods" in said) == ("b/pods" in refused)


@pytest.mark.parametrize("refused", ["/pods", "/trainingjobs"])
def test_without_names_all_is_waited_for(tmp_path: Path, refused: str) -> None:
    """An API server that has just started refuses what it will allow a moment later."""

    async def scenario() -> None:
        server = ApiServer({refused})
        async with acting(tmp_path, server, "") as known:
            await until_async(lambda: "/nodes" in server.listed, "the first lists", lambda: server.listed)
            assert served(known) == []
            server.refused.clear()
            await until_async(lambda: served(known) == ["a/j"], "the job", lambda: server.listed)

    asyncio.run(scenario())
