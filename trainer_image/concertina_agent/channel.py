"""The unix socket on which workers and the uploader of this replica talk to the agent (`worker_channel`)."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import struct
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Optional

from concertina_agent import events as e
from concertina_agent import worker_channel as w
from concertina_agent.copies import Peers
from concertina_agent.local_workers import LocalWorker, LocalWorkers
from concertina_agent.log import log
from concertina_agent.protocol import MAX_LINE, ProtocolError
from concertina_agent.snapshots import Damaged, Snapshots
from concertina_agent.uploads import Uploads

MAX_SOCKET_PATH = 100
"""Linux takes 107 characters."""


class ChannelServer:
    def __init__(
        self,
        volume: Path,
        local: LocalWorkers,
        peers: Peers,
        uploads: Uploads,
        snapshots: Snapshots,
        emit: Callable[[e.Event], None],
    ) -> None:
        self._local, self._peers, self._uploads, self._snapshots, self._emit = local, peers, uploads, snapshots, emit
        self.path = str(volume.absolute() / "agent.sock")
        if len(self.path) > MAX_SOCKET_PATH:
            self.path = os.path.join(tempfile.mkdtemp(prefix="concertina-"), "agent.sock")
        self._server: Optional[asyncio.AbstractServer] = None

    async def start(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.path)
        self._server = await asyncio.start_unix_server(self._connected, self.path, limit=MAX_LINE)
        os.chmod(self.path, 0o600)

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.path)

    def environment(self, round: int) -> dict[str, str]:
        """For the workers of a round."""
        folder = self._snapshots.round_folder(round)
        return {"CONCERTINA_SOCKET": self.path, "CONCERTINA_SNAPSHOTS": str(folder)}

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        end = w.AgentEnd(reader, writer)
        try:
            first = await end.receive()
            if isinstance(first, w.UploaderHello):
                await self._uploads.serve(end)
            elif isinstance(first, w.Hello):
                worker = await self._local.of(_peer_pid(writer))
                if worker is not None and worker.rank == first.rank:
                    await self._serve(worker, first, end)
        except ProtocolError as error:
            log("channel_error", error=str(error))
        finally:
            end.close()

    async def _serve(self, worker: LocalWorker, hello: w.Hello, end: w.AgentEnd) -> None:
        world = sum(member.workers for member in worker.assign.members)
        end.send(w.Start(worker.assign.restore, world, worker.assign.uid))
        self._local.attach(worker, end)
        self._emit(e.WorkerSaid(worker.round, worker.rank, hello))
        try:
            while (message := await end.receive()) is not None:
                await self._take(worker, message, end)
        finally:
            worker.channel_closed.set()

    async def _take(self, worker: LocalWorker, message: w.Message, end: w.AgentEnd) -> None:
        if isinstance(message, w.Fetch):
            try:
                end.send(w.Fetched(path=str(await self._peers.fetch(message.id, message.shard))))
            except (OSError, Damaged) as error:
                end.send(w.Fetched(error=str(error)))
        elif isinstance(message, w.FetchHeader):
            try:
                end.send(w.FetchedHeader(header=await self._peers.header(message.id, message.shard)))
            except (OSError, Damaged) as error:
                end.send(w.FetchedHeader(error=str(error)))
        else:
            if isinstance(message, w.Committed):
                self._snapshots.committed(Path(message.path))
            self._emit(e.WorkerSaid(worker.round, worker.rank, message))


def _peer_pid(writer: asyncio.StreamWriter) -> int:
    """The kernel's word for who is at the other end."""
    connection = writer.get_extra_info("socket")
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return int(struct.unpack("3i", credentials)[0])
