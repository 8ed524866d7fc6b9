"""`helm test`: it passes if an operator is seen to renew its Lease, and otherwise fails with a clear message."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any, cast

import pytest

from concertina.controller import installation_check
from concertina.controller.settings import from_environment
from concertina.kube.client import Client
from concertina.kube.errors import Forbidden, NotFound
from concertina.kube.resources import LEASES, Raw, Resource

SETTINGS = from_environment(
    {"CONCERTINA_NAMESPACE": "sys", "CONCERTINA_MASTER_KEY_SECRET": "k", "CONCERTINA_IMAGE_AGENT": "a"}
)


class Server:
    """API server whose Lease has these states, one for each read; the last one stays."""

    def __init__(self, *states: tuple[str, str] | None) -> None:
        self.states = list(states)
        self.listed: list[str | None] = []

    async def get(self, resource: Resource, namespace: str, name: str) -> Raw:
        assert (resource, namespace, name) == (LEASES, "sys", SETTINGS.lease)
        state = self.states.pop(0) if len(self.states) > 1 else self.states[0]
        if state is None:
            raise NotFound(404, "NotFound", "there is none")
        return {"spec": {"holderIdentity": state[0], "renewTime": state[1]}}

    async def pages(self, _: Resource, namespace: str | None, chunk: int) -> AsyncIterator[tuple[list[Any], str]]:
        self.listed.append(namespace)
        if namespace == "shut":
            raise Forbidden(403, "Forbidden", "not there")
        yield [{}] * chunk, "1"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installation_check, "RENEW_SECONDS", 0.002)
    monkeypatch.setattr(installation_check, "LIMIT_SECONDS", 5.0)


def checked(server: Server, *namespaces: str) -> list[str]:
    settings = replace(SETTINGS, watch_namespaces=namespaces)
    return asyncio.run(installation_check.check(settings, cast(Client, server)))


def test_a_leader_is_seen_to_renew_and_each_namespace_is_listed() -> None:
    server = Server(None, ("one", "1"), ("one", "1"), ("", "2"), ("two", "3"))
    leads, *lists = checked(server, "a", "b")
    assert leads.startswith("two leads")
    assert server.listed == ["a", "b"]
    assert len(lists) == 2
    assert "all namespaces" in checked(Server(("one", "1"), ("one", "2")))[-1]


@pytest.mark.parametrize("state", [None, ("", "1"), ("gone", "1")])
def test_a_lease_that_nobody_renews_is_no_leader(
    state: tuple[str, str] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(installation_check, "LIMIT_SECONDS", 0.05)
    with pytest.raises(TimeoutError):
        checked(Server(state))


def test_a_permission_that_is_missing_fails_the_check() -> None:
    with pytest.raises(Forbidden):
        checked(Server(("one", "1"), ("one", "2")), "shut")
