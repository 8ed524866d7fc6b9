"""Calls of the operator to agents (requests and answers), and connections for calls and streams of reports."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import errno
import functools
import itertools
import logging
import socket
import ssl
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
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
"""Seconds to wait for the answer to a call. Then the operator assumes that the agent has not received the request."""
DIAL_SECONDS = protocol.SILENCE_SECONDS
"""Time limit in seconds to open a TCP connection, and again for the TLS handshake that follows."""
KEPT_SECONDS = 10.0
"""Seconds for which a connection stays open after the answer to a call.

An Assign call soon follows a Prepare call, and a new TLS handshake would take each side a millisecond of processor
time.
"""
NO_DESCRIPTOR_SECONDS = 0.2
"""Seconds before the next try to open a connection, if this process has no file descriptor left."""
HANDSHAKES = 64
"""Largest number of TLS handshakes at a time, for all jobs together.

A handshake takes a millisecond or two of processor time. If a new operator started thousands at a time, none of them
would finish within the time limit.
"""
SLOT_SECONDS = 0.25
"""Seconds for which a TLS handshake counts toward the limit HANDSHAKES.

After this time, the handshake probably waits for the agent, which takes no processor time in the operator. It can
continue without being counted until DIAL_SECONDS have passed.
"""

Waits = Callable[[bool], None]
"""Callback that is called with True when a connection starts to wait for its TLS handshake, and with False afterwards.

This wait is caused by the operator, so it does not count as silence of the agent. The first call is with False, before
the operator connects to the agent's host.
"""
Request = protocol.Prepare | protocol.Assign | protocol.Release | protocol.Drain | protocol.Save
Answer = protocol.Prepared | protocol.Accepted | protocol.Refused


class CallError(Exception):
    """Error for a request to an agent without a usable answer. The message gives the reason."""


class ClosedError(CallError):
    """Error for a connection that the agent's host closed."""


class IdleConnections:
    """Connections that stay open after a call, for the next call to the same agent.

    There is at most one connection for each address, and it stays open for KEPT_SECONDS.
    """

    def __init__(self) -> None:
        self._open: dict[str, tuple[Connection, asyncio.TimerHandle]] = {}

    def take(self, address: str) -> Connection | None:
        """Remove and return the open connection to an address, or return None if there is none."""
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
    """Calls over the open report stream of an agent.

    The agent answers calls in the order of the requests, and may send reports between the answers. With `relay`, the
    agent passes a message on to other agents. Their answers arrive in any order, and are matched by the number of the
    Relay message.
    """

    def __init__(self, opened: Connection) -> None:
        self._connection = opened
        self._numbers = itertools.count(1)
        self._relays: dict[int, asyncio.Queue[protocol.Relayed | None]] = {}
        """Queues for the answers that this agent passes on from other agents, by the number of the Relay message.

        None in a queue marks the end of the stream.
        """
        self._pending_answers: deque[asyncio.Future[protocol.Message | None]] = deque()
        """Futures for the expected answers, the oldest first.

        Abandoned calls are included, because their answers still arrive.
        """

    @property
    def wait(self) -> bool:
        """True if at least one call on this stream has not been answered yet."""
        return bool(self._pending_answers)

    async def ask(self, request: Request) -> protocol.Message | None:
        """Send a request to the agent and return the answer; None if the stream ends before the answer arrives."""
        line = protocol.encode(request)
        future: asyncio.Future[protocol.Message | None] = asyncio.get_running_loop().create_future()
        self._pending_answers.append(future)
        try:
            await self._connection.send_line(line)
        except ConnectionError:
            return None
        return await future

    @contextlib.asynccontextmanager
    async def relay(
        self, message: protocol.Relay, send_seconds: float
    ) -> AsyncIterator[Callable[[], Awaitable[protocol.Relayed]]]:
        """Ask the agent to pass a message on to other agents, and yield a function that returns their next answer.

        Args:
            message: Message to pass on.
            send_seconds: Time limit in seconds for the agent to accept the message.

        Raises:
            ClosedError: When the stream ends. The yielded function raises it too.
            TimeoutError: When the agent does not accept the message in time, because its buffers are full.
        """
        number, answers = next(self._numbers), asyncio.Queue[protocol.Relayed | None]()

        async def next_answer() -> protocol.Relayed:
            answer = await answers.get()
            answers.task_done()
            if answer is None:
                raise ClosedError("the stream of the agent that passes the message on has ended")
            return answer

        self._relays[number] = answers
        try:
            try:
                async with asyncio.timeout(send_seconds):
                    await self._connection.send(dataclasses.replace(message, request=number))
            except ConnectionError as error:
                raise ClosedError(f"the stream of the agent that passes the message on is broken: {error}") from error
            yield next_answer
        finally:
            del self._relays[number]
            while not answers.empty():
                answers.get_nowait()
                answers.task_done()

    async def taken(self) -> None:
        """Wait until the callers of `relay` have read all answers that have arrived from other agents.

        The next line is read only after this. Otherwise an agent could fill the operator's memory with unread answers.
        """
        for answers in list(self._relays.values()):
            await answers.join()

    def answered(self, message: protocol.Message) -> bool:
        """Return whether a message is the answer to a call, and not a report. If so, pass the message to the caller.

        While a call is open, each message that is not a report is the answer to the oldest open call. The exception are
        answers that the agent passes on from other agents (Relayed messages). They go to the caller of `relay`, or are
        dropped if that caller no longer waits.
        """
        if isinstance(message, protocol.Relayed):
            if answers := self._relays.get(message.request):
                answers.put_nowait(message)
            return True
        if not self._pending_answers or isinstance(message, protocol.Report | protocol.ReportChange):
            return False
        self._answer(message)
        return True

    def end(self) -> None:
        """End all open calls with the result None, because the stream is closed and no further answers can arrive."""
        while self._pending_answers:
            self._answer(None)
        for answers in self._relays.values():
            answers.put_nowait(None)

    def _answer(self, message: protocol.Message | None) -> None:
        future = self._pending_answers.popleft()
        if not future.done():
            future.set_result(message)


