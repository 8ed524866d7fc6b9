"""Streams between the coordinator and its members, at both ends.

A round is a period in which a fixed set of replicas trains. The coordinator is the agent of rank 0, and the members are
the round's other agents. A broken connection does not prove that the process at the other end has died (decision "A
reset connection does not prove a failure"). The member therefore joins the coordinator again, and the coordinator sends
a request to the member's agent. If the process has died, its node refuses new connections at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import random
from collections.abc import Callable
from typing import Optional

import concertina_protocol as p
from concertina_agent.core import events as e
from concertina_agent.core.round.coordinator import AT_ONCE, JOIN_GAP_SECONDS
from concertina_agent.net.state_stream import MEMBER, often, stream
from concertina_agent.net.wire import Connector, KeptConnections
from concertina_agent.runtime.notifier import Notifier
from concertina_agent.runtime.nursery import TaskGroup
from concertina_protocol.codec.typed_json import ProtocolError
from concertina_protocol.connection import Connection
from concertina_protocol.log import log_event
from concertina_protocol.waiting import within

RETRY_SECONDS = 0.05
"""Seconds between attempts to join a coordinator that does not know of the new round yet."""
RECONNECT_SECONDS = 0.5
"""Seconds from the break of a stream until its other end counts as lost.

The other end is not lost if it answers on a new connection in this time.
"""
LINES_A_SECOND = 2000
"""Maximum number of lines per second that a coordinator receives about changes of numbers only.

