"""Transfer of a shard from another agent, for `checkpoint.py`.

The agent that has the shard is a real agent in a separate process. The other end is the code with which an agent pulls
a shard, over mutual TLS on the loopback interface. For comparison, the same bytes are sent through a plain socket.
"""

import asyncio
import base64
import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import concertina_protocol as p
from concertina.agents.authority import Authority
from concertina_agent.core import events as e
from concertina_agent.files.snapshot_files import SnapshotFiles
from concertina_agent.net import tls
from concertina_agent.net.wire import Connector
from concertina_agent.runtime.nursery import TaskGroup
from concertina_agent.transfers.copies import Peers

UID, HOLDER, ME = "bench", "holder", "me"
GIVE_UP = 60.0


class Pulling:
    """The two agents of a transfer, and the shard that the receiving agent pulls from the other."""

    def __init__(self, id: p.SnapshotId, address: str, identity: Path, volume: Path) -> None:
        self._id, self._identity, self._volume = id, identity, volume
        there = p.Member(HOLDER, "i", address, 0, 1)
        here = p.Member(ME, "i", "127.0.0.1:1", 1, 1)
        restore = p.Restore(p.RestoreSource.MEMORY, id.step, id, {"0": (HOLDER,)})
        self._assign = p.Assign(UID, id.round + 1, "claim", (there, here), "", restore)

    def pull(self) -> Path:
        """Pull the shard in the same way as an agent whose worker requested it, and return the verified file."""
        return asyncio.run(self._pull())

    async def _pull(self) -> Path:
        connector = Connector(tls.client_context(self._identity), UID)
        peers = Peers(UID, ME, connector, SnapshotFiles(self._volume), lambda event: None, TaskGroup())
        peers.begin(e.StartRound(self._assign, 1))
        return await peers.fetch(self._id, 0)

    def forget(self) -> None:
        SnapshotFiles(self._volume).forget_fetched()


@contextlib.contextmanager
def holder(folder: Path, volume: Path, id: p.SnapshotId) -> Iterator[Pulling]:
    """Yield a receiver for shard 0 of the given snapshot. An agent with that shard runs while the block runs."""
    identity = folder / "identity"
    identity.mkdir()
    for name, content in Authority(b"k" * 32, UID, time.time()).secret_data().items():
        (identity / name).write_bytes(base64.b64decode(content))
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    environment = {
        **os.environ, "CONCERTINA_JOB": "bench/bench", "CONCERTINA_UID": UID, "CONCERTINA_REPLICA": HOLDER,
        "CONCERTINA_POD_IP": "127.0.0.1", "CONCERTINA_PORT": str(port), "CONCERTINA_VOLUME": str(volume),
        "CONCERTINA_IDENTITY": str(identity),
    }  # fmt: skip
    with (folder / "agent.log").open("wb") as log:
        agent = subprocess.Popen(
            [sys.executable, "-m", "concertina_agent.main", "run", "--", "sleep", "infinity"],
            env=environment, stdout=log, stderr=log,
        )  # fmt: skip
    try:
        _wait_until_it_listens(port, agent)
        yield Pulling(id, f"127.0.0.1:{port}", identity, folder / "other")
    finally:
        agent.kill()
        agent.wait()


def _wait_until_it_listens(port: int, agent: "subprocess.Popen[bytes]") -> None:
    give_up = time.monotonic() + GIVE_UP
    while True:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), GIVE_UP):
            return
        if agent.poll() is not None or time.monotonic() > give_up:
            raise RuntimeError("the agent that holds the snapshot did not start")
        time.sleep(0.05)


def plain_copy(path: Path, target: memoryview) -> None:
    """Copy a file's bytes into allocated memory through a plain TCP connection on the loopback interface."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        sender = threading.Thread(target=_send, args=(listening.getsockname(), path))
        sender.start()
        connection, _ = listening.accept()
        with connection:
            while target and (count := connection.recv_into(target)):
                target = target[count:]
        sender.join()
    assert not target


def _send(address: tuple[str, int], path: Path) -> None:
    with socket.create_connection(address) as connection, path.open("rb") as file:
        connection.sendfile(file)
