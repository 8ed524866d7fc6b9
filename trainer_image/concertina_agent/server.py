"""The agent's side of every connection: who asks, whether they may, and the streams that stay open."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Protocol, Union

from concertina_agent import protocol as p
from concertina_agent import tls
from concertina_agent.typed_json import ProtocolError
from concertina_agent.wire import Wire

MAX_CONNECTIONS = 2048
"""Open at a time; more are closed at once. A lead has one of each member, and each agent may ping each other."""
HANDSHAKE_SECONDS = 5.0
FIRST_LINE_SECONDS = 10.0
IDLE_SECONDS = 600.0
"""A connection that has been answered may carry the next request; after this long it is closed."""

Answered = Union[p.Prepare, p.Assign, p.Drain, p.Save, p.Ping]


class Handler(Protocol):
    """What the server asks of the agent. Streams run until the connection or the task ends."""

    async def answer(self, message: Answered) -> p.Message: ...

    async def watch(self, wire: Wire) -> None: ...

    async def join(self, message: p.Join, wire: Wire) -> None: ...

    async def index(self, message: p.Index, wire: Wire) -> None: ...

    async def pull(self, message: p.Pull, wire: Wire) -> None: ...


class Server:
    def __init__(self, uid: str, context: ssl.SSLContext, handler: Handler) -> None:
        self._uid, self._context, self._handler = uid, context, handler
        self._open: set[asyncio.Task[None]] = set()
        self._seen: Callable[[], tuple[int, str]] = lambda: (0, "")
        handle = handler
        self._routes: Mapping[type, tuple[str, Callable[[Any, Wire], Awaitable[None]]]] = {
            **dict.fromkeys((p.Prepare, p.Assign, p.Drain, p.Save), (tls.OPERATOR, self._answer)),
            p.Watch: (tls.OPERATOR, lambda message, wire: handle.watch(wire)),
            p.Ping: (tls.AGENT, self._answer),
            p.Join: (tls.AGENT, handle.join),
            p.Index: (tls.AGENT, handle.index),
            p.Pull: (tls.AGENT, handle.pull),
        }

    async def start(self, host: str, port: int) -> asyncio.AbstractServer:
        """Raises OSError where the address can't be had."""
        return await asyncio.start_server(
            self._connected, host, port, ssl=self._context, limit=p.MAX_LINE,
            ssl_handshake_timeout=HANDSHAKE_SECONDS, backlog=512,
        )  # fmt: skip

    async def close(self) -> None:
        for task in self._open:
            task.cancel()
        await asyncio.gather(*self._open, return_exceptions=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        wire, task = Wire(reader, writer), asyncio.current_task()
        if task is None or len(self._open) >= MAX_CONNECTIONS:
            return wire.close()
        self._open.add(task)
        try:
            await self._serve(wire)
        except (OSError, ssl.SSLError, asyncio.TimeoutError):
            pass
        finally:
            self._open.discard(task)
            wire.close()
        return None

    async def _serve(self, wire: Wire) -> None:
        role, patience = tls.peer_role(wire.writer, self._uid), FIRST_LINE_SECONDS
        while True:
            try:
                message = await wire.receive(patience)
            except ProtocolError as error:
                return await self._refuse(wire, str(error))
            if message is None:
                return None
            who, route = self._routes.get(type(message), ("", self._answer))
            if not who or role != who or getattr(message, "uid", "") != self._uid:
                reason = f"{role or 'a stranger'} may not send {type(message).__name__} to an agent of job {self._uid}"
                return await self._refuse(wire, reason)
            await route(message, wire)
            patience = IDLE_SECONDS

    async def _answer(self, message: Answered, wire: Wire) -> None:
        await wire.send(await self._handler.answer(message))

    async def _refuse(self, wire: Wire, reason: str) -> None:
        with contextlib.suppress(OSError):
            await wire.send(p.Refused(reason, 0, ""))
            wire.writer.close()
            await asyncio.wait_for(wire.writer.wait_closed(), 1.0)
