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

from concertina_agent.core import events as e
from concertina_agent.files.snapshots import Snapshots
from concertina_agent.log import log
from concertina_agent.transfers.copies import Peers
from concertina_agent.transfers.uploads import Uploads
from concertina_agent.workers.local_workers import LocalWorker, LocalWorkers
from concertina_protocol import MAX_LINE, Durable
from concertina_protocol import worker_channel as w
from concertina_protocol.sidecar import Damaged
from concertina_protocol.typed_json import ProtocolError

MAX_SOCKET_PATH = 100
"""Linux takes 107 characters."""


class SocketEnd(w.AgentEnd):
    """The agent's end on a plain socket. asyncio's streams give up what has arrived when a write fails, and a worker's
    last words (Done) often cross a message to it."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self._socket, self._loop = connection, asyncio.get_running_loop()
        self._arrived = self._leaving = b""
        self._closed = False

    @property
    def peer_pid(self) -> int:
        """The kernel's word for who is at the other end."""
        size = struct.calcsize("3i")
        return int(struct.unpack("3i", self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))[0])

    async def receive(self) -> Optional[w.Message]:
        while b"\n" not in self._arrived:
            try:
                data = await self._loop.sock_recv(self._socket, 1 << 16)
            except OSError:
                data = b""
            if not data:
                return None
            self._arrived += data
            if len(self._arrived) > 2 * MAX_LINE:
                raise ProtocolError(f"a line over the limit of {MAX_LINE} bytes")
        line, _, self._arrived = self._arrived.partition(b"\n")
        return w.decode(line)

    def send(self, message: w.Message) -> None:
        """Buffered; what is sent to a process that is gone is dropped (its exit is noticed elsewhere)."""
        if not self._closed:
            self._leaving += w.encode(message)
            self._flush()

    def close(self) -> None:
        """`receive` ends; whoever waits in it then calls `release`."""
        if self._closed:
            return
        self._closed = True
        self._loop.remove_writer(self._socket)
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def release(self) -> None:
        self.close()
        self._socket.close()

    def _flush(self) -> None:
        try:
            while self._leaving:
                self._leaving = self._leaving[self._socket.send(self._leaving) :]
        except BlockingIOError:
            self._loop.add_writer(self._socket, self._flush)
            return
        except OSError:
            self._leaving = b""
        self._loop.remove_writer(self._socket)


class ChannelServer:
    def __init__(
        self,
        volume: Path,
        local: LocalWorkers,
        peers: Peers,
        uploads: Uploads,
        snapshots: Snapshots,
        emit: Callable[[e.Event], None],
        latest: Callable[[], Optional[Durable]],
    ) -> None:
        """`latest`: what LATEST names, as far as it is known."""
        self._latest = latest
        self._local, self._peers, self._uploads, self._snapshots, self._emit = local, peers, uploads, snapshots, emit
        self.path = str(volume.absolute() / "agent.sock")
        if len(self.path) > MAX_SOCKET_PATH:
            self.path = os.path.join(tempfile.mkdtemp(prefix="concertina-"), "agent.sock")
        self._listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.path)
        self._listening.bind(self.path)
        os.chmod(self.path, 0o600)
        self._listening.listen(256)
        self._listening.setblocking(False)
        asyncio.get_running_loop().add_reader(self._listening, self._accept)

    def close(self) -> None:
        asyncio.get_running_loop().remove_reader(self._listening)
        self._listening.close()
        for task in self._tasks:
            task.cancel()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.path)

    def environment(self, round: int) -> dict[str, str]:
        """For the workers of a round."""
        folder = self._snapshots.round_folder(round)
        return {"CONCERTINA_SOCKET": self.path, "CONCERTINA_SNAPSHOTS": str(folder)}

    def _accept(self) -> None:
        with contextlib.suppress(BlockingIOError):
            end = SocketEnd(self._listening.accept()[0])
            task = asyncio.get_running_loop().create_task(self._connected(end))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _connected(self, end: SocketEnd) -> None:
        try:
            first = await end.receive()
            if isinstance(first, w.UploaderHello):
                await self._uploads.serve(end)
            elif isinstance(first, w.Hello):
                worker = await self._local.of(end.peer_pid)
                if worker is not None and worker.rank == first.rank:
                    await self._serve(worker, first, end)
        except ProtocolError as error:
            log("channel_error", error=str(error))
        finally:
            end.release()

    async def _serve(self, worker: LocalWorker, hello: w.Hello, end: w.AgentEnd) -> None:
        world = sum(member.workers for member in worker.assign.members)
        assign = worker.assign
        end.send(w.Start(assign.restore, world, assign.uid, self._latest(), assign.history))
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
