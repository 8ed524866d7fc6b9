"""Events from kopf and callbacks, against a server that answers as an API server does."""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from aiohttp import web

from builders.api_server import api_server, group, kind, kubeconfig, no_success
from builders.until import until_async
from concertina.kube import access
from concertina.kube.client import Client
from concertina.kube.resources import Raw
from concertina.kube.watch import kopf_session
from concertina.kube.watch.trainingjobs import Follower, TrainingJobs
from concertina.local.control_plane.certificates import ClusterAuthority

GROUP, VERSION = "concertina.dev", "v1beta1"
LIMIT = 20.0  # only to give up


def job(uid: str, namespace: str = "a") -> Raw:
    return {"metadata": {"name": f"job-{uid}", "namespace": namespace, "uid": uid, "resourceVersion": "5"}}


@dataclass
class ApiServer:
    """API server with the jobs of its lists by uid, and `sent`, with which each watch begins.

    `forget()` ends each watch as too old, and `hang_up()` ends each without a message.
    """

    jobs: dict[str, Raw] = field(default_factory=dict)
    sent: bytes = b""
    discovered: bool = True
    token: str = ""
    queries: list[dict[str, str]] = field(default_factory=list)
    """Queries of the watches."""
    scans: int = 0
    lists: int = 0
    watches: int = 0
    _ends: asyncio.Future[bytes] = field(default_factory=asyncio.Future)

    def forget(self) -> None:
        status = {"kind": "Status", "code": 410, "message": "too old resource version"}
        self.hang_up(json.dumps({"type": "ERROR", "object": status}).encode() + b"\n")

    def hang_up(self, last_words: bytes = b"") -> None:
        self._ends.set_result(last_words)
        self._ends = asyncio.Future()

    async def answer(self, request: web.Request) -> web.StreamResponse:
        if request.headers.get("Authorization", "") != self.token:
            return no_success(401, "Unauthorized")
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
        self.queries.append(dict(request.query))
        await response.write(self.sent)
        await response.write(await asyncio.shield(self._ends))
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
    """Follow the jobs.

    With `as_proxy`, the API server can be reached through it only. `holds` is what namespaces wait for.
    """
    passed = asyncio.Event()
    passed.set()
    told = Told()
    async with (
        api_server(folder, server.answer, as_proxy) as config,
        Client(await access.load(str(config)), give_up_after=0.0) as client,
    ):
        follower = Follower(
            dict(versions or {}),
            ready=lambda namespace: (holds or {}).get(namespace, passed).wait(),
            on_job=lambda obj: told.jobs.append(obj["metadata"]["uid"]),
            on_deleted=told.deleted.append,
            on_listed=lambda namespace, uids: told.listed.append((namespace, uids)),
        )
        jobs = TrainingJobs(client, "me", namespaces)
        async with jobs.running(), asyncio.timeout(LIMIT):
            jobs.follow(follower)
            yield told


def test_a_list_that_names_no_job_is_told_as_well(tmp_path: Path) -> None:
    """The last job was deleted while the watch was broken, which kopf does not report."""

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
    """kopf looks once, and only logs that it found nothing. The list may be available earlier."""
    monkeypatch.setattr(kopf_session, "UNKNOWN_SECONDS", 0.01)

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


def event(obj: Raw, kind: str = "MODIFIED") -> bytes:
    return json.dumps({"type": kind, "object": obj}).encode() + b"\n"


def test_a_watch_begins_at_the_list_and_goes_on_where_it_broke(tmp_path: Path) -> None:
    """The API server sends no initial events of its own: the memory for them would be unbounded."""

    async def scenario() -> None:
        server = ApiServer({"u1": job("u1")}, sent=event({"metadata": {"resourceVersion": "12"}}, "BOOKMARK"))
        async with following(tmp_path, server) as told:
            await until_async(lambda: server.watches, "the watch", lambda: told)
            server.hang_up()
            await until_async(lambda: server.watches == 2, "the watch again", lambda: told)
            assert [query["resourceVersion"] for query in server.queries] == ["9", "12"]
            assert not {"sendInitialEvents", "resourceVersionMatch"}.intersection(*server.queries)
            assert server.lists == 1

    asyncio.run(scenario())


def test_what_nests_too_deeply_keeps_from_no_other_job(tmp_path: Path) -> None:
    deep = event({**job("deep"), "spec": "SPEC"}).replace(b'"SPEC"', b"[" * 20_000 + b"]" * 20_000)

    async def scenario() -> None:
        server = ApiServer(sent=deep + event(job("next")) + event(job("deep"), "DELETED"))
        async with following(tmp_path, server) as told:
            await until_async(lambda: told.deleted, "the end of the first", lambda: told)
            assert (sorted(told.jobs), told.deleted) == (["deep", "next"], ["deep"])
            assert server.lists == 1

    asyncio.run(scenario())


def test_half_an_event_before_the_stream_ends_is_no_event(tmp_path: Path) -> None:
    """A proxy that is stopped ends a stream in this way."""

    async def scenario() -> None:
        server = ApiServer(sent=event(job("u1"))[:-20])
        async with following(tmp_path, server) as told:
            await until_async(lambda: server.watches, "the watch", lambda: told)
            server.sent = event(job("u2"))
            server.hang_up()
            await until_async(lambda: told.jobs, "the next event", lambda: told)
            assert told.jobs == ["u2"]

    asyncio.run(scenario())


def test_a_token_that_is_refused_is_renewed(tmp_path: Path) -> None:
    async def scenario() -> None:
        server = ApiServer({"u1": job("u1")}, token="Bearer second")
        async with api_server(tmp_path, server.answer) as config:
            written = json.loads(config.read_text())
            token = tmp_path / "token"
            token.write_text("first")
            written["users"][0]["user"] = {"tokenFile": str(token)}
            config.write_text(json.dumps(written))
            async with (
                Client(await access.load(str(config)), give_up_after=0.0) as client,
                TrainingJobs(client, "me", ()).running(),
                asyncio.timeout(LIMIT),
            ):
                token.write_text("second")
                await until_async(lambda: server.scans, "the discovery", lambda: server)

    asyncio.run(scenario())


def test_a_name_of_the_server_that_is_not_in_its_address_holds_for_kopf_too(tmp_path: Path) -> None:
    """A tunnel needs such a name."""
    authority = ClusterAuthority.create(tmp_path / "ca")
    pair = authority.issue("server", "kube.example", hosts=["kube.example"])
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pair.certificate, pair.key)

    async def scenario() -> None:
        server = ApiServer({"u1": job("u1")})
        async with api_server(tmp_path, server.answer, ssl_context=context) as config:
            trusted = {"certificate-authority": str(authority.pair.certificate), "tls-server-name": "kube.example"}
            (address,) = [each["cluster"]["server"] for each in json.loads(config.read_text())["clusters"]]
            config.write_text(kubeconfig(address, **trusted))
            async with (
                Client(await access.load(str(config)), give_up_after=0.0) as client,
                TrainingJobs(client, "me", ()).running(),
                asyncio.timeout(LIMIT),
            ):
                await until_async(lambda: server.scans, "the discovery", lambda: server)

    asyncio.run(scenario())
