"""One connection to an agent: one request, and its answer or its stream."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field

import concertina_protocol as protocol
from concertina.agents.bounds import bounded
from concertina.turns import Turns
from concertina_protocol.addresses import family, split
from concertina_protocol.codec.typed_json import ProtocolError
from concertina_protocol.connection import Connection

log = logging.getLogger(__name__)
CALL_SECONDS = 5.0
"""An agent that has not answered by then counts as not having got the request."""
RELAY_SECONDS = 2.0
"""Between two answers by way of one agent. The same said twice does no harm, and a round waits for those it names."""
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
    return _answer(answer, type(request).__name__, address)


async def relay(
    identity: Identity, address: str, line: str, to: Mapping[str, str]
) -> AsyncIterator[tuple[str, Answer]]:
    """What those of `to` (replica to address) answer, as it comes, when the agent at `address` passes on `line`, which
    is a Prepare or an Assign. Ends where no answer comes for RELAY_SECONDS, and raises nothing: who has not answered by
    then must be asked in another way."""
    candidates = tuple(protocol.Candidate(replica, each) for replica, each in to.items())
    passed_on, waiting = protocol.Relay(identity.uid, line, candidates), dict(to)
    try:
        async with connection(identity, address, passed_on) as opened, asyncio.timeout(RELAY_SECONDS) as quiet:
            while waiting:
                told = await receive(opened, address)
                if not isinstance(told, protocol.Relayed):
                    raise CallError(f"{address} answered a Relay with a {type(told).__name__}")
                if told.replica not in waiting or told.error:
                    continue
                answer = bounded(protocol.decode(told.line.encode()))
                yield told.replica, _answer(answer, "Relay", waiting.pop(told.replica))
                quiet.reschedule(asyncio.get_running_loop().time() + RELAY_SECONDS)
    except Exception as error:  # whatever it is, the others must be asked: a call that ended unseen is sent once
        why = str(error) or type(error).__name__
        log.info("%d of %d that %s was to ask have not answered: %s", len(waiting), len(to), address, why)


def _answer(message: protocol.Message, what: str, address: str) -> Answer:
    if not isinstance(message, protocol.Prepared | protocol.Accepted | protocol.Refused):
        raise CallError(f"{address} answered a {what} with a {type(message).__name__}")
    return message
