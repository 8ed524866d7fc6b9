"""The connections on which shards travel between agents: blocking TLS sockets in threads. Gigabytes keep no ping, beat
or command of the event loop waiting, and the shards of a node travel side by side (decision "Shards travel in
threads").

The end that dials says PREFACE in the clear, which tells the other that this is no connection that speaks `wire`. Then
come TLS, one line of `protocol` (Pull), and the answers to it.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import select
import socket
import ssl
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Optional, TypeVar

import concertina_protocol as p
from concertina_agent.files.shards import Shard, commit, fill
from concertina_protocol.addresses import family, split
from concertina_protocol.codec.typed_json import ProtocolError
from concertina_protocol.sidecar import remove_sidecar

PREFACE = b"shard\n"
"""TLS begins with the byte 0x16."""
STALL_SECONDS = 30.0
"""A transfer that brings no byte for this long is given up."""
THREADS = 512
"""At most; a transfer takes one, at each end, and so does waiting for the next."""

T = TypeVar("T")


class ShardWire:
    """One thing at a time. A thread knows nothing of cancellation: who no longer waits closes, which ends it."""

    def __init__(self, connection: ssl.SSLSocket, threads: concurrent.futures.Executor) -> None:
        self._socket, self._threads = connection, threads
        self._working: Optional[concurrent.futures.Future[Any]] = None
        self._ahead = b""
        """Arrived behind the last line."""

    async def handshake(self) -> None:
        """Without a thread, of which anybody at all could take one (decision "Strangers at an agent's door"). Raises
        OSError."""
        self._socket.setblocking(False)
        while True:
            try:
                self._socket.do_handshake()
                break
            except ssl.SSLWantReadError:
                await readable(self._socket)
        self._socket.setblocking(True)

    @property
    def certificate(self) -> Mapping[str, Any]:
        """The other end's, which has been checked."""
        return self._socket.getpeercert() or {}

    async def receive(self) -> Optional[p.Message]:
        """The next line, however long it takes; None at the end. Raises OSError or ProtocolError."""
        return await self._run(self._receive)

    async def send(self, message: p.Message) -> None:
        """Raises OSError when the connection is gone."""
        await self._run(lambda: self._socket.sendall(p.encode(message)))

    async def give(self, shard: Shard) -> None:
        """Its header and its bytes. Raises OSError; and Damaged, once they have gone, where they are not those that
        were committed."""
        await self._run(lambda: self._give(shard))

    async def take(self, path: Path, header: p.ShardHeader) -> Shard:
        """The bytes behind a header, into this file, which counts once they are all there. Raises OSError, Damaged."""
        remove_sidecar(path)
        await self._run(lambda: self._take(path, header))
        return commit(path, header)

    def gone(self) -> bool:
        """Whether the other end, which has nothing to say now, has left."""
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        return bool(poll.poll(0))

    def close(self) -> None:
        """At once; whatever a thread is at ends with an error, and nobody hears of it."""
        with contextlib.suppress(OSError):
            socket.socket.shutdown(self._socket, socket.SHUT_RDWR)
        if self._working is None:
            self._socket.close()
        else:
            self._working.add_done_callback(lambda _: self._socket.close())

    async def _run(self, work: Callable[[], T]) -> T:
        self._working = running = self._threads.submit(work)
        return await asyncio.wrap_future(running)

    # --- in threads -------------------------------------------------------------------------------------------------

    def _receive(self) -> Optional[p.Message]:
        self._socket.settimeout(None)
        while b"\n" not in self._ahead:
            data = self._socket.recv(1 << 16)
            if not data:
                return None
            self._ahead += data
            if len(self._ahead) > p.MAX_LINE:
                raise ProtocolError(f"a line over the limit of {p.MAX_LINE} bytes")
        line, _, self._ahead = self._ahead.partition(b"\n")
        return p.decode(line)

    def _give(self, shard: Shard) -> None:
        self._socket.settimeout(STALL_SECONDS)
        self._socket.sendall(p.encode(shard.header))
        for chunk in shard.chunks():
            self._socket.sendall(chunk)

    def _take(self, path: Path, header: p.ShardHeader) -> None:
        self._socket.settimeout(STALL_SECONDS)
        fill(path, header, self._read_into)

    def _read_into(self, buffer: memoryview) -> int:
        count = min(len(buffer), len(self._ahead))
        if not count:
            return self._socket.recv_into(buffer)
        buffer[:count], self._ahead = self._ahead[:count], self._ahead[count:]
        return count


async def readable(connection: socket.socket) -> None:
    """Until something has arrived, or the other end has left."""
    loop = asyncio.get_running_loop()
    arrived: asyncio.Future[None] = loop.create_future()
    loop.add_reader(connection, lambda: None if arrived.done() else arrived.set_result(None))
    try:
        await arrived
    finally:
        loop.remove_reader(connection)


async def dial(address: str, context: ssl.SSLContext, name: str, threads: concurrent.futures.Executor) -> ShardWire:
    """To the agent whose certificate has this name. Raises OSError."""
    loop, (host, port) = asyncio.get_running_loop(), split(address)
    connection = socket.socket(family(host))
    with contextlib.closing(connection):  # of no effect once TLS has taken it over
        connection.setblocking(False)
        await loop.sock_connect(connection, (host, port))
        await loop.sock_sendall(connection, PREFACE)
        return await _secure(connection, threads, context, server_hostname=name)


async def accept(connection: socket.socket, context: ssl.SSLContext, threads: concurrent.futures.Executor) -> ShardWire:
    """The other end of `dial`. Raises OSError."""
    with contextlib.closing(connection):
        received = b""
        while len(received) < len(PREFACE) and PREFACE.startswith(received):
            data = await asyncio.get_running_loop().sock_recv(connection, len(PREFACE) - len(received))
            received = received + data if data else b"?"
        if received != PREFACE:
            raise ConnectionError("neither TLS nor a connection for shards")
        return await _secure(connection, threads, context, server_side=True)


async def _secure(
    connection: socket.socket, threads: concurrent.futures.Executor, context: ssl.SSLContext, **side: Any
) -> ShardWire:
    wire = ShardWire(context.wrap_socket(connection, do_handshake_on_connect=False, **side), threads)
    try:
        await wire.handshake()
    except BaseException:
        wire.close()
        raise
    return wire
