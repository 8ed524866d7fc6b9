"""A member's stream to its lead, and the lead's streams to its members."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Optional

import concertina_protocol as p
from concertina_agent.core import events as e
from concertina_agent.core.round.lead import AT_ONCE, JOIN_GAP_SECONDS
from concertina_agent.net.state_stream import MEMBER, often, stream
from concertina_agent.net.wire import Connector
from concertina_agent.runtime.notifier import Notifier
from concertina_agent.runtime.nursery import Nursery
from concertina_protocol.codec.typed_json import ProtocolError
from concertina_protocol.connection import Connection
from concertina_protocol.log import log_event

RETRY_SECONDS = 0.05
"""Between attempts to join a lead that has not been assigned yet."""
LINES_A_SECOND = 2000
"""Of mere numbers, that all members of a round together say to their lead at most, unless beats alone are more."""

Emit = Callable[[e.Event], None]


async def follow_lead(
    connector: Connector,
    assign: p.Assign,
    join: p.Join,
    state: Callable[[], p.MemberState],
    changes: Notifier,
    emit: Emit,
    tasks: Nursery,
) -> None:
    """Join, again and again until the lead says yes or will never; then talk until the stream breaks."""
    key, wire, detail = (join.round, join.claim), None, ""
    members = len(assign.members)
    try:
        await asyncio.sleep(random.uniform(0, JOIN_GAP_SECONDS * members) if members > AT_ONCE else 0)
        while wire is None:
            try:
                wire = await _try_to_join(connector, join, assign.members[0].address)
            except PermissionError as refusal:
                return emit(e.LeadGone(*key, str(refusal)))
            if wire is None:
                await asyncio.sleep(RETRY_SECONDS)
        emit(e.LeadJoined(*key))
        kinds = (p.Drain, p.StopAt, p.DurableMoved, p.MemberState)
        pace = min(p.BEAT_SECONDS, members / LINES_A_SECOND)
        with tasks.alongside("stream to lead", stream(wire, state, changes, MEMBER, pace, often)):
            try:
                await _listen(wire, lambda message: emit(e.LeadMessage(*key, message)), kinds)
            except ProtocolError as error:
                log_event("protocol_error", error=str(error))
            except OSError as error:  # of a lead whose node has vanished, once the kernel gives it up
                detail = f"can't be reached: {error.strerror or error}"
        return emit(e.LeadGone(*key, detail))
    finally:
        if wire is not None:
            wire.close()


async def _try_to_join(connector: Connector, join: p.Join, address: str) -> Optional[Connection]:
    """None: try again. Raises PermissionError where the lead has moved on."""
    try:
        wire = await connector.connect(address)
    except (OSError, asyncio.TimeoutError):
        return None
    joined = False
    try:
        answer = await _answer(wire, join)
        joined = isinstance(answer, p.Accepted)
    finally:
        if not joined:
            wire.close()
    if isinstance(answer, p.Refused):
        raise PermissionError(f"has moved on to round {answer.round}")
    return wire if joined else None


async def _answer(wire: Connection, join: p.Join) -> Optional[p.Message]:
    """The lead's last word; None where it can't be understood, or the connection breaks."""
    while True:
        try:
            await wire.send(join)
            answer = await wire.receive(p.SILENCE_SECONDS)
        except (OSError, asyncio.TimeoutError, ProtocolError):
            return None
        if not isinstance(answer, p.Refused) or answer.round > join.round:
            return answer
        await asyncio.sleep(
            RETRY_SECONDS
        )  # it has not been assigned yet; a handshake each time would keep it from that


async def _listen(wire: Connection, on_message: Callable[..., None], kinds: tuple[type, ...]) -> None:
    """Until the stream ends. Raises ProtocolError where it says what it may not, and OSError as `receive` does."""
    while (message := await wire.receive()) is not None:
        if not isinstance(message, kinds):
            raise ProtocolError(f"a {type(message).__name__} is not expected here")
        on_message(message)


class MemberStreams:
    """The lead's ends."""

    def __init__(self, state: Callable[[], p.MemberState], emit: Emit, tasks: Nursery) -> None:
        self._state, self._emit, self._tasks = state, emit, tasks
        self._never = Notifier()
        self._wires: dict[str, Connection] = {}

    def add(self, join: p.Join, wire: Connection) -> None:
        """Take the place of an older stream of the same member."""
        if old := self._wires.get(join.replica):
            old.close()
        self._wires[join.replica] = wire

    async def serve(self, join: p.Join, wire: Connection) -> None:
        """Until the stream breaks. Beats are on time alone: a state a change to each of N members would be N² lines.
        Raises ProtocolError."""

        def on_message(state: p.MemberState) -> None:
            """All agents of a job have the same certificate: a line speaks for the member that joined, and no other
            (decision "A member speaks for itself")."""
            if (state.replica, state.instance) != (join.replica, join.instance):
                raise ProtocolError(
                    f"{join.replica} ({join.instance}) may not speak for {state.replica} ({state.instance})"
                )
            self._emit(e.MemberMessage(state))

        detail = ""
        try:
            beats = stream(wire, self._state, self._never, MEMBER, p.BEAT_SECONDS, often)
            with self._tasks.alongside("stream to member", beats):
                await _listen(wire, on_message, (p.MemberState,))
        except ProtocolError as error:
            detail = f"said what it may not: {error}"
            raise
        finally:
            if self._wires.get(join.replica) is wire:
                del self._wires[join.replica]
                self._emit(e.MemberGone(join.round, join.claim, join.replica, detail))

    def send(self, message: p.Message, only: str = "") -> None:
        for replica, wire in self._wires.items():
            if only in ("", replica):
                wire.write(message)

    def close(self) -> None:
        wires, self._wires = self._wires, {}
        for wire in wires.values():
            wire.close()
