"""One connection to an agent: one request, and its answer or its stream."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import logging
import socket
import ssl
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field

import concertina_protocol as protocol
from concertina.agents.agent_lines import BoundedConnection, HeldLines
from concertina.agents.allowance import Allowance
from concertina.agents.bounds import LARGEST_LINE, MOST_SEPARATORS, PIECE_BYTES, LineLimits, bounded, cut, separators
from concertina.turns import FairLimiter
from concertina_protocol.addresses import family, split
from concertina_protocol.codec.typed_json import ProtocolError
from concertina_protocol.connection import Connection, small_tls_buffers

log = logging.getLogger(__name__)
CALL_SECONDS = 5.0
"""An agent that has not answered by then counts as not having got the request."""
RELAY_SECONDS = 2.0
"""Between two answers by way of one agent. The same said twice does no harm, and a round waits for those it names."""
DIAL_SECONDS = protocol.SILENCE_SECONDS
"""For a connection to be made, and for its handshake, each."""
KEPT_SECONDS = 10.0
"""After an answer. An Assign follows its Prepare within moments, and a handshake costs either end a millisecond."""
NO_DESCRIPTOR_SECONDS = 0.2
"""Until the next try where this process has no file descriptor left."""
HANDSHAKES = 64
"""Under way at once, of all jobs. A handshake costs a millisecond or two: a new operator that began thousands of them
together would finish none of them in time."""
SLOT_SECONDS = 0.25
"""For which a handshake counts among them. One that takes longer waits for the other end, which costs nothing, and goes
on without a slot until DIAL_SECONDS."""

Waits = Callable[[bool], None]
"""Called with True when a dialled connection waits for its turn to shake hands, and with False once it has it: no time
between speaks against the agent."""
Request = protocol.Prepare | protocol.Assign | protocol.Drain | protocol.Save
Answer = protocol.Prepared | protocol.Accepted | protocol.Refused


class CallError(Exception):
    """No usable answer; a sentence."""


class ClosedError(CallError):
    """The agent's host closed the connection."""


class IdleConnections:
    """On which a call was answered, for the next one: by address, one each, for KEPT_SECONDS."""

    def __init__(self) -> None:
        self._open: dict[str, tuple[Connection, asyncio.TimerHandle]] = {}

    def take(self, address: str) -> Connection | None:
        if address not in self._open:
            return None
        kept, timer = self._open.pop(address)
        timer.cancel()
        if kept.over:
            kept.close()
            return None
        return kept

    def put(self, address: str, connection: Connection) -> None:
        self.drop(address)
        timer = asyncio.get_running_loop().call_later(KEPT_SECONDS, self.drop, address)
        self._open[address] = connection, timer

    def drop(self, address: str) -> None:
        if kept := self.take(address):
            kept.close()

    def close(self) -> None:
        for address in list(self._open):
            self.drop(address)


class StreamCalls:
    """Calls on the connection of a stream that is open: answered in their order, between its lines."""

    def __init__(self, opened: Connection) -> None:
        self._connection = opened
        self._asked: deque[asyncio.Future[protocol.Message | None]] = deque()
        """The oldest first, those for which nobody waits any more included: their answers still come."""

    @property
    def wait(self) -> bool:
        """Whether an answer is to come."""
        return bool(self._asked)

    async def ask(self, request: Request) -> protocol.Message | None:
        """The answer; None where the stream has ended before it came."""
        line = protocol.encode(request)
        future: asyncio.Future[protocol.Message | None] = asyncio.get_running_loop().create_future()
        self._asked.append(future)
        try:
            await self._connection.send_line(line)
        except ConnectionError:
            return None
        return await future

    def answered(self, message: protocol.Message) -> bool:
        """Whether it is an answer: all but reports, where one is to come."""
        if not self._asked or isinstance(message, protocol.Report | protocol.ReportChange):
            return False
        self._answer(message)
        return True

    def end(self) -> None:
        """No more answers come."""
        while self._asked:
            self._answer(None)

    def _answer(self, message: protocol.Message | None) -> None:
        future = self._asked.popleft()
        if not future.done():
            future.set_result(message)


