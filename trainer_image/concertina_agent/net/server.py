"""Server side of every connection to the agent: it authorizes requests and keeps the streams open."""

from __future__ import annotations

import asyncio
import collections
import concurrent.futures
import contextlib
import socket
import ssl
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Optional, Protocol, Union

import concertina_protocol as p
from concertina_agent.net import tls
from concertina_agent.net.shard_wire import THREADS, ShardWire, accept, readable
from concertina_agent.runtime.nursery import TaskGroup
from concertina_protocol.addresses import family
from concertina_protocol.codec.typed_json import ProtocolError
from concertina_protocol.connection import Connection
from concertina_protocol.waiting import within

MAX_CONNECTIONS = 5000
"""Maximum number of connections of the job's own operator and agents. Further ones are closed at once.

A coordinator has one to each member, and each agent may ping every other agent.
"""
MAX_STRANGERS = 256
"""Maximum number of connections whose other end has not presented a certificate yet.

Beyond it, the oldest connection of the address with the most is closed. A legitimate client needs only milliseconds, so
it can connect even during a flood of idle connections (decision "Strangers at an agent's door").
"""
HANDSHAKE_SECONDS = 5.0
"""Maximum time from the connection's start to the certificate in seconds."""
FIRST_LINE_SECONDS = 10.0
ACCEPT_AGAIN_SECONDS = 0.1
IDLE_SECONDS = 600.0
"""Seconds after which an idle connection is closed. Until then, it may carry another request."""

Answered = Union[p.Prepare, p.Assign, p.Release, p.Drain, p.Save, p.Ping, p.Trace]
Route = Callable[[Any, Connection], Awaitable[None]]
CALLS = (p.Prepare, p.Assign, p.Release, p.Drain, p.Save)
"""Requests that are allowed on the connection of a Watch."""


class Handler(Protocol):
    """Interface of the agent for the server.

    Streams run until the connection or the task ends. A watch continues beside requests that are answered on its
    connection.
    """

    async def answer(self, message: Answered) -> p.Message: ...

    async def watch(self, message: p.Watch, wire: Connection) -> None: ...

    async def learn(self, message: p.Learn, wire: Connection) -> None: ...

    async def relay(self, message: p.Relay, wire: Connection) -> None: ...

    async def join(self, message: p.Join, wire: Connection) -> None:
        """Serve a member's stream.

        Raises ProtocolError if the member sends an invalid message.
        """

    async def index(self, message: p.Index, wire: Connection) -> None: ...

    async def pull(self, message: p.Pull, wire: ShardWire) -> None: ...


