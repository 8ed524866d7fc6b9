"""Client of the API server, against a server that answers as an API server does in its first second."""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from aiohttp import web

from builders.api_server import api_server, kubeconfig, no_success
from builders.counted import counted
from builders.until import until_async
from concertina.kube import access
from concertina.kube.client import Client
from concertina.kube.errors import ApiError, NotFound, Unauthorized, Unreachable
from concertina.kube.execute import execute
from concertina.kube.resources import PODS
from concertina.local.control_plane.certificates import ClusterAuthority
from concertina.local.host import processes

STARTING = {"kind": "Status", "code": 503, "message": "the request has been made before all known HTTP paths"}


@contextlib.asynccontextmanager
async def answering(folder: Path, answers: list[web.Response]) -> AsyncIterator[Client]:
    """Run a server that gives these answers one after the other, and yield a client of it."""

    async def answer(_: web.Request) -> web.Response:
        return answers.pop(0)

    async with (
        api_server(folder, answer) as config,
        Client(await access.load(str(config)), give_up_after=20.0) as client,
    ):
        yield client


def test_what_a_proxy_answers_is_asked_again(tmp_path: Path) -> None:
    """The answers are an HTML page, and a Retry-After that is a date."""
    answers = [
        web.Response(text="<html>in a moment</html>"),
        web.json_response(STARTING, status=503, headers={"Retry-After": "Wed, 21 Oct 2026 07:28:00 GMT"}),
        web.json_response({"kind": "Pod", "metadata": {"name": "a"}}),
    ]

    async def scenario() -> None:
        async with answering(tmp_path, answers) as client:
            assert (await client.get(PODS, "default", "a"))["metadata"]["name"] == "a"

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("answer", "version"),
    [
        ({"major": "1", "minor": "36", "gitVersion": "v1.36.2"}, (1, 36)),
        ({"major": "1", "minor": "37+"}, (1, 37)),
        ({"minor": "37"}, None),
        ({"major": "one", "minor": "9" * 5000}, None),
    ],
)
def test_the_server_version_is_two_numbers(
    tmp_path: Path, answer: dict[str, str], version: tuple[int, int] | None
) -> None:
    async def scenario() -> None:
        async with answering(tmp_path, [web.json_response(answer)]) as client:
            if version:
                assert await client.server_version() == version
            else:
                with pytest.raises(ApiError, match="does not say its version"):
                    await client.server_version()

    asyncio.run(scenario())


@pytest.mark.parametrize("cut", ['{"type": "ADDED", "obj', '{"type": "ADDED"}', "[]", '{"type": 1, "object": {}}'])
def test_a_watch_that_is_cut_off_within_a_line_is_lost(tmp_path: Path, cut: str) -> None:
    event = {"type": "ADDED", "object": {"metadata": {"name": "a"}}}

    async def scenario() -> None:
        async with answering(tmp_path, [web.Response(text=f"{json.dumps(event)}\n{cut}")]) as client:
            watch = client.watch(PODS, "default", "1")
            assert await anext(watch) == ("ADDED", event["object"])
            with pytest.raises(Unreachable, match="invalid event"):
                await anext(watch)

    asyncio.run(scenario())