@dataclass(frozen=True)
class ConnectionIdentity:
    """What makes a connection one between this operator and this job's agents."""

    uid: str
    context: ssl.SSLContext
    namespace: str = ""
    handshakes: FairLimiter = field(default_factory=lambda: FairLimiter(HANDSHAKES))
    """Of all jobs together; turns of its own where nobody shares them."""
    allowance: Allowance = field(default_factory=Allowance)
    """For the lines of all jobs of the namespace together."""
    held_lines: HeldLines = field(default_factory=HeldLines)
    """By all jobs of the namespace together."""
    line_limits: Callable[[], LineLimits] = lambda: LARGEST_LINE
    """Higher once the job is larger."""
    may_act: Callable[[], bool] = lambda: True
    """False while another operator may be the one that acts."""
    kept: IdleConnections = field(default_factory=IdleConnections)
    streams: dict[str, StreamCalls] = field(default_factory=dict)
    """Those that are open and carry calls, by address."""

    @property
    def agent_name(self) -> str:
        return f"{self.uid}.agent"


@contextlib.asynccontextmanager
async def connection(
    identity: ConnectionIdentity, address: str, message: protocol.Watch | protocol.Relay, waits: Waits = lambda _: None
) -> AsyncIterator[Connection]:
    """Connect and send `message`. Raises OSError, TimeoutError, and CallError where a Relay may not be sent."""
    opened = await _opened(identity, address, waits)
    try:
        if isinstance(message, protocol.Relay):
            _check_may_act(identity)
        await opened.send(message)
        yield opened
    finally:
        opened.close()


@contextlib.asynccontextmanager
async def calls_on(opened: Connection, identity: ConnectionIdentity, address: str) -> AsyncIterator[StreamCalls]:
    """Of a stream: they are made on it once it stands in `identity.streams`, until it ends."""
    calls = StreamCalls(opened)
    try:
        yield calls
    finally:
        if identity.streams.get(address) is calls:
            del identity.streams[address]
        calls.end()


async def _opened(identity: ConnectionIdentity, address: str, waits: Waits) -> Connection:
    """Raises OSError, TimeoutError."""
    host, port = split(address)
    made = await _socket(host)
    async with asyncio.timeout(DIAL_SECONDS):  # wait_for loses a cancellation that meets an error, before Python 3.12
        dialled = await dial(made, host, port)
    loop, securing = asyncio.get_running_loop(), None
    try:
        waits(True)
        async with identity.handshakes.turn(identity.namespace, identity.uid):
            waits(False)
            patience_ends = loop.time() + DIAL_SECONDS
            securing = asyncio.create_task(_secured(dialled, identity))
            await asyncio.wait([securing], timeout=SLOT_SECONDS)
        async with asyncio.timeout_at(patience_ends):
            return await securing
    except BaseException:
        if securing is None:
            dialled.close()
        else:
            securing.add_done_callback(_close_unwanted)
            securing.cancel()
        raise


def _close_unwanted(securing: asyncio.Task[Connection]) -> None:
    if not securing.cancelled() and securing.exception() is None:
        securing.result().close()


async def _socket(host: str) -> socket.socket:
    """Waits where this process has no file descriptor left, which speaks against no agent. Raises OSError."""
    while True:
        try:
            return socket.socket(family(host), socket.SOCK_STREAM)
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE):
                raise
            log.warning("no file descriptor is left for a connection to %s", host)
            await asyncio.sleep(NO_DESCRIPTOR_SECONDS)


async def dial(made: socket.socket, host: str, port: int) -> socket.socket:
    """The socket, connected. Raises OSError, and closes it then."""
    made.setblocking(False)
    try:
        await asyncio.get_running_loop().sock_connect(made, (host, port))
    except BaseException:
        made.close()
        raise
    return made


async def _secured(dialled: socket.socket, identity: ConnectionIdentity) -> Connection:
    """Closes the socket where the handshake fails."""
    with small_tls_buffers():
        streams = await asyncio.open_connection(
            sock=dialled, ssl=identity.context, server_hostname=identity.agent_name, limit=PIECE_BYTES
        )
    return BoundedConnection(*streams, lambda: identity.line_limits().most_bytes, identity.held_lines)


