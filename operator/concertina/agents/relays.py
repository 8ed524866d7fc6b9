"""Calls that one agent passes on to other agents, so that the operator needs no connection to each of them.

While a job trains, the operator has one open stream to the job: that of the coordinator (the agent of rank 0). The
operator sends calls for the other members over this stream. The coordinator passes the calls on over connections that
it needs anyway. If no answer of a member arrives through the coordinator, the operator calls that member directly. A
member counts as silent only if it does not answer the direct call either (decision "Agents forward the operator's
messages").
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import math
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

import concertina_protocol as protocol
from concertina.agents.calls import (
    Answer,
    CallError,
    ConnectionIdentity,
    Waits,
    check_may_act,
    connection,
    parsed,
    receive,
    usable,
)
from concertina.api.pod_names import parse

log = logging.getLogger(__name__)
RELAY_SECONDS, EACH_SECONDS = 1.8, 0.005
"""Longest time in seconds between two answers that an agent passes on: a constant part, and a part for each replica.

All replicas to which the message goes count. After this time, the operator directly calls the replicas that have not
answered. A repeated request does no harm. The constant part is longer than one second, for which an agent waits for the
answer to a Ping before it answers a Prepare.
"""
RELAYED_ABOVE = 32
"""Largest number of replicas to which a single agent passes a message on.

With more replicas, several agents pass the message on, each to a part of the replicas.
"""
Relayable = protocol.Prepare | protocol.Assign | protocol.Release


@dataclass(frozen=True)
class Coordinator:
    """Last agent that reported that it is the job's coordinator, and the members with which this agent was in contact.

    The coordinator is the agent of rank 0. After the message Prepare, which begins a new round, an agent no longer
    reports that it is the coordinator. It can still pass on the message Assign, which gives the members their ranks.

    A round is a period in which a fixed set of replicas trains.
    """

    replica: str = ""
    """Replica of the coordinator; empty if none has reported yet."""
    members: frozenset[str] = frozenset()
    """Members of the coordinator's round that are not lost."""
    _listed: Mapping[str, protocol.MemberState] | None = field(default=None, compare=False, repr=False)
    """Members in the report from which this object was made.

    Most reports contain the identical object, so a comparison by identity shows that nothing has changed.
    """

    def after(self, report: protocol.Report) -> Coordinator:
        """Return the job's coordinator (the agent of rank 0) as of this report of one of the job's agents."""
        if not report.coordinator or (report.replica == self.replica and report.members is self._listed):
            return self
        lost = protocol.FailureReason.MEMBER_LOST
        members = frozenset(
            name
            for name, state in report.members.items()
            if name != report.replica and (state.failure is None or state.failure.reason != lost)
        )
        return Coordinator(report.replica, members, report.members)

    def passes_on(self, replica: str, streams: Collection[str]) -> bool:
        """Return whether the operator sends calls for a replica to the coordinator, which passes them on.

        Args:
            replica: Replica to call.
            streams: Replicas to which the operator has an open stream. It sends their calls over that stream instead.
        """
        return self.replica in streams and replica in self.members and replica not in streams


def relay_seconds(replicas: int) -> float:
    """Return the longest time in seconds between two answers that an agent passes on.

    Args:
        replicas: Number of all replicas that receive the message.
    """
    return RELAY_SECONDS + EACH_SECONDS * replicas


def parts(replicas: Sequence[str], connected: Callable[[str], bool]) -> list[list[str]]:
    """Split replicas into parts. In each part, the first replica passes a message on to the other replicas.

    The number of parts is about the number of replicas in each part, so the time to pass a message on grows with the
    square root of the number of replicas. A replica is in the same part each time, because the agents of a part reuse
    their connections to each other. If the operator is connected to a replica of a part, such a replica is the first.
    """
    count = math.isqrt(len(replicas) - 1) + 1
    made: list[list[str]] = [[] for _ in range(count)]
    for position, replica in enumerate(replicas):
        name = parse(replica)
        made[(position if name is None or name.index is None else name.index) % count].append(replica)
    for part in made:
        part.sort(key=lambda replica: not connected(replica))
    return [part for part in made if part]


