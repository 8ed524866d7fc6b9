"""Connections that transfer shards between agents: blocking TLS sockets in threads.

Transfers of gigabytes delay no ping, heartbeat or command on the event loop, and the shards of a node are transferred
in parallel (decision "Shards travel in threads").

The connecting end sends PREFACE unencrypted, which shows that the connection does not use `wire`. TLS follows, then one
line of `protocol` (Pull), and the answers to it.
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
"""First bytes of a connection for shards. TLS begins with the byte 0x16 instead."""
STALL_SECONDS = 30.0
"""Seconds without data after which a transfer is aborted."""
RECEIVED = 1 << 18
"""Maximum number of bytes of one system call."""
RECORD = 1 << 14
"""Maximum size of a TLS record in bytes."""
THREADS = 512
"""Maximum number of threads. A connection uses one at each end during a transfer."""

T = TypeVar("T")


class ShardWire:
    """Connection that does one operation at a time.

    Threads do not support cancellation, so cancelling a call closes the connection, which ends the operation.

    TLS works in memory, and the socket transfers hundreds of kilobytes at a time. A TLS socket would make two system
    calls for each record of 16 KiB (decision "Shards travel in large pieces").
    """

    def __init__(
        self, connection: socket.socket, threads: concurrent.futures.Executor, context: ssl.SSLContext, **side: Any
    ) -> None:
        self._socket, self._threads = connection, threads
        self._arrived, self._leaving = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._arrived, self._leaving, **side)
        self._buffer = memoryview(bytearray(RECEIVED))
        self._running: Optional[concurrent.futures.Future[Any]] = None
        self._unread = b""
        """Data received after the last line."""

    async def handshake(self) -> None:
        """Perform the TLS handshake without a thread, because any client could occupy one.

        See decision "Strangers at an agent's door". Raises other kinds of OSError too.

        Raises:
            ConnectionError: If the connection is closed.
        """
        loop, ended = asyncio.get_running_loop(), False
        while True:
            try:
                self._tls.do_handshake()
                ended = True
            except ssl.SSLWantReadError:
                pass
            finally:
                if self._leaving.pending:  # send alerts to the other end, too
                    await loop.sock_sendall(self._socket, self._leaving.read())
            if ended:
                return self._socket.setblocking(True)
            data = await loop.sock_recv(self._socket, RECEIVED)
            if not data:
                raise ConnectionError("the connection was closed")
            self._arrived.write(data)

    @property
    def certificate(self) -> Mapping[str, Any]:
        """Certificate of the other end, which has been verified."""
        return self._tls.getpeercert() or {}

    async def receive(self) -> Optional[p.Message]:
        """Return the next message, however long it takes, or None at the end.

        Raises OSError if the connection fails, and ProtocolError if the line is not valid.
        """
        if not (self._unread or self._arrived.pending or self._tls.pending()):
            await readable(self._socket)  # without a thread
        return await self._run(self._receive)

    async def send(self, message: p.Message) -> None:
        """Send a message.

        Raises OSError if the connection is lost.
        """
        await self._run(lambda: self._send(memoryview(p.encode(message))))

    async def give(self, shard: Shard, part: int, parts: int) -> None:
        """Send the header of a shard and the bytes of a part, which the other end verifies.

        Raises OSError if the connection fails, and Damaged if there are too few bytes.
        """
        await self._run(lambda: self._give(shard, part, parts))

    async def take(self, path: Path, header: p.ShardHeader, part: int) -> int:
        """Receive the bytes after a header into a file, and return their crc32.

        The shard counts once all parts are committed. Raises OSError if the connection or the volume fails, and Damaged
        if there are too few bytes.
        """
        return await self._run(lambda: self._take(path, header, part))

    def gone(self) -> bool:
        """Return whether the other end, which has nothing to send now, has closed the connection."""
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        return bool(poll.poll(0))

    def close(self) -> None:
        """Close the connection at once. The operation of a thread ends with an error, which is not reported."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        if self._running is None:
            self._socket.close()
        else:
            self._running.add_done_callback(lambda _: self._socket.close())

    async def _run(self, work: Callable[[], T]) -> T:
        """Run an operation in a thread.

        After a cancellation, the operation has ended on return, because the next one may write to the same file.

        Raises:
            asyncio.CancelledError: If the call is cancelled.
        """
        self._running = running = self._threads.submit(work)
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
        while b"\n" not in self._unread:
            record = memoryview(bytearray(RECORD))
            count = self._decrypt_into(record)
            if not count:
                return None
            self._unread += record[:count]
            if len(self._unread) > p.MAX_LINE:
                raise ProtocolError(f"a line over the limit of {p.MAX_LINE} bytes")
        line, _, self._unread = self._unread.partition(b"\n")
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
        count = min(len(buffer), len(self._unread))
        if not count:
            return self._decrypt_into(buffer)
        buffer[:count], self._unread = self._unread[:count], self._unread[count:]
        return count

    def _decrypt_into(self, buffer: memoryview) -> int:
        """Decrypt at most one record into the buffer, and return its size, or 0 at the end."""
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
    """Wait until data have arrived, or the other end has closed the connection."""
    loop = asyncio.get_running_loop()
    arrived: asyncio.Future[None] = loop.create_future()
    loop.add_reader(connection, lambda: None if arrived.done() else arrived.set_result(None))
    try:
        await arrived
    finally:
        loop.remove_reader(connection)


async def dial(address: str, context: ssl.SSLContext, name: str, threads: concurrent.futures.Executor) -> ShardWire:
    """Connect to the agent whose certificate has this name.

    Raises OSError if that fails.
    """
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
    """Accept a connection that `dial` has opened.

    Raises other kinds of OSError too.

    Raises:
        ConnectionError: If the other end sends neither TLS nor PREFACE.
    """
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
    # Otherwise a line after another one is delayed by 40 ms.
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    wire = ShardWire(connection, threads, context, **side)
    await wire.handshake()
    return wire
