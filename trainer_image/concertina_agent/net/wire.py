"""Connections to the other agents of the job."""

from __future__ import annotations

import concurrent.futures
import contextlib
import ssl
from collections.abc import Iterator

import concertina_protocol as p
from concertina_agent.net.shard_wire import THREADS, ShardWire, dial
from concertina_protocol.codec.typed_json import ProtocolError
from concertina_protocol.connection import Connection, connect
from concertina_protocol.waiting import within

CONNECT_SECONDS = 3.0


@contextlib.contextmanager
def _of_an_address(address: str) -> Iterator[None]:
    """One that is none is out of reach like any other: others have written it."""
    try:
        yield
    except OSError:  # a certificate that is refused is a ValueError too
        raise
    except (ValueError, OverflowError) as error:
        raise ConnectionError(f"{address:.100} is no address") from error


class Connector:
    """Opens connections to the job's agents."""

    def __init__(self, context: ssl.SSLContext, uid: str) -> None:
        self._context, self._name = context, f"{uid}.agent"
        self._threads = concurrent.futures.ThreadPoolExecutor(THREADS, "shards")

    async def connect(self, address: str, timeout: float = CONNECT_SECONDS) -> Connection:
        """Raises OSError (refused, unreachable, a wrong certificate) or asyncio.TimeoutError."""
        with _of_an_address(address):
            return await within(timeout, connect(address, self._context, self._name))

    async def for_shards(self, address: str, timeout: float = CONNECT_SECONDS) -> ShardWire:
        """Raises as `connect` does."""
        with _of_an_address(address):
            return await within(timeout, dial(address, self._context, self._name, self._threads))

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


class KeptConnections:
    """One request after another over connections to agents that stay open: a handshake costs milliseconds."""

    def __init__(self, connector: Connector) -> None:
        self._connector = connector
        self._open: dict[str, Connection] = {}

    async def ask(self, address: str, line: bytes, timeout: float) -> bytes:
        """The line that answers. Raises OSError, asyncio.TimeoutError or ProtocolError."""
        return await within(timeout, self._ask(address, line))

    async def _ask(self, address: str, line: bytes) -> bytes:
        kept = self._open.pop(address, None)
        if kept is not None:
            try:
                return await self._exchange(address, kept, line)
            except (OSError, ProtocolError):
                pass  # it may have been restarted: look again
        return await self._exchange(address, await self._connector.connect(address), line)

    async def _exchange(self, address: str, wire: Connection, line: bytes) -> bytes:
        try:
            await wire.send_line(line)
            answer = await wire.receive_line()
            if answer is None:
                raise ConnectionError(f"{address} closed the connection without an answer")
        except BaseException:
            wire.close()
            raise
        for gone in [other for other, kept in self._open.items() if kept.over]:
            self._open.pop(gone).close()
        if address in self._open:  # of another request at the same time
            wire.close()
        else:
            self._open[address] = wire
        return answer

    def close(self) -> None:
        for wire in self._open.values():
            wire.close()
        self._open.clear()
