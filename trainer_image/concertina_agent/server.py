"""The agent's side of every connection: who asks, whether they may, and the streams that stay open."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import socket
import ssl
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Optional, Protocol, Union

from concertina_agent import protocol as p
from concertina_agent import tls
from concertina_agent.addresses import family
from concertina_agent.shard_wire import THREADS, ShardWire, accept
from concertina_agent.typed_json import ProtocolError
from concertina_agent.wire import Wire

MAX_CONNECTIONS = 2048
"""Open at a time; more are closed at once. A lead has one of each member, and each agent may ping each other."""
HANDSHAKE_SECONDS = 5.0
FIRST_LINE_SECONDS = 10.0
ACCEPT_AGAIN_SECONDS = 0.1
IDLE_SECONDS = 600.0
"""A connection that has been answered may carry the next request; after this long it is closed."""

Answered = Union[p.Prepare, p.Assign, p.Drain, p.Save, p.Ping]


class Handler(Protocol):
    """What the server asks of the agent. Streams run until the connection or the task ends."""

    async def answer(self, message: Answered) -> p.Message: ...

    async def watch(self, wire: Wire) -> None: ...

    async def join(self, message: p.Join, wire: Wire) -> None: ...

    async def index(self, message: p.Index, wire: Wire) -> None: ...

    async def pull(self, message: p.Pull, wire: ShardWire) -> None: ...


class Server:
    def __init__(self, uid: str, context: ssl.SSLContext, handler: Handler) -> None:
        self._uid, self._context, self._handler = uid, context, handler
        self._open: set[asyncio.Task[None]] = set()
        self._threads = concurrent.futures.ThreadPoolExecutor(THREADS, "shards")
        self._routes: Mapping[type, tuple[str, Callable[[Any, Wire], Awaitable[None]]]] = {
            **dict.fromkeys((p.Prepare, p.Assign, p.Drain, p.Save), (tls.OPERATOR, self._answer)),
            p.Watch: (tls.OPERATOR, lambda message, wire: handler.watch(wire)),
            p.Ping: (tls.AGENT, self._answer),
            p.Join: (tls.AGENT, handler.join),
            p.Index: (tls.AGENT, handler.index),
        }

    def start(self, host: str, port: int) -> None:
        """Raises OSError where the address can't be had."""
        self._listening = socket.create_server((host, port), family=family(host), backlog=512)
        self._listening.setblocking(False)
        self._accepting = asyncio.get_running_loop().create_task(self._accept_all(self._listening))

    async def close(self) -> None:
        self._accepting.cancel()
        self._listening.close()
        for task in self._open:
            task.cancel()
        await asyncio.gather(*self._open, return_exceptions=True)

    async def _accept_all(self, listening: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, _ = await loop.sock_accept(listening)
            except OSError:  # no file descriptor is left: later, then
                await asyncio.sleep(ACCEPT_AGAIN_SECONDS)
                continue
            if len(self._open) >= MAX_CONNECTIONS:
                connection.close()
                continue
            connection.setblocking(False)
            task = loop.create_task(self._connected(connection))
            self._open.add(task)
            task.add_done_callback(self._open.discard)

    async def _connected(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError, asyncio.TimeoutError, ProtocolError):
            try:
                speaks_tls = await asyncio.wait_for(_speaks_tls(connection), HANDSHAKE_SECONDS)
            except BaseException:
                connection.close()
                raise
            await (self._converse(connection) if speaks_tls else self._give_shards(connection))

    async def _converse(self, connection: socket.socket) -> None:
        loop, reader = asyncio.get_running_loop(), asyncio.StreamReader(p.MAX_LINE)
        protocol = asyncio.StreamReaderProtocol(reader)
        transport, _ = await loop.connect_accepted_socket(
            lambda: protocol, connection, ssl=self._context, ssl_handshake_timeout=HANDSHAKE_SECONDS
        )
        wire = Wire(reader, asyncio.StreamWriter(transport, protocol, reader, loop))
        try:
            await self._serve(wire)
        finally:
            wire.close()

    async def _give_shards(self, connection: socket.socket) -> None:
        accepting = accept(connection, self._context, self._threads)
        with contextlib.closing(await asyncio.wait_for(accepting, HANDSHAKE_SECONDS)) as wire:
            message = await asyncio.wait_for(wire.receive(), FIRST_LINE_SECONDS)
            role = tls.peer_role(wire.certificate, self._uid)
            if isinstance(message, p.Pull) and role == tls.AGENT and message.uid == self._uid:
                return await self._handler.pull(message, wire)
            return await wire.send(p.Refused(self._forbidden(role, message), 0, ""))

    async def _serve(self, wire: Wire) -> None:
        role, patience = tls.peer_role(wire.certificate, self._uid), FIRST_LINE_SECONDS
        while True:
            try:
                message = await wire.receive(patience)
            except ProtocolError as error:
                return await self._refuse(wire, str(error))
            if message is None:
                return None
            who, route = self._routes.get(type(message), ("", self._answer))
            if not who or role != who or getattr(message, "uid", "") != self._uid:
                return await self._refuse(wire, self._forbidden(role, message))
            await route(message, wire)
            patience = IDLE_SECONDS

    def _forbidden(self, role: str, message: Optional[p.Message]) -> str:
        return f"{role or 'a stranger'} may not send {type(message).__name__} to an agent of job {self._uid}"

    async def _answer(self, message: Answered, wire: Wire) -> None:
        await wire.send(await self._handler.answer(message))

    async def _refuse(self, wire: Wire, reason: str) -> None:
        with contextlib.suppress(OSError):
            await wire.send(p.Refused(reason, 0, ""))
            wire.writer.close()
            await asyncio.wait_for(wire.writer.wait_closed(), 1.0)


async def _speaks_tls(connection: socket.socket) -> bool:
    """By its first byte, which stays where it is."""
    loop = asyncio.get_running_loop()
    arrived: asyncio.Future[None] = loop.create_future()
    loop.add_reader(connection, lambda: None if arrived.done() else arrived.set_result(None))
    try:
        await arrived
    finally:
        loop.remove_reader(connection)
    return connection.recv(1, socket.MSG_PEEK) == b"\x16"
