"""Operator that waits for the Lease: it logs once which holder it waits for, in case two releases share one Lease."""

from __future__ import annotations

import asyncio
import copy
import logging
from typing import Any

import pytest

from builders.until import until_async
from concertina.kube.errors import NotFound
from concertina.kube.resources import Raw
from concertina.kube.watch.lease import Lease


class Stored:
    """Client of an API server that stores one Lease."""

    def __init__(self) -> None:
        self.lease: Raw | None = None
        self.reads = 0

    async def get(self, *_: Any) -> Raw:
        self.reads += 1
        if self.lease is None:
            raise NotFound(404, "NotFound", "there is none")
        return copy.deepcopy(self.lease)

    async def create(self, _resource: object, _namespace: str, body: Raw) -> Raw:
        body["metadata"]["resourceVersion"] = str(self.reads)
        self.lease = body
        return body

    async def replace(self, resource: object, namespace: str, _name: str, body: Raw) -> Raw:
        return await self.create(resource, namespace, body)


def test_the_holder_that_is_waited_for_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        stored: Any = Stored()
        first, second, third = (Lease(stored, "ns", "l", name, renew_every=0.01) for name in ("one", "two", "three"))
        await first.acquire()
        waiting = asyncio.create_task(third.acquire())
        seen = stored.reads
        await until_async(lambda: stored.reads > seen + 3, "some looks", lambda: stored.reads)
        stored.lease = None
        await second.acquire()
        await until_async(lambda: "two holds" in caplog.text, "the other holder", lambda: caplog.text)
        await second.release()
        await waiting

    with caplog.at_level(logging.INFO, "concertina"):
        asyncio.run(scenario())
    records = [record.getMessage() for record in caplog.records if "waiting" in record.getMessage()]
    assert records == [f"waiting for the lease ns/l, which {holder} holds" for holder in ("one", "two")]