async def relay(
    identity: ConnectionIdentity,
    address: str,
    request: Relayable,
    line: str,
    to: Mapping[str, str],
    silence: float = RELAY_SECONDS,
    waits: Waits = lambda _: None,
) -> AsyncGenerator[tuple[str, Answer | None], None]:
    """Ask the agent at `address` to pass a message on to other agents. Yield each replica with its answer.

    A replica is yielded with None if the agent could not pass the message on, or if the answer does not belong to this
    message. The iterator ends after the last answer, after an error, or when no answer arrives for `silence` seconds.
    It raises no error. The caller must directly call each replica without an answer.

    Args:
        identity: Parameters of the connections to the job's agents.
        address: Address of the agent that passes the message on.
        request: Message to pass on.
        line: The same message, encoded once by the caller, because several agents may pass it on and it may be long.
        to: Address of each replica to which the agent passes the message on.
        silence: Longest time in seconds between two answers.
        waits: Callback with True before the connection waits for its TLS handshake, and with False when the handshake
            begins. An open stream needs no handshake.
    """
    message = protocol.Relay(identity.uid, line, tuple(protocol.Candidate(*entry) for entry in to.items()))
    waiting = dict(to)
    try:
        async with (
            _passing_on(identity, address, message, silence, waits) as next_answer,
            asyncio.timeout(silence) as quiet,
        ):
            while waiting:
                relayed = await next_answer()
                if not isinstance(relayed, protocol.Relayed):
                    raise CallError(f"{address} answered a Relay with a {type(relayed).__name__}")
                if relayed.replica not in waiting:
                    continue
                del waiting[relayed.replica]
                yield relayed.replica, await _passed_back(identity, address, request, relayed)
                quiet.reschedule(asyncio.get_running_loop().time() + silence)
    except Exception as error:  # after any error, the caller must call the remaining replicas itself
        why = str(error) or type(error).__name__
        log.info("%d of the %d agents that %s asked have not answered: %s", len(waiting), len(to), address, why)


@contextlib.asynccontextmanager
async def _passing_on(
    identity: ConnectionIdentity, address: str, message: protocol.Relay, silence: float, waits: Waits
) -> AsyncIterator[Callable[[], Awaitable[protocol.Message]]]:
    """Send a Relay message to an agent, and yield a function that returns the next answer.

    The message travels over the agent's open stream if there is one, otherwise over a new connection.

    Raises:
        CallError: When another operator may be the leader, or the stream has ended.
        OSError: When the agent cannot be reached.
        TimeoutError: When the connection or its TLS handshake takes too long.
    """
    if stream := identity.streams.get(address):
        check_may_act(identity)
        async with stream.relay(message, silence) as next_answer:
            yield next_answer
    else:
        async with connection(identity, address, message, waits) as opened:
            yield functools.partial(receive, opened, identity, address)


async def _passed_back(
    identity: ConnectionIdentity, address: str, request: Relayable, relayed: protocol.Relayed
) -> Answer | None:
    """Return the answer of a replica that another agent passed back, or None if it is not an answer to `request`.

    The answer is checked, because the agent that passed it back is not the agent that gave it.
    """
    if relayed.error:
        log.info("%s could not call %s: %s", address, relayed.replica, relayed.error)
        return None
    try:
        line = functools.partial(parsed, relayed.line.encode(), address, identity.line_limits())
        answer = usable(await identity.allowance.handle(line), "Relay", address)
    except CallError as error:
        log.info("%s", error)
        return None
    if isinstance(answer, protocol.Refused):
        return answer
    is_replicas = not isinstance(answer, protocol.Prepared) or answer.replica == relayed.replica
    if is_replicas and (answer.round, answer.claim) == (request.round, request.claim):
        return answer
    log.info("%s passed on an answer of %s that is not one to this request", address, relayed.replica)
    return None
