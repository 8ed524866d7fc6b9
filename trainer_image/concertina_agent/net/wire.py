"""One end of a TLS connection as messages: lines in, lines out, raw bytes after a ShardHeader."""

from __future__ import annotations

import asyncio
import concurrent.futures
import ssl
from collections.abc import Mapping
from typing import Any, Optional, Union

import concertina_protocol as p
from concertina_agent.net.shard_wire import THREADS, ShardWire, dial
from concertina_protocol.addresses import split
from concertina_protocol.typed_json import ProtocolError

CONNECT_SECONDS = 3.0
HIGH_WATER = 1 << 20


class Wire:
    """A connection that speaks `protocol`."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def receive(self, timeout: Optional[float] = None) -> Optional[p.Message]:
        """The next message; None at the end of the stream. Raises ProtocolError, asyncio.TimeoutError."""
        try:
            line = await asyncio.wait_for(self.reader.readline(), timeout)
        except ValueError as error:
            raise ProtocolError(f"a line over the limit of {p.MAX_LINE} bytes") from error
        except (ConnectionError, ssl.SSLError):
            return None
        return p.decode(line) if line.endswith(b"\n") else None

    @property
    def certificate(self) -> Mapping[str, Any]:
        """The other end's, which has been checked."""
        return self.writer.get_extra_info("peercert") or {}

    def write(self, message: p.Message) -> None:
        """Buffered, without waiting."""
        if not self.writer.is_closing():
            self.writer.write(p.encode(message))

    async def send(self, message: p.Message) -> None:
        """Raises OSError when the connection is gone."""
        self.writer.write(p.encode(message))
        await self.drain()

    async def drain(self) -> None:
        try:
            await self.writer.drain()
        except ssl.SSLError as error:
            raise ConnectionError(str(error)) from error

    def close(self) -> None:
        """At once, without the TLS farewell: the other end sees a broken stream immediately."""
        transport: Union[asyncio.Transport, asyncio.WriteTransport] = self.writer.transport
        transport.abort()


class Dialer:
    """Opens connections to the job's agents."""

    def __init__(self, context: ssl.SSLContext, uid: str) -> None:
        self._context, self._name = context, f"{uid}.agent"
        self._threads = concurrent.futures.ThreadPoolExecutor(THREADS, "shards")

    async def connect(self, address: str, timeout: float = CONNECT_SECONDS) -> Wire:
        """Raises OSError (refused, unreachable, a wrong certificate) or asyncio.TimeoutError."""
        opening = asyncio.open_connection(
            *split(address), ssl=self._context, server_hostname=self._name, limit=p.MAX_LINE
        )
        return Wire(*await asyncio.wait_for(opening, timeout))

    async def for_shards(self, address: str, timeout: float = CONNECT_SECONDS) -> ShardWire:
        """Raises as `connect` does."""
        return await asyncio.wait_for(dial(address, self._context, self._name, self._threads), timeout)

    async def ask(self, address: str, message: p.Message, timeout: float = CONNECT_SECONDS) -> p.Message:
        """One request on a connection of its own. Raises OSError, asyncio.TimeoutError or ProtocolError."""
        wire = await self.connect(address, timeout)
        try:
            await wire.send(message)
            answer = await wire.receive(timeout)
        finally:
            wire.close()
        if answer is None:
            raise ConnectionError(f"{address} closed the connection without an answer")
        return answer


class Pinger:
    """Asks agents whether they are there, over connections that are kept open: a handshake costs milliseconds."""

    def __init__(self, dialer: Dialer, uid: str) -> None:
        self._dialer, self._ping = dialer, p.Ping(uid)
        self._open: dict[str, Wire] = {}

    async def reachable(self, address: str, timeout: float) -> bool:
        try:
            return await asyncio.wait_for(self._reachable(address), timeout)
        except (OSError, asyncio.TimeoutError, ProtocolError):
            return False

    async def _reachable(self, address: str) -> bool:
        kept = self._open.pop(address, None)
        if kept is not None:
            try:
                return await self._exchange(address, kept)
            except (OSError, ProtocolError):
                pass  # it may have been restarted: look again
        return await self._exchange(address, await self._dialer.connect(address))

    async def _exchange(self, address: str, wire: Wire) -> bool:
        try:
            await wire.send(self._ping)
            if not isinstance(await wire.receive(), p.Accepted):
                raise ConnectionError("no answer to a Ping")
        except BaseException:
            wire.close()
            raise
        self._open[address] = wire
        return True

    def close(self) -> None:
        for wire in self._open.values():
            wire.close()
        self._open.clear()