class AgentServer:
    """Server for the operator and the job's agents."""

    def __init__(self, uid: str, context: ssl.SSLContext, handler: Handler, tasks: TaskGroup) -> None:
        self._uid, self._context, self._handler, self._tasks = uid, context, handler, tasks
        self._strangers: dict[asyncio.Task[None], str] = {}
        """Connections without a certificate and their addresses, the oldest first."""
        self._connections = TaskGroup()
        """All connections, including those without a certificate."""
        self._streams = TaskGroup()
        """Streams of Watch requests, each beside its connection."""
        self._threads = concurrent.futures.ThreadPoolExecutor(THREADS, "shards")
        operator, agent = (tls.OPERATOR,), (tls.AGENT,)
        self._routes: Mapping[type, tuple[tuple[str, ...], Route]] = {
            **dict.fromkeys((p.Prepare, p.Assign, p.Release), (operator + agent, self._answer)),
            **dict.fromkeys((p.Drain, p.Save), (operator, self._answer)),
            p.Watch: (operator + agent, self._watch),
            p.Relay: (operator, handler.relay),
            **dict.fromkeys((p.Ping, p.Trace), (agent, self._answer)),
            p.Join: (agent, handler.join),
            p.Index: (agent, handler.index),
            p.Learn: (agent, handler.learn),
        }

    def start(self, host: str, port: int) -> None:
        """Listen for connections.

        Raises OSError if the address is not available.
        """
        self._listening = socket.create_server((host, port), family=family(host), backlog=512)
        self._listening.setblocking(False)
        self._accepting = self._tasks.start("accept connections", self._accept_all(self._listening))

    async def close(self) -> None:
        self._accepting.cancel()
        self._listening.close()
        await self._connections.close()
        await self._streams.close()

    async def _accept_all(self, listening: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, (address, *_) = await loop.sock_accept(listening)
            except OSError:  # no file descriptor is left: try again later
                await asyncio.sleep(ACCEPT_AGAIN_SECONDS)
                continue
            connection.setblocking(False)
            task = self._connections.start("connection", self._connected(connection))
            self._strangers[task] = address
            task.add_done_callback(lambda gone: self._strangers.pop(gone, None))
            if len(self._strangers) > MAX_STRANGERS:
                self._close_oldest_of_busiest()
            await asyncio.sleep(0)  # in a flood, the listening socket always has another connection

    def _close_oldest_of_busiest(self) -> None:
        ((busiest, _),) = collections.Counter(self._strangers.values()).most_common(1)
        task = next(task for task, address in self._strangers.items() if address == busiest)
        del self._strangers[task]
        task.cancel()

    async def _connected(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError, asyncio.TimeoutError, ProtocolError):
            wire = await within(HANDSHAKE_SECONDS, self._introduced(connection))
            with contextlib.closing(wire):
                task = asyncio.current_task()
                assert task is not None
                self._strangers.pop(task, None)
                if len(self._connections) - len(self._strangers) <= MAX_CONNECTIONS:
                    await (self._serve(wire) if isinstance(wire, Connection) else self._serve_shards(wire))

    async def _introduced(self, connection: socket.socket) -> Union[Connection, ShardWire]:
        """Return the connection once the other end has presented a certificate of the job."""
        try:
            speaks_tls = await _speaks_tls(connection)
        except BaseException:
            connection.close()
            raise
        if not speaks_tls:
            return await accept(connection, self._context, self._threads)
        loop, reader = asyncio.get_running_loop(), asyncio.StreamReader(p.MAX_LINE)
        protocol = asyncio.StreamReaderProtocol(reader)
        transport, _ = await loop.connect_accepted_socket(lambda: protocol, connection, ssl=self._context)
        return Connection(reader, asyncio.StreamWriter(transport, protocol, reader, loop))

    async def _serve_shards(self, wire: ShardWire) -> None:
        role = tls.peer_role(wire.certificate, self._uid)  # a closed connection has no certificate
        message = await within(FIRST_LINE_SECONDS, wire.receive())
        if message is None:
            return None
        if isinstance(message, p.Pull) and role == tls.AGENT and message.uid == self._uid:
            return await self._handler.pull(message, wire)
        return await wire.send(p.Refused(self._forbidden(role, message), 0, ""))

    async def _serve(self, wire: Connection) -> None:
        patience = FIRST_LINE_SECONDS
        try:
            while (message := await wire.receive(patience)) is not None:
                await self._route(message, wire)(message, wire)
                patience = IDLE_SECONDS
        except ProtocolError as error:
            await self._refuse(wire, str(error))

    def _route(self, message: p.Message, wire: Connection) -> Route:
        """Return the handler of a message.

        Raises:
            ProtocolError: If the other end may not send this message.
        """
        role = tls.peer_role(wire.certificate, self._uid)
        roles, route = self._routes.get(type(message), ((), self._answer))
        if role not in roles or getattr(message, "uid", "") != self._uid:
            raise ProtocolError(self._forbidden(role, message))
        return route

    async def _watch(self, message: p.Watch, wire: Connection) -> None:
        """Send the stream, and answer requests on its connection.

        Raises:
            ProtocolError: If a request is not allowed on the connection of a Watch.
        """
        stream = self._streams.start("watch", self._handler.watch(message, wire))
        # Close the connection with the stream: otherwise the other end would wait.
        stream.add_done_callback(lambda ended: None if ended.cancelled() else wire.close())
        try:
            while (call := await wire.receive()) is not None:
                if not isinstance(call, CALLS):
                    raise ProtocolError(f"a {type(call).__name__} can't come on the connection of a Watch")
                await self._route(call, wire)(call, wire)
        finally:
            stream.cancel()

    def _forbidden(self, role: str, message: Optional[p.Message]) -> str:
        return f"{role or 'a stranger'} may not send {type(message).__name__} to an agent of job {self._uid}"

    async def _answer(self, message: Answered, wire: Connection) -> None:
        await wire.send(await self._handler.answer(message))

    async def _refuse(self, wire: Connection, reason: str) -> None:
        with contextlib.suppress(OSError):
            await wire.send(p.Refused(reason, 0, ""))
            wire.writer.close()
            await within(1.0, wire.writer.wait_closed())


async def _speaks_tls(connection: socket.socket) -> bool:
    """Return whether the first byte is one of TLS. The byte is not consumed."""
    await readable(connection)
    return connection.recv(1, socket.MSG_PEEK) == b"\x16"
