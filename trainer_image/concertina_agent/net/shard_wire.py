"""Connections that transfer shards between agents, with blocking TLS sockets in threads.

Transfers of gigabytes must not delay a Ping, a heartbeat or a request on the event loop. Because of the threads, a node
can transfer several shards in parallel (decision "Threads copy shards between members").

The connecting end first sends PREFACE without encryption. The other end can therefore distinguish the connection from a
connection of the module `wire`. TLS follows, then one request (Pull) as a line of the protocol, and the answers to the
request.
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
"""First bytes of a connection that transfers shards. A TLS connection begins with the byte 0x16 instead."""
STALL_SECONDS = 30.0
"""Seconds without received or sent data after which a transfer is aborted."""
RECEIVED = 1 << 18
"""Maximum number of bytes to receive by one system call."""
RECORD = 1 << 14
"""Maximum size of a TLS record in bytes."""
THREADS = 512
"""Maximum number of threads for transfers. During a transfer, a connection uses one thread at each end."""

T = TypeVar("T")


class ShardWire:
    """Connection that transfers shards. Only one operation may be in progress at a time.

    Operations run in threads, which can't be cancelled. If a call is cancelled, the connection is therefore closed,
    which ends the operation.

    TLS records are encrypted and decrypted in memory, and the socket transfers hundreds of kilobytes at a time. An
    ordinary TLS socket would make two system calls for each record of 16 KiB (decision "Shards are sent in pieces of
    256 KiB").
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
        """Decrypted data that were received after the last line."""

    async def handshake(self) -> None:
        """Perform the TLS handshake on the event loop. In a thread, a slow client would occupy the thread.

        Decision "Limits on unauthenticated connections" gives the reason. Other kinds of OSError may be raised too.

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
                if self._leaving.pending:  # the other end must also receive alerts
                    await loop.sock_sendall(self._socket, self._leaving.read())
            if ended:
                return self._socket.setblocking(True)
            data = await loop.sock_recv(self._socket, RECEIVED)
            if not data:
                raise ConnectionError("the connection was closed")
            self._arrived.write(data)

    @property
    def certificate(self) -> Mapping[str, Any]:
        """Certificate of the other end, which TLS has verified."""
        return self._tls.getpeercert() or {}

    async def receive(self) -> Optional[p.Message]:
        """Return the next message, or None at the end of the stream. There is no time limit.

        Raises OSError if the connection fails, and ProtocolError if the line is not valid.
        """
        if not (self._unread or self._arrived.pending or self._tls.pending()):
            await readable(self._socket)  # wait on the event loop, which needs no thread
        return await self._run(self._receive)

    async def send(self, message: p.Message) -> None:
        """Send a message.

        Raises OSError if the connection is lost.
        """
        await self._run(lambda: self._send(memoryview(p.encode(message))))

    async def give(self, shard: Shard, part: int, parts: int) -> None:
        """Send the header of a shard, and the bytes of part number `part`. The receiving end verifies the bytes.

        Raises OSError if the connection fails, and Damaged if the file is too short.
        """
        await self._run(lambda: self._give(shard, part, parts))

    async def take(self, path: Path, header: p.ShardHeader, part: int) -> int:
        """Receive the bytes of part number `part` of a shard into a file, and return the crc32 of these bytes.

        The shard counts as present only when all its parts have arrived and it has been committed. Raises OSError if
        the connection or the volume fails, and Damaged if too few bytes arrive.
        """
        return await self._run(lambda: self._take(path, header, part))

    def gone(self) -> bool:
        """Return whether the other end has closed the connection.

        Call this method only at a time when the other end sends no data.
        """
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        return bool(poll.poll(0))

    def close(self) -> None:
        """Close the connection at once.

        If an operation on the connection is in progress in a thread, it ends with an error, which is not reported.
        """
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        if self._running is None:
            self._socket.close()
        else:
            self._running.add_done_callback(lambda _: self._socket.close())

    async def _run(self, work: Callable[[], T]) -> T:
        """Run an operation in a thread, and return its result.

        If this call is cancelled, the connection is closed, and the call waits until the operation has ended. Otherwise
        the next operation could write to the same file at the same time.

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
                raise ProtocolError(f"a line exceeds the limit of {p.MAX_LINE} bytes")
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
        """Decrypt at most one TLS record into the buffer. Return the number of bytes, or 0 at the end of the stream."""
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
    """Wait until data have arrived or the other end has closed the connection."""
    loop = asyncio.get_running_loop()
    arrived: asyncio.Future[None] = loop.create_future()
    loop.add_reader(connection, lambda: None if arrived.done() else arrived.set_result(None))
    try:
        await arrived
    finally:
        loop.remove_reader(connection)


async def dial(address: str, context: ssl.SSLContext, name: str, threads: concurrent.futures.Executor) -> ShardWire:
    """Open a connection for transfers of shards to the agent whose certificate has the name `name`.

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
    """Accept a connection that `dial` has opened at the other end.

    Other kinds of OSError may be raised too.

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
            raise ConnectionError("this is neither TLS nor a connection for shards")
        return await _secure(connection, threads, context, server_side=True)
    except BaseException:
        connection.close()
        raise


async def _secure(
    connection: socket.socket, threads: concurrent.futures.Executor, context: ssl.SSLContext, **side: Any
) -> ShardWire:
    # With Nagle's algorithm, a line that follows another one would be delayed by 40 ms.
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    wire = ShardWire(connection, threads, context, **side)
    await wire.handshake()
    return wire
