"""Volume of a replica with exactly the size that is checked for, in a round after a failure.

python tight_volume.py STORY FOLDER (of ROOM bytes). The files are the agent's and the worker's own.
"""

import asyncio
import dataclasses
import io
import mmap
import os
import socket
import sys
import threading
import time
import zlib
from pathlib import Path

import concertina_protocol as p
from concertina.plan.state import snapshot_memory
from concertina_agent.core import events as e
from concertina_agent.core.snapshot_index import SnapshotIndex
from concertina_agent.files import shards
from concertina_agent.files.snapshot_files import SnapshotFiles
from concertina_agent.transfers.uploads import UploadDriver
from concertina_protocol import worker_channel as w
from concertina_protocol.sidecar import COPY_SLOTS, SNAPSHOT_SLOTS
from concertina_state import file_space, uploader
from concertina_state.errors import InvalidInput
from concertina_state.snapshots import Snapshots, TakenSnapshot
from programs.endless import State

PLACES = SNAPSHOT_SLOTS + snapshot_memory.SHIPPING + COPY_SLOTS
STATE = State(250_000)
BESIDES = STATE.layout.size // 2
ROOM = PLACES * STATE.layout.size + BESIDES
"""Size of the volume in bytes: as `snapshot_memory.needed` computes it, with a header of the same size and no
program."""


class Replica:
    """Agent and worker of a replica, without the messages between them."""

    def __init__(self, volume: Path) -> None:
        self.files, self.index = SnapshotFiles(volume), SnapshotIndex()
        self.uploads = UploadDriver(self.files, lambda event: None)
        self.begin(1)

    def begin(self, round: int) -> None:
        self.round = round
        self.worker = Snapshots(self.files.round_folder(round) / "shard-0", STATE)

    def take(self, step: int) -> TakenSnapshot:
        id = p.SnapshotId(self.round, step, "layout", 2)
        taken = self.worker.take(dataclasses.replace(STATE.at(step), id=id))
        self.index.committed(id, 0)
        self.worker.make_room()
        return taken

    def copy(self, taken: TakenSnapshot) -> None:
        """Copy a peer's snapshot of the same step, and retry if there is no room yet, as the copier does."""
        content = taken.path.read_bytes()
        header = p.ShardHeader(taken.id, 1, len(content), zlib.crc32(content))
        path = self.files.copy_slot(header.id, header.shard)
        while True:
            try:
                checksum = shards.fill(path, header, io.BytesIO(content).readinto)
                break
            except OSError:
                time.sleep(0.01)
        shards.commit(path, header, [checksum])
        self.index.copied(header.id, header.shard)

    def keep(self, *ids: p.SnapshotId) -> None:
        self.files.drop(self.index.keep(self.round, *ids))


def hang(ship: w.Ship) -> None:
    """Start an upload that hangs until this process ends, and return once it is under way."""
    storage = socket.create_server(("127.0.0.1", 0))
    os.environ |= {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{storage.getsockname()[1]}", "AWS_REGION": "here",
        "AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret",
    }  # fmt: skip
    shipping = (ship, uploader.Destination("s3://train/a"), "uid")
    threading.Thread(target=uploader.answer, args=shipping, daemon=True).start()
    storage.accept()[0].detach()  # The connection is open, and never answered.


async def an_upload_hangs(volume: Path) -> None:
    """Play a round while an upload of the previous round hangs in storage."""
    replica = Replica(volume)
    shipped = replica.take(1)
    ship = e.Ship(shipped.id, 0, str(replica.worker.link_for_shipping(shipped)))
    replica.uploads.ship(ship)
    hang(w.Ship(ship.id, ship.shard, ship.path))
    for step in range(2, 6):
        replica.worker.complete = step - 3
        last = replica.take(step)
        replica.copy(last)

    replica.uploads.abandon(e.KillWorkers(2))
    del replica.worker
    replica.index.replace(replica.files.scan())
    replica.begin(2)
    replica.keep(last.id, replica.index.before(2, p.Restore("Memory", last.id.step, last.id)))
    first = replica.take(6)
    replica.keep(last.id)  # All ranks have restored.
    replica.copy(first)
    replica.worker.link_for_shipping(first)  # Parts of the previous round that are not in storage yet are due at once.
    second = replica.take(7)
    replica.keep()  # The first snapshot is complete.
    replica.copy(second)
    for step in range(8, 12):
        replica.worker.complete = replica.worker.count - 2
        replica.copy(replica.take(step))
    os._exit(0)  # A thread is still uploading.


async def a_peer_s_copy_has_room(volume: Path) -> None:
    """Play a round in which a file is allocated ahead only if there is room for a peer's copy."""
    rest, size = volume / "rest", STATE.layout.size
    with rest.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, free(volume) - 2 * size + mmap.PAGESIZE)
    worker = Snapshots(volume / "snapshots" / "round-2" / "shard-0", STATE)
    assert worker._making is not None
    assert worker._making.result() is None
    assert free(volume) > size
    worker.take(STATE.at(1))
    rest.unlink()
    before = free(volume)
    worker.make_room()
    assert worker._making.result() is not None
    assert free(volume) == before - -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
    worker.make_room()
    worker.take(STATE.at(2))
    assert before - free(volume) < size + 4 * mmap.PAGESIZE, "it was taken"


def free(volume: Path) -> int:
    """Return the free bytes."""
    status = os.statvfs(volume)
    return status.f_bavail * status.f_frsize


class SlowRelease:
    """Clock that advances six seconds each time that the free space is checked, when one more file is freed."""

    def __init__(self, files: list[Path]) -> None:
        self.now, self.files = 0.0, files

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += 6.0
        if self.files:
            self.files.pop().unlink()


async def memory_comes_back_slowly(volume: Path) -> None:
    """Play slow release of memory twice. At the second time it ends before there is enough.

    Raises:
        AssertionError: If that does not happen in time.
    """
    files = [volume / f"freed-{number}" for number in range(2 * PLACES)]
    for file in files:
        file.write_bytes(bytes(STATE.layout.size // 2))
    (volume / "rest").write_bytes(bytes(BESIDES - STATE.layout.size // 8))
    file_space.time = SlowRelease(files[:5])
    worker = Snapshots(volume / "snapshots" / "round-2" / "shard-0", STATE)
    worker.take(STATE.at(1))
    worker.take(STATE.at(2))
    assert file_space.time.now == 4 * 6.0, "each as soon as there is room"
    try:
        worker.take(STATE.at(3))
    except InvalidInput:
        assert file_space.time.now == 5 * 6.0 + 12.0, "no more came for more than ten seconds"
    else:
        raise AssertionError("there was no room")


if __name__ == "__main__":
    asyncio.run(globals()[sys.argv[1]](Path(sys.argv[2])))
