"""What kopf is told and what it says of it, against a server that answers as an API server does."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from aiohttp import web

from builders.api_server import api_server, group, kind
from builders.until import until_async
from concertina.kube import access
from concertina.kube.client import Client
from concertina.kube.resources import Raw
from concertina.kube.watch import trainingjobs

GROUP, VERSION = "concertina.dev", "v1beta1"
LIMIT = 20.0  # only to give up


def job(uid: str, namespace: str = "a") -> Raw:
    return {"metadata": {"name": f"job-{uid}", "namespace": namespace, "uid": uid, "resourceVersion": "5"}}


@dataclass
class ApiServer:
    """`jobs` is what its lists say, by uid; `forget()` ends each watch as one that began too long ago."""

    jobs: dict[str, Raw] = field(default_factory=dict)
    discovered: bool = True
    scans: int = 0
    lists: int = 0
    watches: int = 0
    _gone: asyncio.Event = field(default_factory=asyncio.Event)

    def forget(self) -> None:
        self._gone.set()
        self._gone = asyncio.Event()

    async def answer(self, request: web.Request) -> web.StreamResponse:
        if request.path.endswith("/trainingjobs"):
            namespace = request.path.split("/namespaces/")[1].split("/")[0] if "/namespaces/" in request.path else None
            return await (self._watch(request) if "watch" in request.query else self._list(namespace))
        kinds = {
            "/api/v1": [kind("namespaces", "Namespace", False), kind("events", "Event", True)],
            "/apis/apiextensions.k8s.io/v1": [kind("customresourcedefinitions", "CustomResourceDefinition", False)],
            f"/apis/{GROUP}/{VERSION}": [kind("trainingjobs", "TrainingJob", True)],
        }
        if request.path == "/api":
            return web.json_response({"versions": ["v1"]})
        if request.path == "/apis":
            self.scans += 1
            groups = [("apiextensions.k8s.io", "v1"), *([(GROUP, VERSION)] if self.discovered else [])]
            return web.json_response({"groups": [group(*known) for known in groups]})
        if request.path in kinds:
            return web.json_response({"resources": kinds[request.path]})
        return web.json_response({"kind": "Status", "code": 404}, status=404)

    async def _list(self, namespace: str | None) -> web.Response:
        self.lists += 1
        items = [obj for obj in self.jobs.values() if namespace in (None, obj["metadata"]["namespace"])]
        head = {"kind": "TrainingJobList", "apiVersion": f"{GROUP}/{VERSION}", "metadata": {"resourceVersion": "9"}}
        return web.json_response({**head, "items": items})

    async def _watch(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        self.watches += 1
        await self._gone.wait()
        status = {"kind": "Status", "code": 410, "message": "too old resource version"}
        await response.write(json.dumps({"type": "ERROR", "object": status}).encode() + b"\n")
        return response


@dataclass
class Told:
    jobs: list[str] = field(default_factory=list)
    deleted: list[str] = field(default_factory=list)
    listed: list[tuple[str | None, set[str]]] = field(default_factory=list)


@contextlib.asynccontextmanager
async def following(
    folder: Path,
    server: ApiServer,
    namespaces: tuple[str, ...] = (),
    as_proxy: bool = False,
    holds: dict[str | None, asyncio.Event] | None = None,
    versions: dict[str | None, str] | None = None,
) -> AsyncIterator[Told]:
    """`as_proxy`: of an API server that can be reached by it alone. `holds`: what namespaces wait for."""
    passed = asyncio.Event()
    passed.set()
    told = Told()
    async with (
        api_server(folder, server.answer, as_proxy) as config,
        Client(await access.load(str(config)), give_up_after=0.0) as client,
    ):
        kopf = asyncio.create_task(
            trainingjobs.run(
                client,
                "me",
                namespaces,
                dict(versions or {}),
                ready=lambda namespace: (holds or {}).get(namespace, passed).wait(),
                on_job=lambda obj: told.jobs.append(obj["metadata"]["uid"]),
                on_deleted=told.deleted.append,
                on_listed=lambda namespace, uids: told.listed.append((namespace, uids)),
                stop=asyncio.Event(),
                started=lambda: None,
            )
        )
        try:
            async with asyncio.timeout(LIMIT):
                yield told
        finally:
            kopf.cancel()  # it would wait for the server's tasks, as for all that it does not know
            await asyncio.wait([kopf], timeout=LIMIT)


def test_a_list_that_names_no_job_is_told_as_well(tmp_path: Path) -> None:
    """Its last job was deleted while the watch was broken, of which kopf tells nobody."""

    async def scenario() -> None:
        server = ApiServer({"u1": job("u1")})
        async with following(tmp_path, server) as told:
            await until_async(lambda: server.watches, "the watch after the first list", lambda: told)
            del server.jobs["u1"]
            server.forget()
            await until_async(lambda: len(told.listed) == 2, "the second list", lambda: told)
            assert told == Told(jobs=["u1"], listed=[(None, {"u1"}), (None, set())])

    asyncio.run(scenario())


def test_a_list_that_was_made_before_is_not_made_again(tmp_path: Path) -> None:
    async def scenario() -> None:
        server = ApiServer({"u1": job("u1")})
        async with following(tmp_path, server, versions={None: "9"}) as told:
            await until_async(lambda: server.watches, "the watch", lambda: told)
            assert (server.lists, told) == (0, Told())
            server.forget()
            await until_async(lambda: told.listed, "the list after it", lambda: told)
            assert told == Told(jobs=["u1"], listed=[(None, {"u1"})])

    asyncio.run(scenario())


def test_each_list_says_of_which_namespace_it_is(tmp_path: Path) -> None:
    async def scenario() -> None:
        server = ApiServer({"u1": job("u1", "a"), "u2": job("u2", "b")})
        async with following(tmp_path, server, ("a", "b", "empty")) as told:
            await until_async(lambda: len(told.listed) == 3, "the lists", lambda: told)
            by_name = sorted(told.listed, key=lambda listed: listed[0] or "")
            assert by_name == [("a", {"u1"}), ("b", {"u2"}), ("empty", set())]

    asyncio.run(scenario())


def test_a_namespace_is_listed_once_it_is_ready_and_waited_for_by_no_other(tmp_path: Path) -> None:
    async def scenario() -> None:
        server, ready = ApiServer({"u1": job("u1", "a"), "u2": job("u2", "b")}), asyncio.Event()
        async with following(tmp_path, server, ("b", "a"), holds={"b": ready}) as told:
            await until_async(lambda: told.jobs, "the job of the other", lambda: told)
            assert (told.listed, server.lists) == ([("a", {"u1"})], 1)
            ready.set()
            await until_async(lambda: len(told.listed) == 2, "the second list", lambda: told)
            assert told.listed[1] == ("b", {"u2"})

    asyncio.run(scenario())


def test_kopf_looks_for_the_resource_until_it_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It looks once, and says only to the log that it found nothing; a list may be had before."""
    monkeypatch.setattr(trainingjobs, "UNKNOWN_SECONDS", 0.01)

    async def scenario() -> None:
        server = ApiServer({"u1": job("u1")}, discovered=False)
        async with following(tmp_path, server) as told:
            await until_async(lambda: server.scans > 2, "some looks", lambda: server)
            assert told.listed == []
            server.discovered = True
            await until_async(lambda: told.jobs, "the job", lambda: told)
            assert told.listed == [(None, {"u1"})]

    asyncio.run(scenario())


def test_kopf_goes_through_the_proxy_of_the_kubeconfig(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with following(tmp_path, ApiServer({"u1": job("u1")}), as_proxy=True) as told:
            await until_async(lambda: told.jobs, "the job", lambda: told)

    asyncio.run(scenario())