async def receive(connection: Connection, identity: ConnectionIdentity, address: str) -> protocol.Message:
    """The next message; raises ClosedError where the stream ends, CallError where it is none of this protocol."""
    line = await receive_line(connection, address)
    async with identity.allowance.line():
        return parsed(line, address, identity.line_limits())


async def receive_line(connection: Connection, address: str) -> bytes:
    """The same, not yet read."""
    try:
        line = await connection.receive_line()
    except ProtocolError as error:
        raise CallError(f"{address} sent what is not understood: {error}") from error
    if line is None:
        raise ClosedError(f"{address} closed the connection")
    return line


def parsed(line: bytes, address: str, limits: LineLimits = LARGEST_LINE) -> protocol.Message:
    """Within bounds. Raises CallError."""
    if separators(line) > MOST_SEPARATORS:
        raise CallError(f"{address} sent a line of more than {MOST_SEPARATORS} values")
    try:
        return bounded(protocol.decode(line, functools.partial(cut, limits=limits)))
    except ProtocolError as error:
        raise CallError(f"{address} sent what is not understood: {error}") from error


async def call(identity: ConnectionIdentity, address: str, request: Request, waits: Waits = lambda _: None) -> Answer:
    """The agent's answer; raises CallError where it does not come within CALL_SECONDS of the request."""
    try:
        answer: protocol.Message | None = None
        if stream := identity.streams.get(address):
            _check_may_act(identity)
            async with asyncio.timeout(CALL_SECONDS):
                answer = await stream.ask(request)
        elif kept := identity.kept.take(address):
            answer = await _asked(identity, address, kept, request)
        if answer is None:
            answer = await _asked(identity, address, await _opened(identity, address, waits), request)
            if answer is None:
                raise ClosedError(f"{address} closed the connection")
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


def _check_may_act(identity: ConnectionIdentity) -> None:
    """Raises CallError. Asked last, as the call may have waited for its turn."""
    if not identity.may_act():
        raise CallError("by now another operator may be the one that acts")


async def _asked(
    identity: ConnectionIdentity, address: str, opened: Connection, request: Request
) -> protocol.Message | None:
    """The answer on that connection, which is kept; None where it broke: a kept one may be older than the agent."""
    try:
        _check_may_act(identity)
        async with asyncio.timeout(CALL_SECONDS):
            await opened.send(request)
            answer = await receive(opened, identity, address)
    except (ConnectionError, ClosedError):
        opened.close()
        return None
    except BaseException:
        opened.close()
        raise
    identity.kept.put(address, opened)
    return answer


async def relay(
    identity: ConnectionIdentity,
    address: str,
    line: str,
    to: Mapping[str, str],
    silence: float = RELAY_SECONDS,
    waits: Waits = lambda _: None,
) -> AsyncIterator[tuple[str, Answer]]:
    """What those of `to` (replica to address) answer, as it comes, when the agent at `address` passes on `line`, which
    is a Prepare or an Assign. Ends where no answer comes for `silence` seconds, and raises nothing: who has not
    answered by then must be asked in another way."""
    candidates = tuple(protocol.Candidate(replica, each) for replica, each in to.items())
    passed_on, waiting = protocol.Relay(identity.uid, line, candidates), dict(to)
    try:
        async with connection(identity, address, passed_on, waits) as opened, asyncio.timeout(silence) as quiet:
            while waiting:
                told = await receive(opened, identity, address)
                if not isinstance(told, protocol.Relayed):
                    raise CallError(f"{address} answered a Relay with a {type(told).__name__}")
                if told.replica not in waiting or told.error:
                    continue
                async with identity.allowance.line():
                    answer = parsed(told.line.encode(), address, identity.line_limits())
                yield told.replica, _answer(answer, "Relay", waiting.pop(told.replica))
                quiet.reschedule(asyncio.get_running_loop().time() + silence)
    except Exception as error:  # whatever it is, the others must be asked: a call that ended unseen is sent once
        why = str(error) or type(error).__name__
        log.info("%d of %d that %s was to ask have not answered: %s", len(waiting), len(to), address, why)


def _answer(message: protocol.Message, what: str, address: str) -> Answer:
    if not isinstance(message, protocol.Prepared | protocol.Accepted | protocol.Refused):
        raise CallError(f"{address} answered a {what} with a {type(message).__name__}")
    return message