@dataclass(frozen=True)
class ConnectionIdentity:
    """Parameters for all connections of the operator to one job's agents."""

    uid: str
    context: ssl.SSLContext
    namespace: str = ""
    handshakes: FairLimiter = field(default_factory=lambda: FairLimiter(HANDSHAKES))
    """Limiter for handshakes. All jobs share one, except in tests."""
    allowance: Allowance = field(default_factory=Allowance)
    """Budget of processor time for the lines (messages) of all jobs in the namespace."""
    held_lines: HeldLines = field(default_factory=HeldLines)
    """Memory budget for the long lines (messages) of all jobs in the namespace."""
    line_limits: Callable[[], LineLimits] = lambda: LARGEST_LINE
    """Function that returns the current limits for a line (message). They grow with the number of members of the job.
    """
    may_act: Callable[[], bool] = lambda: True
    """Function that returns whether this operator process may send calls to agents.

    It returns False while another operator process may be the leader.
    """
    kept: IdleConnections = field(default_factory=IdleConnections)
    streams: dict[str, StreamCalls] = field(default_factory=dict)
    """Open report streams over which the operator can also make calls, by address of the agent."""

    @property
    def agent_name(self) -> str:
        return f"{self.uid}.agent"


@contextlib.asynccontextmanager
async def connection(
    identity: ConnectionIdentity, address: str, message: protocol.Watch | protocol.Relay, waits: Waits = lambda _: None
) -> AsyncIterator[Connection]:
    """Connect to an agent, send `message`, and yield the connection.

    Args:
        identity: Parameters of the connections to the job's agents.
        address: Address of the agent.
        message: First message on the connection.
        waits: Callback for waits within the operator, as described at `Waits`.

    Raises:
        OSError: When the agent cannot be reached.
        TimeoutError: When opening the connection or the TLS handshake takes longer than DIAL_SECONDS.
        CallError: When `message` is a Relay (a message for other agents) and another operator may be the leader.
    """
    opened = await _opened(identity, address, waits)
    try:
        if isinstance(message, protocol.Relay):
            check_may_act(identity)
        await opened.send(message)
        yield opened
    finally:
        opened.close()


@contextlib.asynccontextmanager
async def calls_on(opened: Connection, identity: ConnectionIdentity, address: str) -> AsyncIterator[StreamCalls]:
    """Yield an object that makes calls to an agent over an open report stream.

    The caller adds the object to `identity.streams`. From then on, all calls to the agent use this stream until it
    ends.
    """
    calls = StreamCalls(opened)
    try:
        yield calls
    finally:
        if identity.streams.get(address) is calls:
            del identity.streams[address]
        calls.end()


