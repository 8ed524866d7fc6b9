"""Jobs that a new list lacks: the operator looks them up until the API server has said whether they exist."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
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
}
AWAY = web.HTTPServiceUnavailable
GONE = web.HTTPNotFound


def job(name: str, namespace: str = "a") -> Raw:
    container = {"name": "trainer", "image": "i", "command": ["x"]}
    metadata = {
        "name": name, "namespace": namespace, "uid": f"uid-{name}", "generation": 1, "resourceVersion": "5",
        "creationTimestamp": "2026-01-01T00:00:00Z",
    }  # fmt: skip
    return {"metadata": metadata, "spec": {"suspend": True, "template": {"spec": {"containers": [container]}}}}


@contextlib.asynccontextmanager
async def knowing(folder: Path, jobs: list[Raw], answers: list[type[web.HTTPError]]) -> AsyncIterator[Any]:
    """Yield an operator that knows these jobs, and an API server that gives these answers one after the other."""

    async def answer(_: web.Request) -> web.Response:
        raise answers.pop(0)

    settings, keys = from_environment(ENVIRONMENT), master_keys.MasterKeys({}, {"id": b"k" * 32})
    async with contextlib.AsyncExitStack() as stack:
        reached = await access.load(str(await stack.enter_async_context(api_server(folder, answer))))
        client = await stack.enter_async_context(Client(reached, give_up_after=0.0))
        lease = Lease(client, "concertina", "l", "me")
        known = operator.Operator(settings, client, client, lease, keys, None)
        for obj in jobs:
            known._cache.on_job(obj)
        yield known


def test_a_job_that_is_gone_is_forgotten_though_the_api_server_was_away_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operator, "FIRST_SECONDS", 0.001)

    async def scenario() -> None:
        answers = [AWAY, AWAY, GONE]
        async with knowing(tmp_path, [job("gone"), job("named")], answers) as known:
            known._on_listed(None, {"uid-named"})
            await until_async(lambda: not known._checks, "the end of the look", lambda: known._checks)
            assert [found.name for found in known._cache.jobs()] == ["a/named"]
            assert answers == []

    asyncio.run(scenario())


def test_a_list_of_one_namespace_says_nothing_of_another(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with knowing(tmp_path, [job("gone", "a"), job("elsewhere", "b")], [GONE]) as known:
            known._on_listed("a", set())
            await until_async(lambda: not known._checks, "the end of the look", lambda: known._checks)
            assert [found.name for found in known._cache.jobs()] == ["b/elsewhere"]

    asyncio.run(scenario())


def test_a_job_that_two_lists_do_not_name_is_asked_for_once_more_and_not_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operator, "FIRST_SECONDS", 0.001)

    async def scenario() -> None:
        async with knowing(tmp_path, [job("gone")], [AWAY, GONE]) as known:
            for _ in range(3):
                known._on_listed(None, set())
            assert len(known._checks) == 1
            await until_async(lambda: not known._checks, "the end of the look", lambda: known._checks)
            assert list(known._cache.jobs()) == []

    asyncio.run(scenario())
