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
import dataclasses
import select
import socket
import ssl
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Optional, TypeVar, cast

import concertina_protocol as p
from concertina_agent.files.shards import Shard, fill
from concertina_protocol.addresses import family, split
from concertina_protocol.codec.typed_json import ProtocolError

PREFACE = b"shard\n"
"""TLS begins with the byte 0x16."""
STALL_SECONDS = 30.0
"""A transfer that brings no byte for this long is given up."""
RECEIVED = 1 << 18
"""Bytes of one call of the kernel, at most."""
RECORD = 1 << 14
"""Bytes, of TLS: at most."""
THREADS = 512
"""At most; a connection takes one at each end while it carries something."""

T = TypeVar("T")


class ShardWire:
    """One thing at a time. A thread knows nothing of cancellation: a call that is cancelled closes, which ends it.

    TLS works in memory, and the socket carries hundreds of kilobytes at a time: a TLS socket makes two calls of the
    kernel for each record of 16 KiB (decision "Shards travel in large pieces").
    """

    def __init__(
        self, connection: socket.socket, threads: concurrent.futures.Executor, context: ssl.SSLContext, **side: Any
    ) -> None:
        self._socket, self._threads = connection, threads
        self._arrived, self._leaving = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._arrived, self._leaving, **side)
        self._buffer = memoryview(bytearray(RECEIVED))
        self._working: Optional[concurrent.futures.Future[Any]] = None
        self._ahead = b""
        """Arrived behind the last line."""

    async def handshake(self) -> None:
        """Without a thread, of which anybody at all could take one (decision "Strangers at an agent's door"). Raises
        OSError."""
        loop, ended = asyncio.get_running_loop(), False
        while True:
            try:
                self._tls.do_handshake()
                ended = True
            except ssl.SSLWantReadError:
                pass
            finally:
                if self._leaving.pending:  # what is wrong with the other end is told to it, too
                    await loop.sock_sendall(self._socket, self._leaving.read())
            if ended:
                return self._socket.setblocking(True)
            data = await loop.sock_recv(self._socket, RECEIVED)
            if not data:
                raise ConnectionError("the connection was closed")
            self._arrived.write(data)

    @property
    def certificate(self) -> Mapping[str, Any]:
        """The other end's, which has been checked."""
        return self._tls.getpeercert() or {}

    async def receive(self) -> Optional[p.Message]:
        """The next line, however long it takes; None at the end. Raises OSError or ProtocolError."""
        if not (self._ahead or self._arrived.pending or self._tls.pending()):
            await readable(self._socket)  # without a thread
        return await self._run(self._receive)

    async def send(self, message: p.Message) -> None:
        """Raises OSError when the connection is gone."""
        await self._run(lambda: self._send(memoryview(p.encode(message))))

    async def give(self, shard: Shard, part: int, parts: int) -> None:
        """Its header and the bytes of a part, which the other end checks. Raises OSError, and Damaged where there are
        too few."""
        await self._run(lambda: self._give(shard, part, parts))

    async def take(self, path: Path, header: p.ShardHeader, part: int) -> int:
        """The bytes behind a header, into this file, which counts once all parts are committed; their crc32. Raises
        OSError, Damaged."""
        return await self._run(lambda: self._take(path, header, part))

    def gone(self) -> bool:
        """Whether the other end, which has nothing to say now, has left."""
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        return bool(poll.poll(0))

    def close(self) -> None:
        """At once; whatever a thread is at ends with an error, and nobody hears of it."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        if self._working is None:
            self._socket.close()
        else:
            self._working.add_done_callback(lambda _: self._socket.close())

    async def _run(self, work: Callable[[], T]) -> T:
        """Nothing of it goes on behind a cancellation: the next one may write where this one did."""
        self._working = running = self._threads.submit(work)
        try:
            return await asyncio.wrap_future(running)
        except asyncio.CancelledError:
            self.close()
            with contextlib.suppress(Exception):
                await asyncio.wrap_future(running)
            raise

    # --- in threads -------------------------------------------------------------------------------------------------

    def _receive(self) -> Optional[p.Message]:
        self._socket.settimeout(None)
        while b"\n" not in self._ahead:
            record = memoryview(bytearray(RECORD))
            count = self._decrypt_into(record)
            if not count:
                return None
            self._ahead += record[:count]
            if len(self._ahead) > p.MAX_LINE:
                raise ProtocolError(f"a line over the limit of {p.MAX_LINE} bytes")
        line, _, self._ahead = self._ahead.partition(b"\n")
        return p.decode(line)

    def _give(self, shard: Shard, part: int, parts: int) -> None:
        self._socket.settimeout(STALL_SECONDS)
        self._send(memoryview(p.encode(dataclasses.replace(shard.header, parts=parts))))
        for chunk in shard.chunks(part, parts):
            self._send(chunk)

    def _take(self, path: Path, header: p.ShardHeader, part: int) -> int:
        self._socket.settimeout(STALL_SECONDS)
        return fill(path, header, self._read_into, part)

    def _read_into(self, buffer: memoryview) -> int:
        count = min(len(buffer), len(self._ahead))
        if not count:
            return self._decrypt_into(buffer)
        buffer[:count], self._ahead = self._ahead[:count], self._ahead[count:]
        return count

    def _decrypt_into(self, buffer: memoryview) -> int:
        """A record at most; 0 at the end."""
        while True:
            try:
                return cast(int, self._tls.read(len(buffer), buffer))
            except ssl.SSLWantReadError:
                count = self._socket.recv_into(self._buffer)
                if not count:
                    return 0
                self._arrived.write(self._buffer[:count])
            except ssl.SSLZeroReturnError:
                return 0

    def _send(self, data: memoryview) -> None:
        while data:
            data = data[self._tls.write(data) :]
            self._socket.sendall(self._leaving.read())


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
    try:
        connection.setblocking(False)
        await loop.sock_connect(connection, (host, port))
        await loop.sock_sendall(connection, PREFACE)
        return await _secure(connection, threads, context, server_hostname=name)
    except BaseException:
        connection.close()
        raise


async def accept(connection: socket.socket, context: ssl.SSLContext, threads: concurrent.futures.Executor) -> ShardWire:
    """The other end of `dial`. Raises OSError."""
    try:
        connection.setblocking(False)
        received = b""
        while len(received) < len(PREFACE) and PREFACE.startswith(received):
            data = await asyncio.get_running_loop().sock_recv(connection, len(PREFACE) - len(received))
            received = received + data if data else b"?"
        if received != PREFACE:
            raise ConnectionError("neither TLS nor a connection for shards")
        return await _secure(connection, threads, context, server_side=True)
    except BaseException:
        connection.close()
        raise


async def _secure(
    connection: socket.socket, threads: concurrent.futures.Executor, context: ssl.SSLContext, **side: Any
) -> ShardWire:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # else a line behind another waits for 40 ms
    wire = ShardWire(connection, threads, context, **side)
    await wire.handshake()
    return wire
