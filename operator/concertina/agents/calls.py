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
"""Time in seconds for an answer. After that, the agent counts as not having received the request."""
RELAY_SECONDS = 2.0
"""Longest time in seconds between two answers that come through one agent.

A repeated request does no harm, and a round waits for the agents that it names.
"""
DIAL_SECONDS = protocol.SILENCE_SECONDS
"""Time in seconds for a connection to be made, and again for its handshake."""
KEPT_SECONDS = 10.0
"""Number of seconds for which a connection stays open after an answer.

An Assign follows its Prepare within moments, and a handshake costs either end a millisecond.
"""
NO_DESCRIPTOR_SECONDS = 0.2
"""Delay in seconds before the next try when this process has no file descriptor left."""
HANDSHAKES = 64
"""Largest number of handshakes under way at once, over all jobs.

A handshake costs a millisecond or two. A new operator that started thousands of them together would finish none of them
in time.
"""
SLOT_SECONDS = 0.25
"""Time in seconds for which a handshake counts towards HANDSHAKES.

A handshake that takes longer waits for the other end, which costs nothing. It continues without a slot until
DIAL_SECONDS.
"""

Waits = Callable[[bool], None]
"""Callback, called with True when a dialled connection waits for its turn to shake hands, and with False at its turn.

The time between does not count against the agent.
"""
Request = protocol.Prepare | protocol.Assign | protocol.Release | protocol.Drain | protocol.Save
Answer = protocol.Prepared | protocol.Accepted | protocol.Refused


class CallError(Exception):
    """No usable answer came. The message is a sentence."""


class ClosedError(CallError):
    """The agent's host closed the connection."""


class IdleConnections:
    """Open connections on which a call was answered, for the next call.

    There is at most one per address, for KEPT_SECONDS.
    """

    def __init__(self) -> None:
        self._open: dict[str, tuple[Connection, asyncio.TimerHandle]] = {}

    def take(self, address: str) -> Connection | None:
        """Remove and return the open connection to that address, or None when there is none."""
        if address not in self._open:
            return None
        idle, timer = self._open.pop(address)
        timer.cancel()
        if idle.over:
            idle.close()
            return None
        return idle

    def put(self, address: str, connection: Connection) -> None:
        self.drop(address)
        timer = asyncio.get_running_loop().call_later(KEPT_SECONDS, self.drop, address)
        self._open[address] = connection, timer

    def drop(self, address: str) -> None:
        if idle := self.take(address):
            idle.close()

    def close(self) -> None:
        for address in list(self._open):
            self.drop(address)


class StreamCalls:
    """Calls on the connection of an open stream, answered in their order between the lines of the stream."""

    def __init__(self, opened: Connection) -> None:
        self._connection = opened
        self._pending_answers: deque[asyncio.Future[protocol.Message | None]] = deque()
        """Futures of the answers to come, the oldest first.

        Abandoned calls are included, because their answers still come.
        """

    @property
    def wait(self) -> bool:
        """Whether an answer is to come."""
        return bool(self._pending_answers)

    async def ask(self, request: Request) -> protocol.Message | None:
        """Send the request and return its answer, or None when the stream ends before the answer."""
        line = protocol.encode(request)
        future: asyncio.Future[protocol.Message | None] = asyncio.get_running_loop().create_future()
        self._pending_answers.append(future)
        try:
            await self._connection.send_line(line)
        except ConnectionError:
            return None
        return await future

    def answered(self, message: protocol.Message) -> bool:
        """Take the message as the answer to the oldest call, and return whether it is one.

        Every message except a report is an answer when one is to come.
        """
        if not self._pending_answers or isinstance(message, protocol.Report | protocol.ReportChange):
            return False
        self._answer(message)
        return True

    def end(self) -> None:
        """Resolve all pending calls with None, because no more answers come."""
        while self._pending_answers:
            self._answer(None)

    def _answer(self, message: protocol.Message | None) -> None:
        future = self._pending_answers.popleft()
        if not future.done():
            future.set_result(message)


