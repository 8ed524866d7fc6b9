"""What this process answers to others by HTTP: the kubelet whether it lives, Prometheus what it has counted."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import itertools
import math
import time
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass

from aiohttp import web
from prometheus_client import disable_created_metrics
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from concertina.controller.settings import Settings
from concertina.metrics import REGISTRY

REST = 3.0
"""Times as long as the last text took, before the next is made: who scrapes on and on has a quarter of a processor."""
Look = Callable[[], Collector | None]
"""Sets the gauges of what is there at this moment, and may have more to tell: that is collected beside the loop."""


@contextlib.asynccontextmanager
async def endpoints(settings: Settings, looks: Iterable[Look]) -> AsyncIterator[None]:
    """Each on its own address, with the Lease or without it; `looks` is gone through at each scrape."""
    disable_created_metrics()  # else each counter has a second series
    async with contextlib.AsyncExitStack() as open_ones:
        for path, address, answer in (
            ("/healthz", settings.health, _healthy),
            ("/metrics", settings.metrics, _Metrics(settings.metrics_token, looks).answer),
        ):
            if address is not None:
                app = web.Application()
                app.add_routes([web.get(path, answer)])
                runner = web.AppRunner(app, handle_signals=False, access_log=None, shutdown_timeout=1.0)
                await runner.setup()
                open_ones.push_async_callback(runner.cleanup)
                await web.TCPSite(runner, *address).start()
        yield


async def _healthy(_: web.Request) -> web.Response:
    """200 for as long as the event loop turns."""
    return web.Response(text="ok")


class _Seen(Collector):
    def __init__(self, families: list[Metric], more: list[Collector]) -> None:
        self._families, self._more = families, more

    def collect(self) -> Iterable[Metric]:
        return itertools.chain(self._families, *(collector.collect() for collector in self._more))


@dataclass(frozen=True)
class _Text:
    content_type: str
    began: float
    """When it was begun to be made, by the monotonic clock."""
    body: bytes


class _Metrics:
    """Of a thousand jobs a text takes 0.3 s of a processor and 20 MiB, and anybody may ask: one is made at a time, all
    who have waited for it get the same, and then there is a rest."""

    def __init__(self, token: str, looks: Iterable[Look]) -> None:
        self._turn = asyncio.Lock()
        self._made = _Text("", -math.inf, b"")
        self._rests_until = -math.inf
        self._expected = f"Bearer {token}".encode() if token else b""
        self._looks = looks

    async def answer(self, request: web.Request) -> web.Response:
        given = request.headers.get("Authorization", "").encode("utf-8", "surrogateescape")
        if self._expected and not hmac.compare_digest(given, self._expected):
            return web.Response(
                status=401,
                headers={"WWW-Authenticate": "Bearer"},
                text="the metrics of this operator ask for its token: Authorization: Bearer TOKEN\n",
            )
        text = await self._text(request.headers.get("Accept", ""))
        return web.Response(body=text.body, headers={"Content-Type": text.content_type})

    async def _text(self, accept: str) -> _Text:
        """Never one that was begun before it was asked for."""
        arrived = time.monotonic()
        encode, content_type = choose_encoder(accept)
        async with self._turn:
            if self._made.began < arrived or self._made.content_type != content_type:
                await asyncio.sleep(max(0.0, self._rests_until - time.monotonic()))
                began = time.monotonic()
                more = [collector for look in self._looks if (collector := look()) is not None]
                seen = _Seen(list(REGISTRY.collect()), more)  # here, where nothing changes; the text beside passes
                body = await asyncio.to_thread(encode, seen)
                self._made = _Text(content_type, began, body)
                self._rests_until = time.monotonic() + REST * (time.monotonic() - began)
            return self._made
