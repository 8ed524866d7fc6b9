"""Health endpoints for the kubelet: whether a process lives, whether it can serve, and which process leads."""

from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
import pytest

from concertina.controller.health import Path, ProcessHealth, served
from concertina.kube.errors import NotFound, Unreachable
from concertina.kube.resources import Raw
from concertina.kube.watch.lease import DURATION_SECONDS, Lease
from concertina.local.host import processes


class Stored:
    """Client of an API server that stores one Lease and can be unreachable."""

    def __init__(self) -> None:
        self.lease: Raw | None = None
        self.away = False
        self.version = 0

    async def get(self, *_: Any) -> Raw:
        if self.away:
            raise Unreachable(0, "", "away")
        if self.lease is None:
            raise NotFound(404, "NotFound", "there is none")
        return copy.deepcopy(self.lease)

    async def create(self, _resource: object, _namespace: str, body: Raw) -> Raw:
        self.version += 1
        body["metadata"]["resourceVersion"] = str(self.version)
        self.lease = body
        return body

    async def replace(self, resource: object, namespace: str, _name: str, body: Raw) -> Raw:
        return await self.create(resource, namespace, body)


class Replica:
    """One operator process, as far as its health endpoints use it."""

    def __init__(self, stored: Any, name: str, clock: Callable[[], float]) -> None:
        self.lease = Lease(stored, "ns", "l", name, clock=clock)
        self.health = ProcessHealth(self.lease)


async def ask(address: tuple[str, int], path: str) -> tuple[int, str]:
    host, port = address
    async with aiohttp.ClientSession() as session, session.get(f"http://{host}:{port}{path}") as answer:
        return answer.status, await answer.text()


def play(scenario: Callable[[], Awaitable[None]]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(60):
            await scenario()

    asyncio.run(limited())


def test_a_leader_is_ready_once_it_knows_what_exists_and_a_standby_at_once() -> None:
    now = [0.0]

    async def scenario() -> None:
        stored = Stored()
        leader, standby = (Replica(stored, name, lambda: now[0]) for name in ("one", "two"))
        assert "API server" in leader.health.unready()
        await leader.lease.acquire()
        assert "has not yet listed" in leader.health.unready()
        leader.health.synced.set()
        assert leader.health.unready() == ""
        waits = asyncio.create_task(standby.lease.acquire())
        while not standby.lease.answered_lately:
            await asyncio.sleep(0)
        assert standby.health.unready() == "", "it would act as soon as it gets the Lease"
        assert (leader.lease.holder, standby.lease.holder) == ("one", "one")
        waits.cancel()

    play(scenario)


def test_without_an_api_server_nobody_is_ready_and_all_live(caplog: pytest.LogCaptureFixture) -> None:
    now = [0.0]

    async def scenario() -> None:
        stored = Stored()
        leader = Replica(stored, "one", lambda: now[0])
        await leader.lease.acquire()
        leader.health.synced.set()
        now[0] += DURATION_SECONDS + 1
        (port,) = processes.free_ports("127.0.0.1", 1)
        address = ("127.0.0.1", port)
        async with served(address, leader.health):
            status, reason = await ask(address, Path.READY)
            assert (status, "does not answer" in reason) == (503, True)
            assert await ask(address, Path.LIVE) == (200, "ok\n")
            status, text = await ask(address, Path.LEADER)
            assert (status, json.loads(text)) == (200, {"leads": False, "leader": ""})
            await leader.lease.acquire()
            assert (await ask(address, Path.READY))[0] == 200
            assert json.loads((await ask(address, Path.LEADER))[1]) == {"leads": True, "leader": "one"}

    play(scenario)


def test_a_standby_that_gets_no_answer_is_not_ready() -> None:
    async def scenario() -> None:
        stored = Stored()
        stored.away = True
        standby = Replica(stored, "two", lambda: 0.0)
        waits = asyncio.create_task(standby.lease.acquire())
        await asyncio.sleep(0.01)
        assert standby.health.unready()
        waits.cancel()

    play(scenario)
