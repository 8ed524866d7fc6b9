"""Connections that this agent opens to other agents of the job."""

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
def _checked_address(address: str) -> Iterator[None]:
    """Raise ConnectionError for an invalid address, so that callers treat it like an address that can't be reached.

    Addresses come from other processes, so they can be invalid.

    Raises:
        ConnectionError: If the address is invalid.
        OSError: If the code in the `with` block raises it.
    """
    try:
        yield
    except OSError:  # the error for a bad certificate is also a ValueError
        raise
    except (ValueError, OverflowError) as error:
        raise ConnectionError(f"{address!r:.100} is not an address") from error


class Connector:
    """Opens connections to agents of the job."""

    def __init__(self, context: ssl.SSLContext, uid: str) -> None:
        self._context, self._name = context, f"{uid}.agent"
        self._threads = concurrent.futures.ThreadPoolExecutor(THREADS, "shards")

    async def connect(self, address: str, timeout: float = CONNECT_SECONDS) -> Connection:
        """Connect to an agent of the job by TLS.

        Raises:
            OSError: If the connection is refused, the host is unreachable, or the certificate is wrong.
            asyncio.TimeoutError: If it takes too long.
        """
        with _checked_address(address):
            return await within(timeout, connect(address, self._context, self._name))

    async def for_shards(self, address: str, timeout: float = CONNECT_SECONDS) -> ShardWire:
        """Open a connection that transfers shards.

        Raises the same errors as `connect`.
        """
        with _checked_address(address):
            return await within(timeout, dial(address, self._context, self._name, self._threads))

    async def ask(self, address: str, message: p.Message, timeout: float = CONNECT_SECONDS) -> p.Message:
        """Open a connection, send one request, and return the answer.

        Raises:
            ConnectionError: If the connection is closed without an answer. Other kinds of OSError are possible, too.
            asyncio.TimeoutError: If it takes too long.
            ProtocolError: If the answer is not valid.
        """
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
    """Connections to agents that stay open for further requests, because a TLS handshake takes milliseconds."""

    def __init__(self, connector: Connector) -> None:
        self._connector = connector
        self._open: dict[str, Connection] = {}

    async def ask(self, address: str, line: bytes, timeout: float) -> bytes:
        """Send a request as a line, and return the line with the answer.

        Raises:
            OSError: If the connection fails.
            asyncio.TimeoutError: If it takes too long.
            ProtocolError: If the answer is too long.
        """
        return await within(timeout, self._ask(address, line))

    async def _ask(self, address: str, line: bytes) -> bytes:
        connection = self._open.pop(address, None)
        if connection is not None:
            try:
                return await self._exchange(address, connection, line)
            except (OSError, ProtocolError):
                pass  # the agent may have been restarted, so connect again
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
        for gone in [open_address for open_address, connection in self._open.items() if connection.over]:
            self._open.pop(gone).close()
        if address in self._open:  # a concurrent request has opened one
            wire.close()
        else:
            self._open[address] = wire
        return answer

    def close(self) -> None:
        for wire in self._open.values():
            wire.close()
        self._open.clear()
