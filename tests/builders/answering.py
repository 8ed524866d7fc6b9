"""Agent as the operator meets it: a real TLS server that answers each line as the test tells it to."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

import concertina_protocol as protocol
from concertina.agents.authority import Authority
from concertina_protocol.connection import abort

LIMIT = 20.0  # only to give up
MASTER, UID, CREATED = b"m" * 32, "u1", 1_700_000_000.0
PREPARE = protocol.Prepare(UID, 1, "c1", ())
ASSIGN = protocol.Assign(UID, 1, "c1", (), "127.0.0.1:1", protocol.Restore(protocol.RestoreSource.FRESH))
Answer = Callable[[protocol.Message, asyncio.StreamWriter], Awaitable[None]]


@dataclass
class Heard:
    """Record of what the connections have sent."""

    changes: list[bool] = field(default_factory=list)

    def __call__(self, uid: str, at_once: bool) -> None:
        assert uid == UID
        self.changes.append(at_once)


@contextlib.asynccontextmanager
async def agent(
    answer: Answer, folder: Path, port: int = 0, master: bytes = MASTER, requests: int = 1
) -> AsyncIterator[str]:
    """Serve an agent that passes each request to `answer`, a limited number per connection; yield its address."""
    for name, content in Authority(master, UID, CREATED).secret_data().items():
        (folder / name).write_bytes(base64.b64decode(content))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "tls.crt", folder / "tls.key")
    context.load_verify_locations(folder / "ca.crt")
    context.verify_mode = ssl.CERT_REQUIRED
    writers: list[asyncio.StreamWriter] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        with contextlib.suppress(ConnectionError):
            for _ in range(requests):
                if line := await reader.readline():
                    await answer(protocol.decode(line), writer)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", port, ssl=context)
    try:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        for writer in writers:
            abort(writer)


def report(step: int = 0, state: str = "idle", instance: str = "i1", ready: bool = True) -> protocol.Report:
    progress = protocol.Progress(step, 10, 1.0, 1.0, 1.0, step, "training", 1.0)
    return protocol.Report("r0", instance, ready, 0, "", state, progress=progress)


async def forever(_: protocol.Message, writer: asyncio.StreamWriter) -> None:
    """Send reports again and again."""
    while True:
        writer.write(protocol.encode(report()))
        await writer.drain()
        await asyncio.sleep(0.05)
