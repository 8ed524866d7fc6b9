"""TLS connection from the operator or an agent to an agent, on asyncio, that carries lines of the protocol.

`worker_channel` has other classes for connections within a replica.
"""

from __future__ import annotations

import asyncio
import asyncio.sslproto
import contextlib
import contextvars
import functools
import ssl
from collections.abc import Iterator, Mapping
from typing import Any, Optional

from concertina_protocol import MAX_LINE, SILENCE_SECONDS, Message, ProtocolError, decode, encode
from concertina_protocol.addresses import split
from concertina_protocol.waiting import within

TLS_RECORD = 16 * 1024
_tls_buffer: contextvars.ContextVar[int] = contextvars.ContextVar("_tls_buffer", default=256 * 1024)


@contextlib.contextmanager
def small_tls_buffers() -> Iterator[None]:
    """Use small TLS buffers for the connections that are opened in this context.

    By default, asyncio allocates 256 KiB for each connection. A coordinator of a thousand members, or an operator of a
    thousand jobs, does not need that much: a connection took 300 KiB with the default size and 59 KiB with the small
    one.

    Other connections keep the default, because the size also limits how much is read in one iteration of the event
    loop. With smaller buffers, a watch of all pods was too slow.
    """
    _size_by_context()
    token = _tls_buffer.set(TLS_RECORD)
    try:
        yield
    finally:
        _tls_buffer.reset(token)


@functools.lru_cache(1)
def _size_by_context() -> None:
    """Make asyncio take the size of its TLS buffers from the context variable `_tls_buffer`.

    asyncio's class is patched only once per process, because each change of a class clears Python's attribute caches
    for that class.
    """
    size = property(lambda self: _tls_buffer.get())
    setattr(asyncio.sslproto.SSLProtocol, "max_size", size)  # noqa: B010 # its types don't know that field


async def connect(address: str, context: ssl.SSLContext, name: str) -> Connection:
    """Open a connection to the agent at host:port, and check that the agent's certificate has the name `name`.

    The caller limits the total time.

    Raises:
        OSError: If the connection is refused, the host is unreachable, or the certificate has another name.
    """
    return Connection(
        *await asyncio.open_connection(
            *split(address),
            ssl=context,
            server_hostname=name,
            limit=MAX_LINE,
            ssl_handshake_timeout=SILENCE_SECONDS,
        )
    )


def abort(writer: asyncio.StreamWriter) -> None:
    """Close a connection immediately, without a TLS shutdown. The other end sees at once that the stream is broken.

    The connection may be closed already. In that case, the `abort()` of asyncio's TLS transport raises AttributeError
    before Python 3.11.3 (Debian 12 has 3.11.2). This function ignores that error.
    """
    with contextlib.suppress(AttributeError):
        writer.transport.abort()


class Connection:
    """Connection that sends and receives messages, one per line."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer
        self._draining = asyncio.Lock()
        """Lock around `drain` of the writer.

        Several tasks send lines on the same connection. Before Python 3.11, only one task may wait in `drain`.
        """

    async def receive(self, timeout: Optional[float] = None) -> Optional[Message]:
        """Return the next message, or None at the end of the stream.

        Raises:
            ProtocolError: If the line is not a valid message.
            asyncio.TimeoutError: If no line arrives within `timeout` seconds.
            OSError: If the other end cannot be reached (such as ETIMEDOUT or EHOSTUNREACH).
        """
        line = await self.receive_line(timeout)
        return None if line is None else decode(line)

    async def receive_line(self, timeout: Optional[float] = None) -> Optional[bytes]:
        """Return the next line without decoding it, or None at the end of the stream.

        Raises the same errors as `receive`.
        """
        try:
            line = await within(timeout, self.read_line())
        except (ConnectionError, ssl.SSLError):
            return None
        return line if line.endswith(b"\n") else None

    async def read_line(self) -> bytes:
        """Return the next line. At the end of the stream, the line may lack its newline.

        Raises:
            ProtocolError: If the line is too long.
        """
        try:
            return await self.reader.readline()
        except ValueError as error:
            raise ProtocolError(f"a line exceeds the limit of {MAX_LINE} bytes") from error

    @property
    def certificate(self) -> Mapping[str, Any]:
        """Certificate of the other end, which TLS has verified."""
        return self.writer.get_extra_info("peercert") or {}

    def write(self, message: Message) -> None:
        """Add a message to the send buffer, without waiting until it is sent."""
        if not self.writer.is_closing():
            self.writer.write(encode(message))

    async def send(self, message: Message) -> None:
        """Send a message, and wait until the send buffer has space.

        Raises:
            OSError: If the connection is lost.
        """
        await self.send_line(encode(message))

    async def send_line(self, line: bytes) -> None:
        self.writer.write(line)
        await self.drain()

    async def drain(self) -> None:
        try:
            async with self._draining:
                await self.writer.drain()
        except ssl.SSLError as error:
            raise ConnectionError(str(error)) from error

    @property
    def over(self) -> bool:
        """True if this end or the other end has closed the connection."""
        return self.reader.at_eof() or self.writer.is_closing()

    def close(self) -> None:
        abort(self.writer)
