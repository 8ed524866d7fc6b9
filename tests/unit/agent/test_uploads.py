"""Requests to the uploader."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

import concertina_protocol as p
from concertina_agent.core import events as e
from concertina_agent.files.snapshot_files import SnapshotFiles
from concertina_agent.transfers.uploads import MOST_PUBLICATIONS, UploadDriver
from concertina_protocol import worker_channel as w
from concertina_protocol.worker_channel.agent_end import AgentEnd

Patch = pytest.MonkeyPatch
READY = w.StorageState(p.Storage(p.StorageHealth.READY))


def part(folder: Path, round: int) -> e.Ship:
    path = folder / f"shipping-{round}"
    path.write_bytes(b"abc")
    return e.Ship(p.SnapshotId(round, 5, "layout", 1), 0, str(path))


@contextlib.asynccontextmanager
async def serving(uploads: UploadDriver) -> AsyncIterator[AgentEnd]:
    """Yield the uploader's end of the connection that the driver serves."""
    ours, theirs = map(AgentEnd, socket.socketpair())
    served = asyncio.ensure_future(uploads.serve(ours))
    yield theirs
    served.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await served


def test_an_upload_that_was_given_up_ends_and_says_nothing_about_storage(tmp_path: Path) -> None:
    async def run() -> None:
        events: list[e.Event] = []
        uploads = UploadDriver(SnapshotFiles(tmp_path), events.append)
        first, second = (part(tmp_path, round) for round in (1, 2))
        async with serving(uploads) as theirs:
            assert isinstance(await theirs.receive(), w.Probe)
            theirs.send(READY)
            uploads.ship(first)
            assert await theirs.receive() == w.Ship(first.id, 0, first.path)
            uploads.abandon(e.KillWorkers(2))
            uploads.ship(second)
            theirs.send(w.Shipped(first.id, 0, "its snapshot was discarded"))
            assert await theirs.receive() == w.Ship(second.id, 0, second.path)
            assert events == [e.StorageSeen(READY.storage)]

    asyncio.run(run())
    assert [path.name for path in tmp_path.glob("shipping-*")] == ["shipping-2"]


def test_a_part_counts_though_the_next_one_is_wanted_before_its_answer_is_heard(tmp_path: Path) -> None:
    """The uploader removes the file first, by which a worker knows that it may begin the next checkpoint."""

    async def run() -> None:
        events: list[e.Event] = []
        uploads = UploadDriver(SnapshotFiles(tmp_path), events.append)
        first, second = (part(tmp_path, round) for round in (1, 2))
        async with serving(uploads) as theirs:
            assert isinstance(await theirs.receive(), w.Probe)
            theirs.send(READY)
            uploads.ship(first)
            assert await theirs.receive() == w.Ship(first.id, 0, first.path)
            os.remove(first.path)
            uploads.ship(second)
            theirs.send(w.Shipped(first.id, 0))
            assert await theirs.receive() == w.Ship(second.id, 0, second.path)
            assert events[1:] == [e.PartShipped(p.Part(first.id, 0))]

    asyncio.run(run())


def test_the_folder_is_owned_before_anything_of_a_round_is_written(tmp_path: Path) -> None:
    """The agent asks once whether this job owns the folder, and not again in later rounds."""

    async def run() -> None:
        uploads = UploadDriver(SnapshotFiles(tmp_path), lambda event: None)
        async with serving(uploads) as theirs:
            assert await theirs.receive() == w.Probe(owned=False, living=None)
            theirs.send(READY)
            uploads.begin(round_that_starts(1, ("old",)))
            uploads.ship(part(tmp_path, 1))
            assert await theirs.receive() == w.Probe(owned=False, living=("old",))
            theirs.send(w.StorageState(READY.storage, owned=True))
            assert isinstance(await theirs.receive(), w.Ship)
            theirs.send(w.Shipped(p.SnapshotId(1, 5, "layout", 1), 0))
            uploads.begin(round_that_starts(2, ()))
            uploads.ship(part(tmp_path, 2))
            assert isinstance(await theirs.receive(), w.Ship)

    asyncio.run(run())


def round_that_starts(round: int, living: tuple[str, ...]) -> e.StartRound:
    assign = p.Assign("u", round, "claim", (), "", p.Restore(p.RestoreSource.FRESH), living=living)
    return e.StartRound(assign, 0)