@dataclass(frozen=True)
class ConnectionIdentity:
    """Parameters that the operator's connections to one job's agents share."""

    uid: str
    context: ssl.SSLContext
    namespace: str = ""
    handshakes: FairLimiter = field(default_factory=lambda: FairLimiter(HANDSHAKES))
    """Limiter that all jobs share. By default, the identity has its own."""
    allowance: Allowance = field(default_factory=Allowance)
    """Allowance for the lines of all jobs of the namespace."""
    held_lines: HeldLines = field(default_factory=HeldLines)
    """Memory for the long lines of all jobs of the namespace."""
    line_limits: Callable[[], LineLimits] = lambda: LARGEST_LINE
    """Current limits of a line. They are higher once the job is larger."""
    may_act: Callable[[], bool] = lambda: True
    """Whether this operator may act: False while another operator may be the leader."""
    kept: IdleConnections = field(default_factory=IdleConnections)
    streams: dict[str, StreamCalls] = field(default_factory=dict)
    """Open streams that carry calls, by address."""

    @property
    def agent_name(self) -> str:
        return f"{self.uid}.agent"


@contextlib.asynccontextmanager
async def connection(
    identity: ConnectionIdentity, address: str, message: protocol.Watch | protocol.Relay, waits: Waits = lambda _: None
) -> AsyncIterator[Connection]:
    """Connect, send `message`, and yield the connection.

    Raises:
        OSError: When the agent cannot be reached.
        TimeoutError: When the connection or its handshake takes longer than DIAL_SECONDS.
        CallError: When a Relay may not be sent.
    """
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
    """Yield the calls of a stream.

    Calls use the stream from the time at which this object is entered into `identity.streams` until the stream ends.
    """
    calls = StreamCalls(opened)
    try:
        yield calls
    finally:
        if identity.streams.get(address) is calls:
            del identity.streams[address]
        calls.end()


async def _opened(identity: ConnectionIdentity, address: str, waits: Waits) -> Connection:
    """Connect to an agent, and return the connection after its handshake.

    Raises:
        OSError: When the agent cannot be reached.
        TimeoutError: When the connection or its handshake takes longer than DIAL_SECONDS.
    """
    host, port = split(address)
    unconnected = await _socket(host)
    async with asyncio.timeout(DIAL_SECONDS):  # wait_for loses a cancellation that meets an error, before Python 3.12
        dialled = await dial(unconnected, host, port)
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
    """Create a socket, and wait while this process has no file descriptor left, which does not count against the agent.

    Raises:
        OSError: When the socket cannot be created for another reason.
    """
    while True:
        try:
            return socket.socket(family(host), socket.SOCK_STREAM)
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE):
                raise
            log.warning("no file descriptor is left for a connection to %s", host)
            await asyncio.sleep(NO_DESCRIPTOR_SECONDS)


async def dial(unconnected: socket.socket, host: str, port: int) -> socket.socket:
    """Connect the socket and return it. When that fails, close it.

    Raises:
        OSError: When the agent cannot be reached.
    """
    unconnected.setblocking(False)
    try:
        await asyncio.get_running_loop().sock_connect(unconnected, (host, port))
    except BaseException:
        unconnected.close()
        raise
    return unconnected


async def _secured(dialled: socket.socket, identity: ConnectionIdentity) -> Connection:
    """Perform the handshake, and close the socket when it fails."""
    with small_tls_buffers():
        streams = await asyncio.open_connection(
            sock=dialled, ssl=identity.context, server_hostname=identity.agent_name, limit=PIECE_BYTES
        )
    return BoundedConnection(*streams, lambda: identity.line_limits().most_bytes, identity.held_lines)


async def receive(connection: Connection, identity: ConnectionIdentity, address: str) -> protocol.Message:
    """Return the next message.

    Raises:
        ClosedError: When the stream ends.
        CallError: When the message is not one of this protocol.
    """
    line = await receive_line(connection, address)
    return await identity.allowance.handle(lambda: parsed(line, address, identity.line_limits()))


