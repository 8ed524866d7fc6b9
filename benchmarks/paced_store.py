"""Proxy before an S3 server on the same machine that limits how fast all responses together are sent.

A store that is not limited shares the cores with its reader, and sends faster than most networks. With a limit, a
benchmark shows how much of a network's speed a reader uses.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Iterator
from urllib.parse import urlsplit

CHUNK_BYTES = 256 * 2**10
"""Size in bytes of the parts in which responses are forwarded."""


class Link:
    """Network link that all connections share."""

    def __init__(self, bytes_per_second: float) -> None:
        self._bytes_per_second = bytes_per_second
        self._free_at = 0.0

    async def sent(self, size: int) -> None:
        """Wait until the link has sent `size` bytes after those of earlier calls."""
        self._free_at = max(self._free_at, time.monotonic()) + size / self._bytes_per_second
        await asyncio.sleep(self._free_at - time.monotonic())


@contextlib.contextmanager
def paced(endpoint: str, mebibytes_per_second: float) -> Iterator[str]:
    """Serve `endpoint` at another URL, and yield that URL. The server runs in a thread of this process."""
    upstream, loop = urlsplit(endpoint), asyncio.new_event_loop()
    link = Link(mebibytes_per_second * 2**20)

    async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, limit: Link | None) -> None:
        try:
            while data := await reader.read(CHUNK_BYTES):
                if limit:
                    await limit.sent(len(data))
                writer.write(data)
                await writer.drain()
        except ConnectionError:
            pass  # A client that ended closes its connections without notice.
        finally:
            writer.close()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        store_reader, store_writer = await asyncio.open_connection(upstream.hostname, upstream.port, limit=CHUNK_BYTES)
        await asyncio.gather(forward(reader, store_writer, None), forward(store_reader, writer, link))

    server = loop.run_until_complete(asyncio.start_server(connected, "127.0.0.1", 0))
    port = server.sockets[0].getsockname()[1]
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        yield f"{upstream.scheme}://127.0.0.1:{port}"
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