The limit applies to all members together. Heartbeats are not limited, so the heartbeats alone can be more than this
number.
"""

FROM_COORDINATOR = (p.Drain, p.StopAt, p.DurableMoved, p.MemberState)
Emit = Callable[[e.Event], None]


class MovedOn(Exception):
    """Error that the coordinator is already in a later round, so that the member must not repeat its Join.

    The coordinator is the agent of rank 0. A round is a period in which a fixed set of replicas trains.
    """


async def follow_coordinator(
    connector: Connector,
    assign: p.Assign,
    join: p.Join,
    state: Callable[[], p.MemberState],
    changes: Notifier,
    emit: Emit,
    tasks: TaskGroup,
) -> None:
    """Join the coordinator of a round as a member, and exchange messages with the coordinator until it is lost.

    The coordinator is the agent of rank 0. The Join is repeated until the coordinator accepts or permanently refuses
    it.
    """
    key, wire, detail = (join.round, join.claim), None, ""
    members, address = len(assign.members), assign.members[0].address
    pace = min(p.BEAT_SECONDS, members / LINES_A_SECOND)
    try:
        await asyncio.sleep(random.uniform(0, JOIN_GAP_SECONDS * members) if members > AT_ONCE else 0)
        while wire is None:
            with contextlib.suppress(OSError, asyncio.TimeoutError):
                wire = await _try_to_join(connector, join, address)
            if wire is None:
                await asyncio.sleep(RETRY_SECONDS)
        while wire is not None:
            emit(e.CoordinatorJoined(*key))
            detail = ""
            with tasks.alongside("stream to coordinator", stream(wire, state, changes, MEMBER, pace, often)):
                try:
                    await _listen(wire, lambda message: emit(e.CoordinatorMessage(*key, message)), FROM_COORDINATOR)
                except OSError as error:  # the coordinator's node has failed, and the kernel has stopped retrying
                    detail = f"can't be reached: {error.strerror or error}"
            wire.close()
            wire = await _join_again(connector, join, address)
    except ProtocolError as error:
        log_event("protocol_error", error=str(error))
    except MovedOn as refusal:
        detail = str(refusal)
    finally:
        if wire is not None:
            wire.close()
    emit(e.CoordinatorGone(*key, detail))


async def _join_again(connector: Connector, join: p.Join, address: str) -> Optional[Connection]:
    """Join the coordinator (the agent of rank 0) again after the stream to it broke.

    The result is the new connection, or None if the coordinator is lost. Raises MovedOn, as `_try_to_join` does.
    """

    async def joined() -> Optional[Connection]:
        while True:
            try:
                if wire := await _try_to_join(connector, join, address):
                    return wire
            except ConnectionRefusedError:
                return None  # no process listens at the coordinator's address
            except (OSError, asyncio.TimeoutError):
                pass
            await asyncio.sleep(RETRY_SECONDS)

    try:
        return await within(RECONNECT_SECONDS, joined())
    except asyncio.TimeoutError:
        return None


async def _try_to_join(connector: Connector, join: p.Join, address: str) -> Optional[Connection]:
    """Connect to the coordinator and join it. Return the connection, or None if a further attempt may succeed.

    This function also raises the errors of `Connector.connect`.

    The coordinator is the agent of rank 0.

    Raises:
        MovedOn: If the coordinator is in a later round.
    """
    wire = await connector.connect(address)
    joined = False
    try:
        answer = await _answer(wire, join)
        joined = isinstance(answer, p.Accepted)
    finally:
        if not joined:
            wire.close()
    if isinstance(answer, p.Refused):
        raise MovedOn(f"has moved on to round {answer.round}")
    return wire if joined else None


async def _answer(wire: Connection, join: p.Join) -> Optional[p.Message]:
    """Repeat the Join until the coordinator accepts or permanently refuses it, and return that answer.

    The result is None if the answer is not valid or the connection breaks.

    The coordinator is the agent of rank 0.
    """
    while True:
        try:
            await wire.send(join)
            answer = await wire.receive(p.SILENCE_SECONDS)
        except (OSError, asyncio.TimeoutError, ProtocolError):
            return None
        if not isinstance(answer, p.Refused) or answer.round > join.round:
            return answer
        # The coordinator has not received its Assign yet. A new TLS handshake for each attempt would delay it further.
        await asyncio.sleep(RETRY_SECONDS)


async def _listen(wire: Connection, on_message: Callable[..., None], kinds: tuple[type, ...]) -> None:
    """Pass each message of a connection to the function `on_message`, until the stream ends.

    Raises OSError, as `receive` does.

    Raises:
        ProtocolError: If a message is of a class that is not in `kinds`.
    """
    while (message := await wire.receive()) is not None:
        if not isinstance(message, kinds):
            raise ProtocolError(f"a {type(message).__name__} is not expected here")
        on_message(message)


class MemberStreams:
    """Streams of a coordinator (the agent of rank 0) to its members."""

    def __init__(
        self, state: Callable[[], p.MemberState], connections: KeptConnections, emit: Emit, tasks: TaskGroup
    ) -> None:
        """Prepare to accept the members' streams.

        Args:
            state: Function that returns the coordinator's own state, for its heartbeats.
            connections: Connections on which the coordinator asks the members' agents whether they are alive.
            emit: Function that passes events to the state machine.
            tasks: Group of the background tasks.
        """
        self._state, self._connections, self._emit, self._tasks = state, connections, emit, tasks
        self._never = Notifier()
        self._wires: dict[str, Connection] = {}
        self._addresses: dict[str, str] = {}

    def coordinator(self, assign: p.Assign) -> None:
        """Record that this agent is the coordinator of a round, so that the members of the round may join."""
        self._addresses = {member.replica: member.address for member in assign.members}

    def add(self, join: p.Join, wire: Connection) -> None:
        """Add the stream of a member that joins. An older stream of the same member is closed."""
        if old := self._wires.get(join.replica):
            old.close()
        self._wires[join.replica] = wire

    async def serve(self, join: p.Join, wire: Connection) -> None:
        """Serve the stream of a member until the stream breaks. If the member turns out to be lost, emit MemberGone.

        The coordinator is the agent of rank 0. The coordinator sends its heartbeat only at fixed times. If it sent each
        member's change to all N members, N changes would cause N² lines.

        Raises:
            ProtocolError: If the member sends an invalid message.
        """

        def on_message(state: p.MemberState) -> None:
            """Emit the state of the member that opened this stream.

            All agents of a job have the same certificate, which does not identify a member. Each line on a stream must
            therefore be about the member that opened the stream (decision "A member reports only about itself").

            Raises:
                ProtocolError: If the line is about another member.
            """
            if (state.replica, state.instance) != (join.replica, join.instance):
                raise ProtocolError(
                    f"{join.replica} ({join.instance}) may not act for {state.replica} ({state.instance})"
                )
            self._emit(e.MemberMessage(state))

        gone = e.MemberGone(join.round, join.claim, join.replica)
        try:
            beats = stream(wire, self._state, self._never, MEMBER, p.BEAT_SECONDS, often)
            with self._tasks.alongside("stream to member", beats), contextlib.suppress(OSError):
                await _listen(wire, on_message, (p.MemberState,))
        except ProtocolError as error:
            if self._forget(join, wire):
                self._emit(dataclasses.replace(gone, detail=f"sent a message that is not allowed: {error}"))
            raise
        wire.close()
        if self._forget(join, wire) and await self._is_lost(join) and join.replica not in self._wires:
            self._emit(gone)

    def _forget(self, join: p.Join, wire: Connection) -> bool:
        """Remove the broken stream `wire` of a member, and return whether the member may be lost.

        The member is not lost if it has opened another stream, or if the round is over.
        """
        if self._wires.get(join.replica) is not wire:
            return False
        del self._wires[join.replica]
        return True

    async def _is_lost(self, join: p.Join) -> bool:
        """Return whether the agent of a member is gone, after the member's stream broke.

        An agent that answers a request is not gone. Such an agent usually joins again. If the agent does not, its
        member counts as lost after the usual time of silence.
        """
        address, ping = self._addresses[join.replica], p.encode(p.Ping(join.uid))

        async def refuses() -> bool:
            while True:
                try:
                    await self._connections.ask(address, ping, RECONNECT_SECONDS)
                except ConnectionRefusedError:
                    return True  # no process listens at the member's address
                except (OSError, asyncio.TimeoutError, ProtocolError):
                    await asyncio.sleep(RETRY_SECONDS)
                else:
                    return False

        try:
            return await within(RECONNECT_SECONDS, refuses())
        except asyncio.TimeoutError:
            return True

    def send(self, message: p.Message, only: str = "") -> None:
        for replica, wire in self._wires.items():
            if only in ("", replica):
                wire.write(message)

    def close(self) -> None:
        wires, self._wires = self._wires, {}
        for wire in wires.values():
            wire.close()