async def receive_line(connection: Connection, address: str) -> bytes:
    """Return the next line, before it is parsed.

    Raises:
        ClosedError: When the stream ends.
        CallError: When the line is longer than allowed.
    """
    try:
        line = await connection.receive_line()
    except ProtocolError as error:
        raise CallError(f"{address} sent what is not understood: {error}") from error
    if line is None:
        raise ClosedError(f"{address} closed the connection")
    return line


def parsed(line: bytes, address: str, limits: LineLimits = LARGEST_LINE) -> protocol.Message:
    """Parse the line and return its message within bounds.

    Raises:
        CallError: When the line is not a message of this protocol, or has too many values.
    """
    if separators(line) > MOST_SEPARATORS:
        raise CallError(f"{address} sent a line of more than {MOST_SEPARATORS} values")
    try:
        return bounded(protocol.decode(line, functools.partial(cut, limits=limits)))
    except ProtocolError as error:
        raise CallError(f"{address} sent what is not understood: {error}") from error


async def call(identity: ConnectionIdentity, address: str, request: Request, waits: Waits = lambda _: None) -> Answer:
    """Send the request to the agent and return its answer.

    Raises:
        CallError: When no usable answer comes within CALL_SECONDS of the request.
        ClosedError: When the agent closes the connection before it answers.
    """
    try:
        answer: protocol.Message | None = None
        if stream := identity.streams.get(address):
            _check_may_act(identity)
            async with asyncio.timeout(CALL_SECONDS):
                answer = await stream.ask(request)
        elif idle := identity.kept.take(address):
            answer = await _asked(identity, address, idle, request)
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
        # A call that ended without a result would count as under way forever, and a call is sent only once.
        raise CallError(f"the call of {address} failed: {type(error).__name__}: {error}") from error
    return _answer(answer, type(request).__name__, address)


def _check_may_act(identity: ConnectionIdentity) -> None:
    """Check that this operator may act. This is the last check before a call, which may have waited for its turn.

    Raises:
        CallError: When another operator may be the leader.
    """
    if not identity.may_act():
        raise CallError("by now another operator may be the one that acts")


async def _asked(
    identity: ConnectionIdentity, address: str, opened: Connection, request: Request
) -> protocol.Message | None:
    """Return the answer on that connection, and keep the connection for the next call.

    Return None when the connection broke: a kept connection may be older than the agent.
    """
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
    """Ask the agent at `address` to pass on `line`, and yield each replica with its answer as it comes.

    The iterator ends after the last answer, after an error, or when no answer comes for `silence` seconds. It raises
    nothing. The caller must find another way to ask the replicas that have not answered.

    Args:
        line: Encoded Prepare or Assign.
        to: Address of each replica to which the agent passes on the line.
    """
    candidates = tuple(protocol.Candidate(*entry) for entry in to.items())
    passed_on, waiting = protocol.Relay(identity.uid, line, candidates), dict(to)
    try:
        async with connection(identity, address, passed_on, waits) as opened, asyncio.timeout(silence) as quiet:
            while waiting:
                relayed = await receive(opened, identity, address)
                if not isinstance(relayed, protocol.Relayed):
                    raise CallError(f"{address} answered a Relay with a {type(relayed).__name__}")
                if relayed.replica not in waiting or relayed.error:
                    continue
                passed_back = functools.partial(parsed, relayed.line.encode(), address, identity.line_limits())
                answer = await identity.allowance.handle(passed_back)
                yield relayed.replica, _answer(answer, "Relay", waiting.pop(relayed.replica))
                quiet.reschedule(asyncio.get_running_loop().time() + silence)
    except Exception as error:  # after any error, the remaining replicas must be called: a call is sent only once
        why = str(error) or type(error).__name__
        log.info("%d of %d that %s was to ask have not answered: %s", len(waiting), len(to), address, why)


def _answer(message: protocol.Message, request_kind: str, address: str) -> Answer:
    if not isinstance(message, protocol.Prepared | protocol.Accepted | protocol.Refused):
        raise CallError(f"{address} answered a {request_kind} with a {type(message).__name__}")
    return message
