"""Selected namespaces: the operator serves those whose labels match its selector, and follows the labels."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path

from aiohttp import web

from builders.api_server import api_server
from builders.until import until_async
from concertina.controller import master_keys, operator
from concertina.controller.settings import from_environment
from concertina.kube import access
from concertina.kube.client import Client
from concertina.kube.resources import Raw
from concertina.kube.watch.lease import Lease

ENVIRONMENT = {
    "CONCERTINA_NAMESPACE": "concertina",
    "CONCERTINA_MASTER_KEY_SECRET": "key",
    "CONCERTINA_IMAGE_AGENT": "agent",
    "CONCERTINA_NAMESPACE_SELECTOR": "serve=true",
}


def job(namespace: str) -> Raw:
    metadata = {
        "name": "j", "namespace": namespace, "uid": f"uid-{namespace}", "generation": 1, "resourceVersion": "5",
        "creationTimestamp": "2026-01-01T00:00:00Z",
    }  # fmt: skip
    container = {"name": "trainer", "image": "i", "command": ["x"]}
    return {"metadata": metadata, "spec": {"suspend": True, "template": {"spec": {"containers": [container]}}}}


class Labels:
    """API server with one job in each of the namespaces a and b, of which a is selected at first."""

    def __init__(self) -> None:
        self.events: asyncio.Queue[Raw] = asyncio.Queue()

    def say(self, kind: str, namespace: str, version: int) -> None:
        metadata = {"name": namespace, "uid": f"uid-{namespace}", "resourceVersion": str(version)}
        self.events.put_nowait({"type": kind, "object": {"metadata": metadata}})

    async def answer(self, request: web.Request) -> web.StreamResponse:
        if request.path != "/api/v1/namespaces":
            namespace = request.path.split("/")[-2]
            return web.json_response({"metadata": {"resourceVersion": "9"}, "items": [job(namespace)]})
        assert request.query["labelSelector"] == "serve=true"
        if "watch" not in request.query:
            selected = {"metadata": {"name": "a", "uid": "uid-a", "resourceVersion": "1"}}
            return web.json_response({"metadata": {"resourceVersion": "10"}, "items": [selected]})
        stream = web.StreamResponse()
        await stream.prepare(request)
        with contextlib.suppress(ConnectionError):
            while True:
                await stream.write(json.dumps(await self.events.get()).encode() + b"\n")
        return stream


@contextlib.asynccontextmanager
async def following(folder: Path, labels: Labels) -> AsyncIterator[operator.Operator]:
    settings, keys = from_environment(ENVIRONMENT), master_keys.MasterKeys({}, {"id": b"k" * 32})
    async with contextlib.AsyncExitStack() as stack:
        reached = await access.load(str(await stack.enter_async_context(api_server(folder, labels.answer))))
        client = await stack.enter_async_context(Client(reached, give_up_after=0.0))
        made = operator.Operator(settings, client, client, Lease(client, "concertina", "l", "me"), keys, None)
        part = asyncio.create_task(made._parts()["namespaces"]())
        try:
            assert made._selected is not None
            await made._selected.reflector.synced.wait()
            yield made
        finally:
            part.cancel()
            await asyncio.gather(part, return_exceptions=True)


def served(made: operator.Operator) -> set[str]:
    return {job.view.namespace for job in made._cache.jobs()}


def test_jobs_are_served_as_long_as_their_namespace_is_selected(tmp_path: Path) -> None:
    labels = Labels()

    async def scenario() -> None:
        async with following(tmp_path, labels) as made:
            for namespace in ("a", "b"):
                made._cache.on_job(job(namespace))  # as the watch of all namespaces tells of them
            assert served(made) == {"a"}
            labels.say("ADDED", "b", 11)
            await until_async(lambda: served(made) == {"a", "b"}, "the job of b", lambda: served(made))
            labels.say("DELETED", "a", 12)
            await until_async(lambda: served(made) == {"b"}, "that of a to be left alone", lambda: served(made))
            made._cache.on_job(job("a"))
            assert served(made) == {"b"}, "an answer to a write that was under way changes nothing"
            labels.say("ADDED", "a", 13)
            await until_async(lambda: served(made) == {"a", "b"}, "the job of a again", lambda: served(made))

    asyncio.run(scenario())
