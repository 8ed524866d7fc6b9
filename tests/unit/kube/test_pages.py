"""Lists in pages that are bounded by their bytes, from a server that answers as an API server does."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from aiohttp import web

from builders.api_server import api_server, no_success
from concertina.kube import access, client
from concertina.kube.client import Client
from concertina.kube.resources import PODS, Raw
from concertina.kube.watch.trainingjobs import list_jobs

PAGE_BYTES = 20_000
SMALL, LARGE = 100, 3 * PAGE_BYTES
"""Approximate number of bytes of an object."""


@dataclass
class ApiServer:
    """API server with objects of these `sizes`, in order. After `expires_after` pages, the list is too old, once."""

    sizes: list[int]
    expires_after: int = 0
    limits: list[int] = field(default_factory=list)
    """Limits that were requested."""

    async def answer(self, request: web.Request) -> web.StreamResponse:
        limit, begin = int(request.query["limit"]), int(request.query.get("continue", "0"))
        self.limits.append(limit)
        if begin and len(self.limits) == self.expires_after + 1:
            return no_success(410, "The provided continue parameter is too old")
        end = min(len(self.sizes), begin + limit)
        items = [
            {"metadata": {"name": str(number), "uid": str(number)}, "data": "x" * self.sizes[number]}
            for number in range(begin, end)
        ]
        metadata = {"resourceVersion": "9", **({"continue": str(end)} if end < len(self.sizes) else {})}
        return web.json_response({"metadata": metadata, "items": items})


@pytest.fixture(autouse=True)
def small_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "PAGE_BYTES", PAGE_BYTES // 2)
    monkeypatch.setattr(client, "MOST_PAGE_BYTES", PAGE_BYTES)


def asking(folder: Path, server: ApiServer, scenario: Callable[[Client], Awaitable[None]]) -> None:
    async def inside() -> None:
        async with (
            api_server(folder, server.answer) as config,
            Client(await access.load(str(config)), give_up_after=0.0) as asked,
        ):
            await scenario(asked)

    asyncio.run(inside())


@pytest.mark.parametrize(
    "sizes",
    [
        [LARGE] * 40,
        [SMALL] * 200 + [LARGE] * 5 + [SMALL] * 200,
        [SMALL, LARGE] * 20,
        [PAGE_BYTES // 3] * 30,
        [SMALL] * 1000,
        [],
    ],
    ids=["large", "large between small", "large beside small", "a few in a page", "small", "none"],
)
def test_pages_are_bounded_by_their_bytes_and_have_every_object_once(tmp_path: Path, sizes: list[int]) -> None:
    names: list[str] = []
    server = ApiServer(sizes)

    async def scenario(asked: Client) -> None:
        async for page, version in asked.pages(PODS):
            assert version == "9"
            assert len(page) <= 1 or sum(len(item["data"]) for item in page) <= PAGE_BYTES
            names.extend(item["metadata"]["name"] for item in page)

    asking(tmp_path, server, scenario)
    assert names == [str(number) for number in range(len(sizes))]
    assert max(server.limits) <= client.MOST_LIMIT


def test_pages_of_small_objects_grow(tmp_path: Path) -> None:
    """Pages grow up to the maximum number of bytes, so that a list takes few requests."""
    server = ApiServer([SMALL] * 400)

    async def scenario(asked: Client) -> None:
        await asked.list_all(PODS)

    asking(tmp_path, server, scenario)
    assert server.limits[:2] == [32, 63]
    assert len(server.limits) < 9


def test_a_page_is_dropped_before_the_next_one_is_asked_for(tmp_path: Path) -> None:
    pages: list[list[Raw]] = []

    async def scenario(asked: Client) -> None:
        async for page, _ in asked.pages(PODS):
            assert not any(pages)
            pages.append(page)

    asking(tmp_path, ApiServer([LARGE] * 4), scenario)
    assert len(pages) == 4


def test_a_list_of_jobs_whose_next_page_is_gone_begins_again(tmp_path: Path) -> None:
    jobs: list[str] = []
    server = ApiServer([SMALL] * 100, expires_after=1)

    async def scenario(asked: Client) -> None:
        listed = await list_jobs(asked, None, lambda obj: jobs.append(obj["metadata"]["name"]))
        assert (listed.version, listed.uids) == ("9", {str(number) for number in range(100)})

    asking(tmp_path, server, scenario)
    assert jobs == [str(number) for number in (*range(32), *range(100))]
