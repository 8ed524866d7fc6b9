"""The package that talks to Kubernetes, on a real API server: client, reflector and Lease."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from builders.until import until_async
from concertina.kube import access
from concertina.kube.client import Client
from concertina.kube.errors import Conflict, Invalid, NotFound, TestFailed, Unreachable
from concertina.kube.reflector import Reflector
from concertina.kube.resources import LEASES, PODS, SECRETS, TRAINING_JOBS, Raw
from concertina.kube.watch.lease import Lease, LeaseLost
from concertina.local.cluster import LocalCluster

GIVE_UP = 60.0


@contextlib.asynccontextmanager
async def connected(cluster: LocalCluster, give_up_after: float = 30.0) -> AsyncIterator[Client]:
    async with Client(await access.load(str(cluster.kubeconfig)), give_up_after) as client:
        yield client


def run(cluster: LocalCluster, scenario: Callable[[Client], Awaitable[None]]) -> None:
    async def inside() -> None:
        async with asyncio.timeout(GIVE_UP), connected(cluster) as client:
            await scenario(client)

    asyncio.run(inside())


def secret(name: str, **data: str) -> Raw:
    return {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": name}, "stringData": data}


def test_objects_are_made_read_changed_and_deleted(cluster: LocalCluster, namespace: str) -> None:
    async def scenario(client: Client) -> None:
        made = await client.create(SECRETS, namespace, secret("a", x="1"))
        with pytest.raises(Conflict, match="already exists"):
            await client.create(SECRETS, namespace, secret("a"))
        assert (await client.get(SECRETS, namespace, "a"))["metadata"]["uid"] == made["metadata"]["uid"]
        changed = await client.patch(SECRETS, namespace, "a", {"metadata": {"labels": {"b": "c"}}})
        assert changed["metadata"]["labels"] == {"b": "c"}
        with pytest.raises(Conflict):
            await client.delete(SECRETS, namespace, "a", uid="another")
        await client.delete(SECRETS, namespace, "a", uid=made["metadata"]["uid"])
        assert await client.delete(SECRETS, namespace, "a") is None
        with pytest.raises(NotFound, match='"a" not found'):
            await client.get(SECRETS, namespace, "a")

    run(cluster, scenario)


def test_a_list_is_read_in_chunks(cluster: LocalCluster, namespace: str) -> None:
    async def scenario(client: Client) -> None:
        await asyncio.gather(*(client.create(SECRETS, namespace, secret(f"s{n}")) for n in range(7)))
        before = client.requests
        items, version = await client.list_all(SECRETS, namespace, chunk=3)
        assert {item["metadata"]["name"] for item in items} == {f"s{n}" for n in range(7)}
        assert client.requests - before == 3
        assert int(version) > 0

    run(cluster, scenario)


@pytest.mark.usefixtures("installed")
def test_a_test_that_fails_is_told_from_a_schema_that_is_broken(cluster: LocalCluster, namespace: str) -> None:
    container = {"name": "trainer", "image": "i", "command": ["x"]}
    spec = {"suspend": True, "template": {"spec": {"containers": [container]}}}
    head = {"apiVersion": "concertina.dev/v1beta1", "kind": "TrainingJob"}
    job = {**head, "metadata": {"name": "a"}, "spec": spec}
    unknown = {**head, "metadata": {"name": "b"}, "spec": {**spec, "no": 1}}

    async def scenario(client: Client) -> None:
        await client.create(TRAINING_JOBS, namespace, job)
        test = {"op": "test", "path": "/metadata/uid", "value": "another"}
        change = {"op": "replace", "path": "/spec/replicas", "value": 2}
        with pytest.raises(TestFailed):
            await client.patch(TRAINING_JOBS, namespace, "a", [test, change])
        with pytest.raises(Invalid, match="replicas") as caught:
            await client.patch(TRAINING_JOBS, namespace, "a", [{**change, "value": -1}])
        assert not isinstance(caught.value, TestFailed)
        with pytest.raises(Invalid, match="unknown field"):
            await client.create(TRAINING_JOBS, namespace, unknown, strict=True)

    run(cluster, scenario)


def test_nobody_answers(cluster: LocalCluster) -> None:
    async def scenario() -> None:
        async with connected(cluster, give_up_after=1.0) as client:
            client.access._configuration.host = "https://127.0.0.1:1"
            with pytest.raises(Unreachable, match=r"https://127\.0\.0\.1:1 can't be reached"):
                await client.get(SECRETS, "default", "a")

    asyncio.run(scenario())


def test_no_kubeconfig_says_what_to_do(tmp_path: Any) -> None:
    with pytest.raises(access.NoAccess, match="concertina local up"):
        asyncio.run(access.load(str(tmp_path / "none")))


class Heard:
    """Differences that a reflector told."""

    def __init__(self) -> None:
        self.changes: list[tuple[str | None, str | None]] = []

    def __call__(self, old: str | None, new: str | None) -> None:
        self.changes.append((old, new))


def described(obj: Raw) -> str:
    return f"{obj['metadata']['name']}={obj['metadata'].get('labels', {}).get('v', '')}"


def test_a_reflector_follows_and_what_it_missed_is_made_up_for(cluster: LocalCluster, namespace: str) -> None:
    async def scenario(client: Client) -> None:
        await client.create(SECRETS, namespace, secret("kept"))
        await client.create(SECRETS, namespace, secret("missed"))
        heard = Heard()
        reflector = Reflector(client, SECRETS, described, heard, namespace)
        following = asyncio.create_task(reflector.run())
        await reflector.synced.wait()
        assert set(heard.changes) == {(None, "kept="), (None, "missed=")}
        heard.changes.clear()
        await client.patch(SECRETS, namespace, "kept", {"metadata": {"labels": {"v": "1"}}})
        await until_async(lambda: heard.changes == [("kept=", "kept=1")], "the change", lambda: heard.changes)
        following.cancel()
        # Away: a deletion nobody tells of, and a write of our own that the next list may not have yet.
        await client.delete(SECRETS, namespace, "missed")
        heard.changes.clear()
        following = asyncio.create_task(reflector.run())
        await until_async(
            lambda: heard.changes == [("missed=", None)], "the deletion that was missed", lambda: heard.changes
        )
        reflector.assume(await client.create(SECRETS, namespace, secret("own")))
        assert (None, "own=") in heard.changes
        await until_async(
            lambda: sorted(reflector.values()) == ["kept=1", "own="],
            "what is assumed",
            lambda: list(reflector.values()),
        )
        await client.delete(SECRETS, namespace, "own")
        await until_async(
            lambda: sorted(reflector.values()) == ["kept=1"], "what is listed again", lambda: list(reflector.values())
        )
        following.cancel()

    run(cluster, scenario)


def test_a_pod_that_is_gone_is_not_remembered_by_a_late_answer(cluster: LocalCluster, namespace: str) -> None:
    async def scenario(client: Client) -> None:
        heard = Heard()
        reflector = Reflector(client, SECRETS, described, heard, namespace)
        following = asyncio.create_task(reflector.run())
        await reflector.synced.wait()
        late = await client.create(SECRETS, namespace, secret("own"))
        await until_async(lambda: (None, "own=") in heard.changes, "a Secret of its own", lambda: heard.changes)
        await client.delete(SECRETS, namespace, "own")
        await until_async(lambda: not list(reflector.values()), "an empty list", lambda: list(reflector.values()))
        reflector.assume(late)
        assert not list(reflector.values())
        following.cancel()

    run(cluster, scenario)


def test_of_two_that_want_the_lease_one_gets_it_and_the_other_after_its_release(
    cluster: LocalCluster, namespace: str
) -> None:
    async def scenario(client: Client) -> None:
        first, second = (Lease(client, namespace, "l", name, renew_every=0.1) for name in ("first", "second"))
        await first.acquire()
        waiting = asyncio.create_task(second.acquire())
        keeping = asyncio.create_task(first.keep())
        await asyncio.sleep(1.0)
        assert first.held
        assert not waiting.done()
        assert not keeping.done()
        keeping.cancel()
        await first.release()
        await waiting
        assert second.held
        assert not first.held

    run(cluster, scenario)


def test_a_lease_that_is_not_renewed_is_taken_and_its_holder_notices(cluster: LocalCluster, namespace: str) -> None:
    async def scenario(client: Client) -> None:
        first = Lease(client, namespace, "l", "first", duration=1, renew_every=0.1)
        second = Lease(client, namespace, "l", "second", duration=1, renew_every=0.1)
        await first.acquire()
        await second.acquire()  # the first one sleeps
        assert not first.held
        with pytest.raises(LeaseLost):
            await first.keep()
        lease = await client.get(LEASES, namespace, "l")
        assert lease["spec"]["holderIdentity"] == "second"
        assert lease["spec"]["leaseTransitions"] == 1

    run(cluster, scenario)


def test_another_clock_does_not_matter_to_the_lease(cluster: LocalCluster, namespace: str) -> None:
    """renewTime of a machine whose clock is years behind: the Lease is measured by one's own clock all the same."""

    async def scenario(client: Client) -> None:
        first = Lease(client, namespace, "l", "first", renew_every=0.1)
        await first.acquire()
        await client.patch(LEASES, namespace, "l", {"spec": {"renewTime": "2001-01-01T00:00:00.000000Z"}})
        second = Lease(client, namespace, "l", "second", renew_every=0.1)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(second.acquire(), 1.0)
        assert not second.held

    run(cluster, scenario)


def test_logs_are_streamed(cluster: LocalCluster, namespace: str) -> None:
    async def scenario(client: Client) -> None:
        command = ["python3", "-uc", "import time\nfor n in range(3): print('line', n); time.sleep(0.2)"]
        container = {"name": "c", "image": "concertina/trainer:test", "command": command}
        pod = {"metadata": {"name": "p"}, "spec": {"restartPolicy": "Never", "containers": [container]}}
        await client.create(PODS, namespace, pod)

        async def phase() -> str:
            return str((await client.get(PODS, namespace, "p"))["status"].get("phase"))

        while await phase() not in ("Running", "Succeeded"):
            await asyncio.sleep(0.05)
        lines = [line async for line in client.logs(namespace, "p", follow=True)]
        assert lines == ["line 0", "line 1", "line 2"]
        while await phase() != "Succeeded":
            await asyncio.sleep(0.05)
        assert [line async for line in client.logs(namespace, "p", tail=1)] == ["line 2"]

    run(cluster, scenario)
