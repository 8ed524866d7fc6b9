"""One connection to an agent: one request, and its answer or its stream."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

import concertina_protocol as protocol
from concertina.agents.bounds import bounded
from concertina.turns import Turns
from concertina_protocol.addresses import family, split
from concertina_protocol.codec.typed_json import ProtocolError
from concertina_protocol.connection import Connection

CALL_SECONDS = 5.0
"""An agent that has not answered by then counts as not having got the request."""
DIAL_SECONDS = protocol.SILENCE_SECONDS
"""For a connection to be made, and for its handshake, each."""
HANDSHAKES = 64
"""Under way at once, of all jobs. A handshake costs a millisecond or two: a new operator that began thousands of them
together would finish none of them in time."""

Request = protocol.Prepare | protocol.Assign | protocol.Drain | protocol.Save
Answer = protocol.Prepared | protocol.Accepted | protocol.Refused


class CallError(Exception):
    """No usable answer; a sentence."""


class ClosedError(CallError):
    """The agent's host closed the connection."""


@dataclass(frozen=True)
class Identity:
    """What makes a connection one between this operator and this job's agents."""

    uid: str
    context: ssl.SSLContext
    handshakes: Turns = field(default_factory=lambda: Turns(HANDSHAKES))
    """Of all jobs together; turns of its own where nobody shares them."""

    @property
    def agent_name(self) -> str:
        return f"{self.uid}.agent"


@contextlib.asynccontextmanager
async def connection(
    identity: Identity, address: str, message: protocol.Message, begun: Callable[[], None] = lambda: None
) -> AsyncIterator[Connection]:
    """On which `message` has been sent. `begun` is called when the handshake's turn has come: no time before that
    speaks against the agent. Raises OSError, TimeoutError."""
    async with asyncio.timeout(DIAL_SECONDS):  # wait_for loses a cancellation that meets an error, before Python 3.12
        dialled = await dial(*split(address))
    async with contextlib.AsyncExitStack() as turn:
        try:
            await turn.enter_async_context(identity.handshakes.turn(identity.uid))
        except BaseException:
            dialled.close()
            raise
        begun()
        async with asyncio.timeout(DIAL_SECONDS):
            opened = await _secured(dialled, identity)
    try:
        await opened.send(message)
        yield opened
    finally:
        opened.close()


async def dial(host: str, port: int) -> socket.socket:
    """A TCP connection. Raises OSError."""
    made = socket.socket(family(host), socket.SOCK_STREAM)
    made.setblocking(False)
    try:
        await asyncio.get_running_loop().sock_connect(made, (host, port))
    except BaseException:
        made.close()
        raise
    return made


async def _secured(dialled: socket.socket, identity: Identity) -> Connection:
    """Closes the socket where the handshake fails."""
    streams = await asyncio.open_connection(
        sock=dialled, ssl=identity.context, server_hostname=identity.agent_name, limit=protocol.MAX_LINE
    )
    return Connection(*streams)


async def receive(connection: Connection, address: str) -> protocol.Message:
    """The next line; raises ClosedError where the stream ends, CallError where it is none of this protocol."""
    try:
        message = await connection.receive()
    except ProtocolError as error:
        raise CallError(f"{address} sent what is not understood: {error}") from error
    if message is None:
        raise ClosedError(f"{address} closed the connection")
    return bounded(message)


async def call(identity: Identity, address: str, request: Request) -> Answer:
    """The agent's answer; raises CallError where it does not come within CALL_SECONDS of the request."""
    try:
        async with connection(identity, address, request) as opened, asyncio.timeout(CALL_SECONDS):
            answer = await receive(opened, address)
    except TimeoutError as error:
        raise CallError(f"{address} did not answer within {CALL_SECONDS:g} s") from error
    except (OSError, ssl.SSLError) as error:
        raise CallError(f"{address} can't be reached: {error}") from error
    except CallError:
        raise
    except Exception as error:
        # A call that ended unseen would be under way for ever, and is sent once.
        raise CallError(f"the call of {address} failed: {type(error).__name__}: {error}") from error
    if not isinstance(answer, protocol.Prepared | protocol.Accepted | protocol.Refused):
        raise CallError(f"{address} answered a {type(request).__name__} with a {type(answer).__name__}")
    return answer