class Storage:
    """Uploader whose checks succeed, and which answers each kind of work with a given result."""

    def __init__(self, uploads: UploadDriver, publishes: bool, ships: bool) -> None:
        self._uploads, self._publishes, self._ships = uploads, publishes, ships
        self.asked: list[str] = []

    async def serve(self, until: int) -> None:
        """Serve until there were this number of requests for work."""
        async with serving(self._uploads) as theirs:
            while len(self.asked) < until:
                request = await theirs.receive()
                if isinstance(request, w.Probe):
                    theirs.send(READY)
                    continue
                assert isinstance(request, (w.Publish, w.Ship))
                self.asked.append(f"{type(request).__name__} {request.id.step}")
                if isinstance(request, w.Publish):
                    durable = p.Durable("u", 1, request.id.step, "uri")
                    theirs.send(w.Published(request.id, *((durable, "not swept") if self._publishes else (None, "no"))))
                else:
                    theirs.send(w.Shipped(request.id, request.shard, "" if self._ships else "no"))


def at_once(monkeypatch: Patch) -> list[float]:
    """Shorten the driver's waits, and return the waits that it has logged, in seconds."""
    waits: list[float] = []

    def log(event: str, **fields: object) -> None:
        if event == "storage_trouble":
            waits.append(float(str(fields["again_in"])))

    monkeypatch.setattr("concertina_agent.transfers.uploads.BACKOFF", (0.001, 0.002, 0.003))
    monkeypatch.setattr("concertina_agent.transfers.uploads.log_event", log)
    return waits


def test_a_publication_that_fails_again_and_again_holds_up_no_part(tmp_path: Path, monkeypatch: Patch) -> None:
    waits = at_once(monkeypatch)
    uploads = UploadDriver(SnapshotFiles(tmp_path), lambda event: None)
    uploads.publish(e.Publish(p.SnapshotId(1, 3, "layout", 1), False))
    uploads.ship(part(tmp_path, 1))
    storage = Storage(uploads, publishes=False, ships=True)
    asyncio.run(storage.serve(until=6))
    assert storage.asked == ["Publish 3", "Ship 5", "Publish 3", "Publish 3", "Publish 3", "Publish 3"]
    assert waits[:4] == [0.001, 0.001, 0.002, 0.003], "from one piece of work to the next that goes well"


def publication(step: int) -> e.Publish:
    return e.Publish(p.SnapshotId(1, step, "layout", 1), False)


@pytest.mark.parametrize(("publishes", "tries"), [(True, 1), (False, MOST_PUBLICATIONS)])
def test_no_checkpoint_is_left_out_for_a_newer_one_unless_it_fails_again_and_again(
    tmp_path: Path, monkeypatch: Patch, publishes: bool, tries: int
) -> None:
    """The older one may be the best checkpoint of the run."""
    at_once(monkeypatch)
    uploads = UploadDriver(SnapshotFiles(tmp_path), lambda event: None)
    uploads.publish(publication(3))
    uploads.publish(publication(4))
    storage = Storage(uploads, publishes=publishes, ships=True)
    asyncio.run(storage.serve(until=tries + 1))
    assert storage.asked == ["Publish 3"] * tries + ["Publish 4"]


def test_parts_that_fail_hold_up_no_publication(tmp_path: Path, monkeypatch: Patch) -> None:
    at_once(monkeypatch)
    uploads = UploadDriver(SnapshotFiles(tmp_path), lambda event: None)
    uploads.publish(e.Publish(p.SnapshotId(1, 3, "layout", 1), False))
    uploads.ship(part(tmp_path, 1))
    storage = Storage(uploads, publishes=False, ships=False)
    asyncio.run(storage.serve(until=4))
    assert storage.asked == ["Publish 3", "Ship 5", "Publish 3", "Ship 5"]


def test_a_checkpoint_counts_though_no_older_one_could_be_deleted(tmp_path: Path, monkeypatch: Patch) -> None:
    waits, events = at_once(monkeypatch), list[e.Event]()
    uploads = UploadDriver(SnapshotFiles(tmp_path), events.append)
    id = p.SnapshotId(1, 3, "layout", 1)
    uploads.publish(e.Publish(id, False))
    uploads.ship(part(tmp_path, 1))
    storage = Storage(uploads, publishes=True, ships=True)
    asyncio.run(storage.serve(until=2))
    assert storage.asked == ["Publish 3", "Ship 5"]
    assert e.PublishDone(id, p.Durable("u", 1, 3, "uri"), "") in events
    assert waits == []
