"""The client against a server that answers as an API server does in its first second."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

from aiohttp import web

from concertina.kube import access
from concertina.kube.client import Client
from concertina.kube.resources import PODS

STARTING = {"kind": "Status", "code": 503, "message": "the request has been made before all known HTTP paths"}


def kubeconfig(server: str) -> str:
    named = {"name": "c", "context": {"cluster": "c", "user": "c"}}
    clusters, users = [{"name": "c", "cluster": {"server": server}}], [{"name": "c", "user": {}}]
    return json.dumps({"current-context": "c", "contexts": [named], "clusters": clusters, "users": users})


def test_a_server_that_has_just_started_is_asked_again_before_the_time_that_it_names(tmp_path: Path) -> None:
    answers = [
        web.json_response(STARTING, status=503, headers={"Retry-After": "30"}),
        web.json_response({"kind": "Pod", "metadata": {"name": "a"}}),
    ]

    async def answer(_: web.Request) -> web.Response:
        return answers.pop(0)

    async def scenario() -> None:
        application = web.Application()
        application.router.add_get("/{path:.*}", answer)
        runner = web.AppRunner(application)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        try:
            host, port = runner.addresses[0][:2]
            (tmp_path / "config").write_text(kubeconfig(f"http://{host}:{port}"))
            async with Client(await access.load(str(tmp_path / "config")), give_up_after=20.0) as client:
                assert (await client.get(PODS, "default", "a"))["metadata"]["name"] == "a"
        finally:
            await runner.cleanup()

    asyncio.run(scenario())
