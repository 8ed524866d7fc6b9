"""HTTP server for GET /metrics, without TLS, in a thread with an event loop of its own.

Clients cannot slow down the agent, however often they send requests. Each connection carries one request. The duration
and the size of the request are limited. The servers in the standard library limit only the time of each read, so a
client that sends a byte now and then could keep a connection for hours.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import hmac
import socket
import threading
from collections.abc import Awaitable, Callable
from typing import Optional, Union

from concertina_agent.metrics.exposition import CONTENT_TYPE
from concertina_protocol.addresses import family
from concertina_protocol.log import log_event
from concertina_protocol.waiting import within

PATH = "/metrics"
MAX_CONNECTIONS = 32
"""Maximum number of open connections.

If the number is exceeded, the server closes the oldest connection of the host with the most connections.
"""
MAX_HEAD = 8192
"""Maximum size of a request in bytes."""
REQUEST_SECONDS, ANSWER_SECONDS = 5.0, 10.0
PAUSE_SECONDS = 0.005
"""Seconds between two accepted connections. This limits the processor time that many connections can use."""
ACCEPT_AGAIN_SECONDS = 0.1


class Endpoint:
    """HTTP server for the metrics of this pod."""

    def __init__(self, host: str, port: int, token: Optional[str], text: Callable[[], Awaitable[bytes]]) -> None:
        """Prepare the server. The method `start` makes it listen.

        Args:
            host: Address to listen on.
            port: Port to listen on.
            token: Token that clients must present. If it is None, clients need no token. If it is an empty string, a
                token is required but missing in the pod, and every client is refused.
            text: Function that returns the metrics. It is awaited in the server's thread.
        """
        self._address, self._text = (host, port), text
        self._expected = None if token is None else f"Bearer {token}".encode()
        self._open: dict[asyncio.Task[None], str] = {}
        """Host at the other end of each open connection, keyed by the connection's task, in the order of acceptance."""

    def start(self) -> None:
        """Listen, and serve requests in a thread.

        Raises OSError if the address is not available.
        """
        host, _ = self._address
        listening = socket.create_server(self._address, family=family(host), backlog=128)
        listening.setblocking(False)
        threading.Thread(target=self._run, args=(listening,), name="metrics", daemon=True).start()

    def _run(self, listening: socket.socket) -> None:
        try:
            asyncio.run(self._accept_all(listening))
        except Exception as error:  # the agent continues without metrics
            log_event("metrics_ended", error=f"{type(error).__name__}: {error}")

    async def _accept_all(self, listening: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, (host, *_) = await loop.sock_accept(listening)
            except OSError:  # no file descriptor is available: try again later
                await asyncio.sleep(ACCEPT_AGAIN_SECONDS)
                continue
            task = loop.create_task(self._connected(connection))
            self._open[task] = host
            task.add_done_callback(lambda gone: self._open.pop(gone, None))
            if len(self._open) > MAX_CONNECTIONS:
                self._close_oldest_of_busiest()
            await asyncio.sleep(PAUSE_SECONDS)

    def _close_oldest_of_busiest(self) -> None:
        ((busiest, _),) = collections.Counter(self._open.values()).most_common(1)
        task = next(task for task, host in self._open.items() if host == busiest)
        del self._open[task]
        task.cancel()

    async def _connected(self, connection: socket.socket) -> None:
        try:
            reader, writer = await asyncio.open_connection(sock=connection, limit=MAX_HEAD)
        except BaseException:
            connection.close()
            raise
        try:
            answer = await within(REQUEST_SECONDS, self._answer(reader))
            writer.write(answer)
            await within(ANSWER_SECONDS, writer.drain())
            writer.close()
            await within(ANSWER_SECONDS, writer.wait_closed())
        except (OSError, asyncio.TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass  # the client has closed the connection or does not respond
        finally:
            with contextlib.suppress(OSError, RuntimeError):
                writer.transport.abort()

    async def _answer(self, reader: asyncio.StreamReader) -> bytes:
        head = await reader.readuntil(b"\r\n\r\n")
        first, *fields = head.decode("latin-1").split("\r\n")
        words = first.split(" ")
        if len(words) != 3 or not words[2].startswith("HTTP/1."):
            return _response("400 Bad Request", "this is not an HTTP/1.1 request⏎")
        method, target, _ = words
        if target.partition("?")[0] != PATH:
            return _response("404 Not Found", f"the metrics of this pod are at {PATH}⏎")
        if method not in ("GET", "HEAD"):
            return _response("405 Method Not Allowed", "only GET and HEAD are supported⏎", "Allow: GET, HEAD")
        if self._expected is not None and not self._is_authorized(fields):
            return _response("401 Unauthorized", self._missing_token_message(), "WWW-Authenticate: Bearer")
        try:
            body = await self._text()
        except asyncio.TimeoutError:
            return _response("503 Service Unavailable", "the agent is too busy to answer: try again⏎")
        except Exception as error:  # other requests are still answered, and training continues
            log_event("metrics_failed", error=f"{type(error).__name__}: {error}")
            return _response("500 Internal Server Error", "an internal error occurred: see the agent's log⏎")
        answer = _response("200 OK", body, f"Content-Type: {CONTENT_TYPE}")
        return answer if method == "GET" else answer[: len(answer) - len(body)]

    def _is_authorized(self, fields: list[str]) -> bool:
        assert self._expected is not None
        named = (field.partition(":") for field in fields)
        credentials = next((value.strip() for name, _, value in named if name.strip().lower() == "authorization"), "")
        return hmac.compare_digest(credentials.encode("latin-1"), self._expected) and self._expected != b"Bearer "

    def _missing_token_message(self) -> str:
        if self._expected == b"Bearer ":
            return "metrics need a token, but this pod has none: the Secret with the token is not in its namespace⏎"
        return "the metrics of this pod need a token: send the header Authorization: Bearer TOKEN⏎"


def _response(status: str, body: Union[bytes, str], *fields: str) -> bytes:
    content = body.encode() if isinstance(body, str) else body
    if not any(field.startswith("Content-Type") for field in fields):
        fields = (*fields, "Content-Type: text/plain; charset=utf-8")
    head = (f"HTTP/1.1 {status}", *fields, f"Content-Length: {len(content)}", "Connection: close", "", "")
    return "\r\n".join(head).encode() + content
