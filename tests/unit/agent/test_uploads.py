"""What the uploader is asked to do."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from pathlib import Path

import concertina_protocol as p
from concertina_agent.core import events as e
from concertina_agent.files.snapshots import SnapshotFiles
from concertina_agent.transfers.uploads import UploadDriver
from concertina_protocol import worker_channel as w
from concertina_protocol.worker_channel.agent_end import AgentEnd

READY = w.StorageState(p.Storage(p.StorageHealth.READY))


def part(folder: Path, round: int) -> e.Ship:
    path = folder / f"shipping-{round}"
    path.write_bytes(b"abc")
    return e.Ship(p.SnapshotId(round, 5, "layout", 1), 0, str(path))


def test_an_upload_that_was_given_up_ends_and_says_nothing_about_storage(tmp_path: Path) -> None:
    async def run() -> None:
        events: list[e.Event] = []
        uploads = UploadDriver(SnapshotFiles(tmp_path), events.append)
        ours, theirs = map(AgentEnd, socket.socketpair())
        serving = asyncio.ensure_future(uploads.serve(ours))
        assert isinstance(await theirs.receive(), w.Probe)
        theirs.send(READY)
        first, second = (part(tmp_path, round) for round in (1, 2))
        uploads.ship(first)
        assert await theirs.receive() == w.Ship(first.id, 0, first.path)
        uploads.abandon(e.KillWorkers(2))
        uploads.ship(second)
        theirs.send(w.Shipped(first.id, 0, "its snapshot was given up"))
        assert await theirs.receive() == w.Ship(second.id, 0, second.path)
        assert events == [e.StorageSeen(READY.storage)]
        serving.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await serving

    asyncio.run(run())
    assert [path.name for path in tmp_path.glob("shipping-*")] == ["shipping-2"]