@contextlib.asynccontextmanager
async def saying(reply: bytes) -> AsyncIterator[str]:
    """Run a server that gives the same answer to every request; yield its address."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(reply)
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"


@pytest.mark.parametrize(
    "reply",
    [
        b"SSH-2.0-OpenSSH_9.6\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: much\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"HTTP/1.1 302 Found\r\nLocation: /\r\nContent-Length: 0\r\nConnection: close\r\n\r\n",
    ],
    ids=["no HTTP", "no length", "no chunk", "round in a circle"],
)
def test_what_is_no_answer_is_told_as_one_that_is_lost(tmp_path: Path, reply: bytes) -> None:
    async def scenario() -> None:
        async with saying(reply) as host:
            (tmp_path / "config").write_text(kubeconfig(f"http://{host}"))
            async with Client(await access.load(str(tmp_path / "config")), give_up_after=0.0) as client:
                with pytest.raises(Unreachable, match="can't be reached"):
                    await client.get(PODS, "default", "a")
                with pytest.raises(Unreachable, match="broke"):
                    await anext(client.watch(PODS, "default", "1"))
                with pytest.raises(ApiError):
                    async with client.websocket("/exec", [], "v4.channel.k8s.io"):
                        pass

    asyncio.run(scenario())


def test_a_pod_that_is_gone_is_no_api_that_is_missing(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with answering(tmp_path, [web.Response(status=404)]) as client:
            with pytest.raises(NotFound, match="pods/gone/exec was refused with HTTP status 404"):
                await execute(client, "default", "gone", "trainer", ["true"])

    asyncio.run(scenario())


@pytest.mark.parametrize("status", ["503 Service Unavailable", "407 Proxy Authentication Required"])
def test_a_proxy_that_refuses_is_told_in_a_sentence(tmp_path: Path, status: str) -> None:
    async def scenario() -> None:
        async with saying(f"HTTP/1.1 {status}\r\nContent-Length: 0\r\n\r\n".encode()) as host:
            proxy = {"proxy-url": f"http://user:secret@{host}"}
            (tmp_path / "config").write_text(kubeconfig("https://kube.example:6443", **proxy))
            async with Client(await access.load(str(tmp_path / "config")), give_up_after=0.0) as client:
                with pytest.raises(Unreachable, match=status) as caught:
                    await client.get(PODS, "default", "a")
                assert "https://kube.example:6443 can't be reached" in str(caught.value)
                assert "secret" not in str(caught.value)

    asyncio.run(scenario())


def test_a_name_of_the_server_that_is_not_in_its_address_holds_for_commands_in_pods_too(tmp_path: Path) -> None:
    """A tunnel needs such a name."""
    authority = ClusterAuthority.create(tmp_path / "ca")
    pair = authority.issue("server", "kube.example", hosts=["kube.example"])
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pair.certificate, pair.key)

    async def pod(_: web.Request) -> web.Response:
        return web.json_response({"kind": "Pod", "metadata": {"name": "a"}})

    async def command(request: web.Request) -> web.WebSocketResponse:
        ws = web.WebSocketResponse(protocols=("v4.channel.k8s.io",))
        await ws.prepare(request)
        await ws.send_bytes(b"\x01hello")
        await ws.send_bytes(b'\x03{"status": "Success"}')
        await ws.close()
        return ws

    async def scenario() -> None:
        application = web.Application()
        application.router.add_get("/api/v1/namespaces/default/pods/a", pod)
        application.router.add_get("/api/v1/namespaces/default/pods/a/exec", command)
        runner = web.AppRunner(application)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=context).start()
        host, port = runner.addresses[0][:2]
        trusted = {"certificate-authority": str(authority.pair.certificate), "tls-server-name": "kube.example"}
        (tmp_path / "config").write_text(kubeconfig(f"https://{host}:{port}", **trusted))
        try:
            async with Client(await access.load(str(tmp_path / "config")), give_up_after=0.0) as client:
                assert (await client.get(PODS, "default", "a"))["metadata"]["name"] == "a"
                assert await execute(client, "default", "a", "trainer", ["true"]) == "hello"
        finally:
            await runner.cleanup()

    asyncio.run(scenario())


def test_requests_are_counted_by_their_code_and_timed_from_the_first_try(tmp_path: Path) -> None:
    """The metrics contain no user and no password, which an address may contain."""
    (port,) = processes.free_ports("127.0.0.1", 1)
    host = f"127.0.0.1:{port}"
    (tmp_path / "config").write_text(kubeconfig(f"http://user:secret@{host}"))
    answers = [web.json_response(STARTING, status=503), web.json_response({"kind": "Pod", "metadata": {}})]

    def codes() -> dict[str, float]:
        labels = {"method": "GET", "host": host, "resource": "pods"}
        return {code: counted("rest_client_requests_total", code=code, **labels) for code in ("<error>", "503", "200")}

    async def answer(_: web.Request) -> web.Response:
        return answers.pop(0)

    async def scenario() -> None:
        application = web.Application()
        application.router.add_get("/{path:.*}", answer)
        runner = web.AppRunner(application)
        await runner.setup()
        async with Client(await access.load(str(tmp_path / "config")), give_up_after=20.0) as client:
            asking = asyncio.create_task(client.get(PODS, "default", "a"))
            await until_async(lambda: codes()["<error>"], "a try that nobody answers", codes)
            await web.TCPSite(runner, *host.split(":")).start()
            try:
                await asking
            finally:
                await runner.cleanup()

    asyncio.run(scenario())
    seen = codes()
    assert (seen.pop("<error>") >= 1, seen) == (True, {"503": 1, "200": 1})
    labels = {"verb": "GET", "host": host, "resource": "pods"}
    assert counted("rest_client_request_duration_seconds_count", **labels) == 1


def test_a_server_that_has_just_started_is_asked_again_before_the_time_that_it_names(tmp_path: Path) -> None:
    answers = [
        web.json_response(STARTING, status=503, headers={"Retry-After": "30"}),
        web.json_response({"kind": "Pod", "metadata": {"name": "a"}}),
    ]

    async def scenario() -> None:
        async with answering(tmp_path, answers) as client:
            assert (await client.get(PODS, "default", "a"))["metadata"]["name"] == "a"

    asyncio.run(scenario())


EXEC = "client.authentication.k8s.io/v1"
PLUGIN = f"""echo >> tokens
printf '{{"apiVersion": "{EXEC}", "kind": "ExecCredential", "status": {{"token": "%d"}}}}' $(wc -l < tokens)"""
"""Credential plugin that returns another token each time, without an end: 1, 2, ..."""


def test_a_stream_whose_credentials_have_run_out_is_asked_for_with_new_ones_once(tmp_path: Path) -> None:
    """A client that only watches makes no other request by which its credentials would be renewed."""
    good, heard = "Bearer 2", list[str]()

    async def answer(request: web.Request) -> web.Response:
        heard.append(request.headers["Authorization"])
        event = {"type": "ADDED", "object": {"metadata": {"name": "a"}}}
        return web.Response(text=json.dumps(event)) if heard[-1] == good else no_success(401, "Unauthorized")

    async def scenario() -> None:
        nonlocal good
        async with api_server(tmp_path, answer) as config:
            known = json.loads(config.read_text())
            plugin = {"command": "sh", "args": ["-c", f"cd {tmp_path}; {PLUGIN}"]}
            known["users"][0]["user"]["exec"] = {"apiVersion": EXEC, **plugin}
            config.write_text(json.dumps(known))
            async with Client(await access.load(str(config))) as client:
                assert [kind async for kind, _ in client.watch(PODS, "default", "1")] == ["ADDED"]
                good = "another's"
                with pytest.raises(Unauthorized):
                    await anext(client.watch(PODS, "default", "1"))

    asyncio.run(scenario())
    assert heard == [f"Bearer {count}" for count in (1, 2, 2, 3)]
