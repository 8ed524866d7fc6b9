"""HTTP server of the operator, and the endpoint for Prometheus."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import itertools
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass

from aiohttp import web
from prometheus_client import disable_created_metrics
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from concertina.controller.settings import MetricsAccess, OperatorSettings
from concertina.controller.token_reviews import TokenReviews, TokenVerdict
from concertina.kube.errors import ApiError
from concertina.metrics import REGISTRY

REST = 3.0
"""Ratio of the pause after the creation of a response to the time that the creation took.

Even a client that scrapes all the time therefore uses at most a quarter of a processor.
"""
Answer = Callable[[web.Request], Awaitable[web.Response]]
Look = Callable[[], Collector | None]
"""Function that is called for each scrape and updates gauges of the current state.

It may return a collector of further metrics, which is collected outside of the event loop.
"""


@contextlib.asynccontextmanager
async def endpoints(
    settings: OperatorSettings, looks: Iterable[Look], reviews: TokenReviews | None = None
) -> AsyncIterator[None]:
    """Serve the operator's metrics while the context is open, whether or not this process holds the Lease.

    Args:
        settings: Settings of the operator.
        looks: Functions to call for each scrape, which update gauges.
        reviews: Token reviews for `MetricsAccess.REVIEW`.
    """
    guard = _Guard(settings.metrics_access, settings.metrics_token, reviews)
    disable_created_metrics()  # otherwise each counter gets a second series (_created)
    async with listening(settings.metrics, {"/metrics": _Metrics(guard, looks).answer}):
        yield


@contextlib.asynccontextmanager
async def listening(address: tuple[str, int] | None, answers: Mapping[str, Answer]) -> AsyncIterator[None]:
    """Serve HTTP paths on an address while the context is open. If the address is None, serve nothing."""
    if address is None:
        yield
        return
    app = web.Application()
    app.add_routes([web.get(path, answer) for path, answer in answers.items()])
    runner = web.AppRunner(app, handle_signals=False, access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    try:
        await web.TCPSite(runner, *address).start()
        yield
    finally:
        await runner.cleanup()


class _Guard:
    """Check of whether the client that sent a request may read the operator's metrics."""

    def __init__(self, access: MetricsAccess, token: str, reviews: TokenReviews | None) -> None:
        self._access = access
        self._expected = f"Bearer {token}".encode() if token else b""
        self._reviews = reviews

    async def refusal(self, request: web.Request) -> web.Response | None:
        """Return the error response for a client that may not read the metrics; None if the client may read them."""
        authorization = request.headers.get("Authorization", "")
        match self._access:
            case MetricsAccess.OPEN:
                return None
            case MetricsAccess.TOKEN:
                return self._by_token(authorization)
            case MetricsAccess.REVIEW:
                return await self._by_review(authorization)

    def _by_token(self, authorization: str) -> web.Response | None:
        if not self._expected:
            return _refused(
                401,
                "no token is set, so nobody can read the metrics of this operator: set metrics.tokenSecret "
                "in its chart",
            )
        if hmac.compare_digest(authorization.encode("utf-8", "surrogateescape"), self._expected):
            return None
        return _refused(401, "the metrics of this operator need its token: Authorization: Bearer TOKEN")

    async def _by_review(self, authorization: str) -> web.Response | None:
        scheme, _, token = authorization.partition(" ")
        if scheme.lower() != "bearer" or not token.strip() or self._reviews is None:
            return _refused(
                401, "the metrics of this operator need a token of the cluster: Authorization: Bearer TOKEN"
            )
        try:
            verdict = await self._reviews.verdict(token.strip())
        except ApiError as error:
            return _refused(503, f"the token could not be checked: {error.message}")
        if verdict is TokenVerdict.ALLOWED:
            return None
        if verdict is TokenVerdict.FORBIDDEN:
            return _refused(
                403, "this account is not allowed to get the URL /metrics: bind it to the role NAME-metrics-reader"
            )
        return _refused(401, "the API server rejects this token")


def _refused(status: int, sentence: str) -> web.Response:
    headers = {"WWW-Authenticate": "Bearer"} if status == 401 else {}
    return web.Response(status=status, headers=headers, text=f"{sentence}\n")


class _CollectedMetrics(Collector):
    """Collector that returns the metrics in `families`, and then collects the metrics of `more`.

    The operator's own metrics are collected in the event loop, so that they can't change during the collection. A
    thread then collects the metrics of jobs and writes the text.
    """

    def __init__(self, families: list[Metric], more: list[Collector]) -> None:
        self._families, self._more = families, more

    def collect(self) -> Iterable[Metric]:
        return itertools.chain(self._families, *(collector.collect() for collector in self._more))


@dataclass(frozen=True)
class _Exposition:
    """Text of all metrics at one time, in Prometheus' exposition format."""

    content_type: str
    began: float
    """Monotonic time at which the creation of the text began."""
    body: bytes


class _Metrics:
    """HTTP endpoint for the operator's metrics.

    The text for a thousand jobs takes 0.3 s of processor time and 20 MiB. Only one text is created at a time, and all
    requests that arrived before its creation began get this text. Then the endpoint pauses for REST times as long as
    the creation took, so that frequent requests can't use up the operator's processor time.
    """

    def __init__(self, guard: _Guard, looks: Iterable[Look]) -> None:
        self._turn = asyncio.Lock()
        self._last = _Exposition("", -math.inf, b"")
        self._rests_until = -math.inf
        self._guard = guard
        self._looks = looks

    async def answer(self, request: web.Request) -> web.Response:
        if (refused := await self._guard.refusal(request)) is not None:
            return refused
        text = await self._exposition(request.headers.get("Accept", ""))
        return web.Response(body=text.body, headers={"Content-Type": text.content_type})

    async def _exposition(self, accept: str) -> _Exposition:
        """Return the metrics as text that is not older than the request."""
        arrived = time.monotonic()
        encode, content_type = choose_encoder(accept)
        async with self._turn:
            if self._last.began < arrived or self._last.content_type != content_type:
                await asyncio.sleep(max(0.0, self._rests_until - time.monotonic()))
                began = time.monotonic()
                more = [collector for look in self._looks if (collector := look()) is not None]
                # Collect in the event loop, where no value changes meanwhile.
                collected = _CollectedMetrics(list(REGISTRY.collect()), more)
                body = await asyncio.to_thread(encode, collected)
                self._last = _Exposition(content_type, began, body)
                self._rests_until = time.monotonic() + REST * (time.monotonic() - began)
            return self._last
