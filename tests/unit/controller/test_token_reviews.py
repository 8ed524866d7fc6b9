"""Metrics for accounts of the cluster that may read them: the API server is rarely asked about each token."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from builders.api_server import api_server, no_success
from concertina.controller import serving, token_reviews
from concertina.controller.settings import from_environment
from concertina.controller.token_reviews import TokenReviews, TokenVerdict
from concertina.kube import access
from concertina.kube.client import Client
from concertina.kube.errors import Unreachable
from concertina.kube.resources import Raw
from concertina.local.host import processes

SCRAPER = {"username": "system:serviceaccount:monitoring:prometheus", "uid": "u1", "groups": ["system:authenticated"]}
TENANT = {"username": "system:serviceaccount:team-a:default", "groups": ["system:authenticated"]}
USERS: dict[str, Raw] = {"scraper": SCRAPER, "tenant": TENANT}
"""Users by token."""


class Reviewer:
    """API server that knows two tokens, one of which belongs to an account that may read metrics."""

    def __init__(self) -> None:
        self.asked: Counter[str] = Counter()
        self.allowed = {SCRAPER["username"]}
        self.away = False
        self.access_reviews: list[Raw] = []

    async def answer(self, request: web.Request) -> web.Response:
        if self.away:
            return no_success(503, "away")
        review = await request.json()
        if review["kind"] == "TokenReview":
            token = review["spec"]["token"]
            self.asked[token] += 1
            user = USERS.get(token)
            return web.json_response({"status": {"authenticated": True, "user": user} if user else {}}, status=201)
        self.access_reviews.append(review["spec"])
        return web.json_response({"status": {"allowed": review["spec"]["user"] in self.allowed}}, status=201)


@contextlib.asynccontextmanager
async def reviewing(folder: Path, reviewer: Reviewer, clock: Any = None) -> AsyncIterator[TokenReviews]:
    async with contextlib.AsyncExitStack() as stack:
        reached = await access.load(str(await stack.enter_async_context(api_server(folder, reviewer.answer))))
        client = await stack.enter_async_context(Client(reached, give_up_after=0.0))
        yield TokenReviews(client, clock) if clock else TokenReviews(client)


@pytest.mark.parametrize(
    ("given", "status", "words"),
    [
        ({}, 401, "a token of the cluster"),
        ({"Authorization": "Basic c2NyYXBlcg=="}, 401, "a token of the cluster"),
        ({"Authorization": "Bearer "}, 401, "a token of the cluster"),
        ({"Authorization": "Bearer stranger"}, 401, "rejects this token"),
        ({"Authorization": "Bearer tenant"}, 403, "metrics-reader"),
        ({"Authorization": "Bearer scraper"}, 200, "controller_runtime"),
    ],
)
def test_metrics_are_for_who_may_get_their_url(tmp_path: Path, given: dict[str, str], status: int, words: str) -> None:
    (port,) = processes.free_ports("127.0.0.1", 1)
    settings = from_environment({
        "CONCERTINA_NAMESPACE": "n", "CONCERTINA_MASTER_KEY_SECRET": "s", "CONCERTINA_IMAGE_AGENT": "i",
        "CONCERTINA_METRICS": f"127.0.0.1:{port}", "CONCERTINA_METRICS_ACCESS": "Review",
    })  # fmt: skip

    async def scenario() -> None:
        async with (
            reviewing(tmp_path, Reviewer()) as reviews,
            serving.endpoints(settings, [], reviews),
            aiohttp.ClientSession() as session,
            session.get(f"http://127.0.0.1:{port}/metrics", headers=given) as answer,
        ):
            assert answer.status == status
            assert (answer.headers.get("WWW-Authenticate") == "Bearer") == (status == 401)
            assert words in await answer.text()

    asyncio.run(scenario())


def test_an_answer_holds_for_a_while(tmp_path: Path) -> None:
    now, reviewer = 0.0, Reviewer()

    async def scenario() -> None:
        nonlocal now
        async with reviewing(tmp_path, reviewer, lambda: now) as reviews:
            assert {await reviews.verdict("scraper") for _ in range(9)} == {TokenVerdict.ALLOWED}
            assert {await reviews.verdict("stranger") for _ in range(9)} == {TokenVerdict.UNKNOWN_TOKEN}
            assert reviewer.asked == {"scraper": 1, "stranger": 1}
            (spec,) = reviewer.access_reviews
            assert spec["nonResourceAttributes"] == {"path": "/metrics", "verb": "get"}
            assert (spec["user"], spec["uid"], spec["groups"]) == (
                SCRAPER["username"], SCRAPER["uid"], SCRAPER["groups"],
            )  # fmt: skip
            reviewer.allowed.clear()
            now += token_reviews.ALLOWED_SECONDS - 1
            assert await reviews.verdict("scraper") is TokenVerdict.ALLOWED
            now += 2
            assert await reviews.verdict("scraper") is TokenVerdict.FORBIDDEN, "a permission that is taken away ends"
            reviewer.allowed.add(SCRAPER["username"])
            now += token_reviews.REFUSED_SECONDS + 1
            assert await reviews.verdict("scraper") is TokenVerdict.ALLOWED

    asyncio.run(scenario())


def test_random_tokens_are_bounded_and_push_out_nobody(tmp_path: Path) -> None:
    reviewer = Reviewer()

    async def scenario() -> None:
        async with reviewing(tmp_path, reviewer) as reviews:
            await reviews.verdict("scraper")
            for number in range(token_reviews.REMEMBERED + 10):
                await reviews.verdict(f"random-{number}")
            assert len(reviews._refused) == token_reviews.REMEMBERED
            await reviews.verdict("scraper")
            assert reviewer.asked["scraper"] == 1
            crowd = (reviews.verdict(f"more-{number}") for number in range(3 * token_reviews.WAITING))
            answers = await asyncio.gather(*crowd, return_exceptions=True)
            turned_away = [answer for answer in answers if isinstance(answer, Unreachable)]
            assert len(turned_away) == 2 * token_reviews.WAITING
            same = await asyncio.gather(*(reviews.verdict("tenant") for _ in range(token_reviews.WAITING)))
            assert set(same) == {TokenVerdict.FORBIDDEN}
            assert reviewer.asked["tenant"] <= token_reviews.AT_ONCE

    asyncio.run(scenario())


def test_an_api_server_that_is_away_is_asked_again(tmp_path: Path) -> None:
    reviewer = Reviewer()

    async def scenario() -> None:
        async with reviewing(tmp_path, reviewer) as reviews:
            reviewer.away = True
            with pytest.raises(Unreachable):
                await reviews.verdict("scraper")
            reviewer.away = False
            assert await reviews.verdict("scraper") is TokenVerdict.ALLOWED

    asyncio.run(scenario())
