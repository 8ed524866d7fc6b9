"""One end of a TLS connection on which lines of the protocol go, on asyncio: for the operator and for agents.

`worker_channel` has ends of its own."""

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
    """For connections that are made within: asyncio holds 256 KiB for each, which a coordinator of a thousand members
    and an operator of a thousand jobs have no use for (300 KiB a connection were measured, and 59 so). Others keep
    them: it is what they read at most in a turn of the event loop, and a watch of all pods fell behind with less."""
    _size_by_context()
    token = _tls_buffer.set(TLS_RECORD)
    try:
        yield
    finally:
        _tls_buffer.reset(token)


@functools.lru_cache(1)
def _size_by_context() -> None:
    """Once: to change a class makes Python forget what it has looked up in it."""
    size = property(lambda self: _tls_buffer.get())
    setattr(asyncio.sslproto.SSLProtocol, "max_size", size)  # noqa: B010 # its types don't know that field


async def connect(address: str, context: ssl.SSLContext, name: str) -> Connection:
    """To the agent at host:port, whose certificate must be of that name. Raises OSError (refused, unreachable, another
    certificate); how long it may take in all is for the caller to say."""
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
    """Close a connection immediately, without a TLS farewell: the other end sees a broken stream at once.

    The connection may be closed already. A TLS transport forgets its protocol when it is closed for the second time.
    Before Python 3.11.3 (Debian 12 has 3.11.2) its `abort()` then raises AttributeError."""
    with contextlib.suppress(AttributeError):
        writer.transport.abort()


class Connection:
    """Lines in, lines out."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer
        self._draining = asyncio.Lock()
        """A stream and answers go out beside each other, and before Python 3.11 only one of them may wait."""

    async def receive(self, timeout: Optional[float] = None) -> Optional[Message]:
        """The next message; None at the end of the stream. Raises ProtocolError, asyncio.TimeoutError, and OSError
        where the other end is out of reach (ETIMEDOUT, EHOSTUNREACH ...)."""
        line = await self.receive_line(timeout)
        return None if line is None else decode(line)

    async def receive_line(self, timeout: Optional[float] = None) -> Optional[bytes]:
        """The same, not yet read."""
        try:
            line = await within(timeout, self.read_line())
        except (ConnectionError, ssl.SSLError):
            return None
        return line if line.endswith(b"\n") else None

    async def read_line(self) -> bytes:
        """Without its end where the stream ends. Raises ProtocolError where it is too long."""
        try:
            return await self.reader.readline()
        except ValueError as error:
            raise ProtocolError(f"a line over the limit of {MAX_LINE} bytes") from error

    @property
    def certificate(self) -> Mapping[str, Any]:
        """The other end's, which has been checked."""
        return self.writer.get_extra_info("peercert") or {}

    def write(self, message: Message) -> None:
        """Buffered, without waiting."""
        if not self.writer.is_closing():
            self.writer.write(encode(message))

    async def send(self, message: Message) -> None:
        """Raises OSError when the connection is gone."""
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
        """Whether either side has closed it."""
        return self.reader.at_eof() or self.writer.is_closing()

    def close(self) -> None:
        abort(self.writer)
