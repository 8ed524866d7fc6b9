"""Server of the agent, which authorizes each request, passes it to its Handler, and serves streams."""

from __future__ import annotations

import asyncio
import collections
import concurrent.futures
import contextlib
import socket
import ssl
from collections.abc import Callable, Coroutine, Mapping
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
"""Maximum number of connections of the job's own operator and agents. A further connection is closed at once.

A coordinator has one connection to each member, and each agent may send a Ping to every other agent.
"""
MAX_STRANGERS = 256
"""Maximum number of connections whose other end has not presented a certificate yet.

If the number is exceeded, the server closes the oldest such connection of the address with the most connections. A
legitimate client presents its certificate within milliseconds, so it can connect even while an attacker opens many idle
connections (decision "Limits on unauthenticated connections").
"""
HANDSHAKE_SECONDS = 5.0
"""Seconds within which the other end of a new connection must present its certificate."""
FIRST_LINE_SECONDS = 10.0
ACCEPT_AGAIN_SECONDS = 0.1
IDLE_SECONDS = 600.0
"""Seconds after which a connection without requests is closed."""

Answered = Union[p.Prepare, p.Assign, p.Release, p.Drain, p.Save, p.Ping, p.Trace]
Route = Callable[[Any, Connection], Coroutine[Any, Any, None]]
CALLS = (p.Prepare, p.Assign, p.Release, p.Drain, p.Save)
"""Requests that the operator may send on the connection on which it receives Reports."""


class Handler(Protocol):
    """Interface to the part of the agent that answers requests.

    A method that serves a stream returns when the connection or the method's task ends. While Reports are sent on a
    connection, further requests on the same connection are answered.
    """

    async def answer(self, message: Answered) -> p.Message: ...

    async def watch(self, message: p.Watch, wire: Connection) -> None: ...

    async def learn(self, message: p.Learn, wire: Connection) -> None: ...

    async def relay(self, message: p.Relay, wire: Connection) -> None: ...

    async def join(self, message: p.Join, wire: Connection) -> None:
        """Serve the stream of a member that has joined the round.

        Raises ProtocolError if the member sends an invalid message.
        """

    async def index(self, message: p.Index, wire: Connection) -> None: ...

    async def pull(self, message: p.Pull, wire: ShardWire) -> None: ...


class AgentServer:
    """Server for connections of the operator and of the job's agents."""

    def __init__(self, uid: str, context: ssl.SSLContext, handler: Handler, tasks: TaskGroup) -> None:
        self._uid, self._context, self._handler, self._tasks = uid, context, handler, tasks
        self._strangers: dict[asyncio.Task[None], str] = {}
        """Address of the other end of each connection without a certificate, keyed by task, the oldest first."""
        self._connections = TaskGroup()
        """Tasks of all connections, including those without a certificate."""
        self._streams = TaskGroup()
        """Tasks that send the streams of Watch requests. The tasks of their connections wait for further requests."""
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
        # Accepted connections inherit TCP_NODELAY. asyncio does not set it, because the protocol of this socket is 0.
        # Without it, an answer after a report waits until the operator acknowledges the report, for up to 40 ms.
        self._listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
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
            except OSError:  # no file descriptor is available: try again later
                await asyncio.sleep(ACCEPT_AGAIN_SECONDS)
                continue
            connection.setblocking(False)
            task = self._connections.start("connection", self._connected(connection))
            self._strangers[task] = address
            task.add_done_callback(lambda gone: self._strangers.pop(gone, None))
            if len(self._strangers) > MAX_STRANGERS:
                self._close_oldest_of_busiest()
            await asyncio.sleep(0)  # while many connections arrive, let other tasks run too

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
        """Return a new connection once its other end has presented a certificate of the job."""
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
        role = tls.peer_role(wire.certificate, self._uid)  # a connection that was closed has no certificate
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
        """Return the method of Handler that answers a message.

        Raises:
            ProtocolError: If the other end may not send this message.
        """
        role = tls.peer_role(wire.certificate, self._uid)
        roles, route = self._routes.get(type(message), ((), self._answer))
        if role not in roles or getattr(message, "uid", "") != self._uid:
            raise ProtocolError(self._forbidden(role, message))
        return route

    async def _watch(self, message: p.Watch, wire: Connection) -> None:
        """Send Reports to the operator, and answer the operator's further requests on the same connection.

        Raises:
            ProtocolError: If a request is not allowed on this connection.
        """
        stream = self._streams.start("watch", self._handler.watch(message, wire))
        # When the stream ends, close the connection. Otherwise the other end would wait forever.
        stream.add_done_callback(lambda ended: None if ended.cancelled() else wire.close())
        try:
            while (call := await wire.receive()) is not None:
                if not isinstance(call, (*CALLS, p.Relay)):
                    raise ProtocolError(f"a {type(call).__name__} is not allowed on the connection of a Watch")
                answering = self._route(call, wire)(call, wire)
                if isinstance(call, p.Relay):  # the next request must not wait for the agents that are asked
                    self._streams.start("relay", answering)
                else:
                    await answering
        finally:
            stream.cancel()

    def _forbidden(self, role: str, message: Optional[p.Message]) -> str:
        return f"{role or 'an unknown peer'} may not send {type(message).__name__} to an agent of job {self._uid}"

    async def _answer(self, message: Answered, wire: Connection) -> None:
        await wire.send(await self._handler.answer(message))

    async def _refuse(self, wire: Connection, reason: str) -> None:
        with contextlib.suppress(OSError):
            await wire.send(p.Refused(reason, 0, ""))
            wire.writer.close()
            await within(1.0, wire.writer.wait_closed())


async def _speaks_tls(connection: socket.socket) -> bool:
    """Return whether a connection's first byte begins a TLS handshake. The byte is not consumed."""
    await readable(connection)
    return connection.recv(1, socket.MSG_PEEK) == b"\x16"
