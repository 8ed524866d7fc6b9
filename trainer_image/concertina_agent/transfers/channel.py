"""Unix socket by which workers and other processes of this replica communicate with the agent (`worker_channel`)."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Optional

from concertina_agent.core import events as e
from concertina_agent.files.snapshot_files import SnapshotFiles
from concertina_agent.runtime.nursery import TaskGroup
from concertina_agent.transfers.copies import Peers
from concertina_agent.transfers.tracking_process import TrackingDriver
from concertina_agent.transfers.uploads import UploadDriver
from concertina_agent.workers.local_workers import LocalWorker, LocalWorkers
from concertina_protocol import Durable
from concertina_protocol import worker_channel as w
from concertina_protocol.codec.typed_json import ProtocolError
from concertina_protocol.log import log_event
from concertina_protocol.sidecar import Damaged
from concertina_protocol.worker_channel.agent_end import AgentEnd

MAX_SOCKET_PATH = 100
"""Maximum length of the socket's path in characters. The limit of Linux is 107."""


def socket_path(volume: Path) -> str:
    """Return the path of the agent's socket: in the volume, or in a new folder if the path would be too long."""
    path = str(volume.absolute() / "agent.sock")
    return path if len(path) <= MAX_SOCKET_PATH else os.path.join(tempfile.mkdtemp(prefix="concertina-"), "agent.sock")


class ChannelServer:
    """Server of the worker channel."""

    def __init__(
        self,
        path: str,
        local: LocalWorkers,
        peers: Peers,
        uploads: UploadDriver,
        snapshots: SnapshotFiles,
        tracking: Optional[TrackingDriver],
        emit: Callable[[e.Event], None],
        latest: Callable[[], Optional[Durable]],
    ) -> None:
        """Prepare the server for the processes of this replica. It does not listen yet.

        Args:
            path: Path of the socket.
            local: Workers of this replica.
            peers: Transfers of shards between agents.
            uploads: Driver of the uploader.
            snapshots: Shard files of this replica.
            tracking: Driver of the tracking process, or None without tracking.
            emit: Function that passes events to the state machine.
            latest: Function that returns the newest checkpoint in storage (the one that the file LATEST names), if
                known.
        """
        self._latest = latest
        self._local, self._peers, self._uploads, self._snapshots, self._emit = local, peers, uploads, snapshots, emit
        self._tracking = tracking
        self.path = path
        self._listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._connections = TaskGroup()

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
        self._connections.cancel()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.path)

    def _accept(self) -> None:
        with contextlib.suppress(BlockingIOError):
            end = AgentEnd(self._listening.accept()[0])
            self._connections.start("channel", self._connected(end))

    async def _connected(self, end: AgentEnd) -> None:
        try:
            first = await end.receive()
            if isinstance(first, w.UploaderHello):
                await self._uploads.serve(end)
            elif isinstance(first, w.TrackerHello):
                if self._tracking is not None:
                    await self._tracking.serve(end)
            elif isinstance(first, w.Hello):
                worker = await self._local.of(end.peer_pid)
                if worker is not None and worker.rank == first.rank:
                    await self._serve(worker, first, end)
        except ProtocolError as error:
            log_event("channel_error", error=str(error))
        finally:
            end.release()

    async def _serve(self, worker: LocalWorker, hello: w.Hello, end: AgentEnd) -> None:
        self._greet(worker, hello, end)
        try:
            while (message := await end.receive()) is not None:
                await self._handle(worker, message, end)
        finally:
            worker.channel_closed.set()

    def _greet(self, worker: LocalWorker, hello: w.Hello, end: AgentEnd) -> None:
        """Answer the Hello of a worker."""
        world = sum(member.workers for member in worker.assign.members)
        assign, latest = worker.assign, self._latest()
        end.send(w.Start(assign.restore, world, assign.uid, latest, assign.history, assign.images, hello.stays))
        self._local.attach(worker, end, hello.stays, hello.lists_calls)
        self._emit(e.WorkerMessage(worker.round, worker.rank, hello))

    async def _handle(self, worker: LocalWorker, message: w.Message, end: AgentEnd) -> None:
        if isinstance(message, w.Hello):
            if not worker.in_round and message.rank == worker.rank:
                self._greet(worker, message, end)
        elif isinstance(message, w.Left):  # there is no Hello if the round ended before the worker had entered it
            self._local.left(worker, message)
        elif not worker.in_round:
            log_event("worker_message_dropped", rank=worker.rank, kind=type(message).__name__)
        elif isinstance(message, w.CallList):
            if worker.calls is not None and not worker.calls.done():
                worker.calls.set_result(message.groups)
        elif isinstance(message, w.Fetch):
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
            self._emit(e.WorkerMessage(worker.round, worker.rank, message))