async def _opened(identity: ConnectionIdentity, address: str, waits: Waits) -> Connection:
    """Connect to an agent and return the connection after its TLS handshake.

    Raises:
        OSError: When the agent cannot be reached.
        TimeoutError: When the connection or its handshake takes longer than DIAL_SECONDS.
    """
    host, port = split(address)
    unconnected = await _socket(host)
    waits(False)
    # before Python 3.12, wait_for loses a cancellation that coincides with an error
    async with asyncio.timeout(DIAL_SECONDS):
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
    """Create a socket. If this process has no file descriptor left, wait until one is free.

    The wait does not count as silence of the agent.

    Raises:
        OSError: When the socket cannot be created for another reason.
    """
    while True:
        try:
            # With the protocol, asyncio sets TCP_NODELAY. Without it, asyncio does not recognize TCP, and the second of
            # two short lines waits until the other end acknowledges the first one, for up to 40 ms.
            return socket.socket(family(host), socket.SOCK_STREAM, socket.IPPROTO_TCP)
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE):
                raise
            log.warning("no file descriptor is left for a connection to %s", host)
            await asyncio.sleep(NO_DESCRIPTOR_SECONDS)


async def dial(unconnected: socket.socket, host: str, port: int) -> socket.socket:
    """Connect the socket and return it. If the connection fails, close the socket.

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
    """Perform the TLS handshake on a connected socket, and return the connection.

    If the handshake fails, close the socket.
    """
    with small_tls_buffers():
        streams = await asyncio.open_connection(
            sock=dialled, ssl=identity.context, server_hostname=identity.agent_name, limit=PIECE_BYTES
        )
    return BoundedConnection(*streams, lambda: identity.line_limits().most_bytes, identity.held_lines)


async def receive(connection: Connection, identity: ConnectionIdentity, address: str) -> protocol.Message:
    """Wait for the agent's next message, and return it with its values limited (see `bounds`).

    Raises:
        ClosedError: When the connection ends.
        CallError: When the message is not valid in this protocol.
    """
    line = await receive_line(connection, address)
    return await identity.allowance.handle(lambda: parsed(line, address, identity.line_limits()))


async def receive_line(connection: Connection, address: str) -> bytes:
    """Return the agent's next line (message) without parsing it.

    Raises:
        ClosedError: When the connection ends.
        CallError: When the line is too long.
    """
    try:
        line = await connection.receive_line()
    except ProtocolError as error:
        raise CallError(f"{address} sent an invalid message: {error}") from error
    if line is None:
        raise ClosedError(f"{address} closed the connection")
    return line


def parsed(line: bytes, address: str, limits: LineLimits = LARGEST_LINE) -> protocol.Message:
    """Return the message in a line, with its values clamped or cut to the limits of `bounds`.

    Raises:
        CallError: When the line is not a message of this protocol, or has too many values.
    """
    if separators(line) > MOST_SEPARATORS:
        raise CallError(f"{address} sent a line of more than {MOST_SEPARATORS} values")
    try:
        return bounded(protocol.decode(line, functools.partial(cut, limits=limits)))
    except ProtocolError as error:
        raise CallError(f"{address} sent an invalid message: {error}") from error


async def call(identity: ConnectionIdentity, address: str, request: Request, waits: Waits = lambda _: None) -> Answer:
    """Send the request to an agent and return the agent's answer.

    Raises:
        CallError: When there is no usable answer within CALL_SECONDS.
        ClosedError: When the agent closes the connection before it answers.
    """
    try:
        answer: protocol.Message | None = None
        if stream := identity.streams.get(address):
            check_may_act(identity)
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
        # Without a result, the call would count as in progress forever and never be sent again.
        raise CallError(f"the call of {address} failed: {type(error).__name__}: {error}") from error
    return usable(answer, type(request).__name__, address)


def check_may_act(identity: ConnectionIdentity) -> None:
    """Check that this operator is still the leader, just before it sends a call.

    The call may have waited for a connection.

    Raises:
        CallError: When another operator may be the leader.
    """
    if not identity.may_act():
        raise CallError("another operator may be the leader by now")


async def _asked(
    identity: ConnectionIdentity, address: str, opened: Connection, request: Request
) -> protocol.Message | None:
    """Send a request over an open connection and return the answer. Keep the connection open for the next call.

    The result is None if the connection is broken. This can happen if the connection was kept open after an earlier
    call and the agent has restarted since then.
    """
    try:
        check_may_act(identity)
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


def usable(message: protocol.Message, request_kind: str, address: str) -> Answer:
    """Return the message if it is a valid answer to a request of the given kind.

    Raises:
        CallError: When it is not a valid answer.
    """
    if not isinstance(message, protocol.Prepared | protocol.Accepted | protocol.Refused):
        raise CallError(f"{address} answered a {request_kind} with a {type(message).__name__}")
    return message
