"""Driver of this agent's connections, except the connections that transfer shards.

The coordinator is the agent of rank 0. The connections carry requests to this agent, and the streams between the
coordinator and its members. The driver carries out the effects of the state machine that concern these connections.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Optional, Protocol

import concertina_protocol as p
from concertina_agent.core import events as e
from concertina_agent.core.agent_state import AgentState
from concertina_agent.net import tls
from concertina_agent.net.link import MemberStreams, follow_coordinator
from concertina_agent.net.server import AgentServer, Answered
from concertina_agent.net.shard_wire import ShardWire
from concertina_agent.net.state_stream import CHANGES, WHOLE, often, stream
from concertina_agent.net.wire import Connector, KeptConnections
from concertina_agent.runtime.notifier import Notifier
from concertina_agent.runtime.nursery import TaskGroup
from concertina_agent.settings import AgentSettings
from concertina_protocol.connection import Connection

PING_SECONDS = 1.0
"""Timeout of a Ping in seconds.

While workers use all cores of a node, its agent may answer a TLS handshake late. With a timeout of 0.3 s, a healthy
replica was counted as unreachable and could not join. A replica that is really unreachable delays a recovery once by
PING_SECONDS.
"""
PINGS, MORE_SECONDS = 8, 0.03
"""Number of Pings that an agent sends at once, and further seconds of timeout for each candidate beyond that number.

A TLS handshake takes milliseconds at both ends, and all agents send their Pings at the same time.
"""
RELAY_SECONDS = 5.0
"""Timeout in seconds of a request that is passed on for the operator. The operator also waits at most this long."""
LONGEST_SECONDS = 60.0
"""Maximum seconds between two lines of a stream, even if the operator requests a longer time."""
WHOLE_SECONDS = 0.02
"""Minimum seconds between two whole Reports that differ only in numbers."""
RELAYS = 128
"""Maximum number of agents to which one request is passed on."""


class ShardHolder(Protocol):
    """Interface to the part of the agent that answers requests for shards."""

    async def answer_index(self, message: p.Index, wire: Connection) -> None: ...

    async def answer_pull(self, message: p.Pull, wire: ShardWire) -> None: ...


class Learns(Protocol):
    """Interface to the part of the agent that exchanges the names of the modules that the user's script imports."""

    def answer(self) -> p.Message: ...

    def hear_of(self, address: str) -> None:
        """Store the address of an agent, from which this agent may request the names of the modules of the script."""


class NetworkDriver:
    """Driver of this agent's connections, except the connections that transfer shards.

    The driver carries out the effects of the state machine that concern these connections.
    """

    def __init__(
        self,
        settings: AgentSettings,
        agent: AgentState,
        connector: Connector,
        shards: ShardHolder,
        learning: Learns,
        emit: Callable[[e.Event], None],
        tasks: TaskGroup,
    ) -> None:
        """Prepare the agent's connections. The agent begins to listen in `start`.

        Raises OSError or ssl.SSLError if the certificates are missing or invalid.
        """
        self._settings, self._agent, self._connector, self._emit, self._tasks = settings, agent, connector, emit, tasks
        self._connections = KeptConnections(connector)
        self._members = MemberStreams(agent.beat, self._connections, emit, tasks)
        self.index, self.pull = shards.answer_index, shards.answer_pull
        self._learning = learning
        self._server = AgentServer(settings.uid, tls.server_context(settings.identity), self, tasks)
        self._link: Optional[asyncio.Task[None]] = None
        """Task that follows the coordinator, or None."""
        self._changes = Notifier()
        """Notifier that wakes the tasks of streams when this agent's report has changed."""
        self._replies: dict[int, Callable[[p.Message], None]] = {}
        self._requests = 0

    def start(self) -> None:
        """Listen for connections.

        Raises OSError if the address is not available.
        """
        self._server.start(self._settings.pod_ip, self._settings.port)

    async def stop(self) -> None:
        await self._server.close()
        self._members.close()
        self._connections.close()

    # --- effects ----------------------------------------------------------------------------------------------------

    def reply(self, effect: e.Reply) -> None:
        self._replies.pop(effect.request)(effect.message)

    def report_changed(self, effect: e.ReportChanged) -> None:
        self._changes.notify()

    def broadcast(self, effect: e.Broadcast) -> None:
        self._members.send(effect.message, effect.only)

    def leave_round(self, effect: e.KillWorkers) -> None:
        self._members.close()
        if self._link is not None:
            self._link.cancel()

    def join_coordinator(self, effect: e.StartRound) -> None:
        assign = effect.assign
        if effect.coordinator:
            self._members.coordinator(assign)
            return
        join = p.Join(assign.uid, assign.round, assign.claim, self._agent.replica, self._agent.instance)
        state = self._agent.member_state
        following = follow_coordinator(self._connector, assign, join, state, self._changes, self._emit, self._tasks)
        self._link = self._tasks.start("follow coordinator", following)

    def ping_peers(self, effect: e.PingPeers) -> None:
        self._tasks.start("ping peers", self._ping_all(effect.prepare, effect.asked))

    async def _ping_all(self, prepare: p.Prepare, candidates: tuple[p.Candidate, ...]) -> None:
        slots = asyncio.Semaphore(PINGS)
        timeout = PING_SECONDS + MORE_SECONDS * max(0, len(candidates) - PINGS)
        ping = p.encode(p.Ping(prepare.uid))

        async def reachable(candidate: p.Candidate) -> bool:
            if candidate.replica == self._settings.replica:
                return True
            async with slots:
                try:
                    answer = p.decode(await self._connections.ask(candidate.address, ping, timeout))
                except (OSError, asyncio.TimeoutError, p.ProtocolError):
                    return False
                return isinstance(answer, p.Accepted)

        answers = await asyncio.gather(*map(reachable, candidates))
        self._emit(e.Reached(prepare, tuple(c.replica for c, answered in zip(candidates, answers) if answered)))

    # --- requests that the server passes on -------------------------------------------------------------------------

    async def answer(self, message: Answered) -> p.Message:
        future: asyncio.Future[p.Message] = asyncio.get_running_loop().create_future()
        self._ask(message, lambda reply: None if future.done() else future.set_result(reply))
        return await future

    async def relay(self, message: p.Relay, wire: Connection) -> None:
        """Pass a request of the operator on to other agents, and send their answers to the operator.

        The request is passed on as an encoded line, which only the receiving agents decode.
        """
        line = message.line.encode() + b"\n"

        async def pass_on(to: p.Candidate) -> None:
            try:
                if to.replica == self._settings.replica:
                    own = p.decode(line)
                    if not isinstance(own, (p.Prepare, p.Assign, p.Release)):
                        raise p.ProtocolError(f"a {type(own).__name__} is never forwarded")
                    answer = p.encode(await self.answer(own))
                else:
                    answer = await self._connections.ask(to.address, line, RELAY_SECONDS)
            except (OSError, asyncio.TimeoutError, p.ProtocolError) as error:
                error_text = f"{to.address}: {str(error) or type(error).__name__}"
                relayed = p.Relayed(to.replica, error=error_text, request=message.request)
            else:
                line_back = answer.decode(errors="replace").rstrip("\n")
                relayed = p.Relayed(to.replica, line_back, request=message.request)
            with contextlib.suppress(OSError):
                await wire.send(relayed)

        await asyncio.gather(*map(pass_on, message.to[:RELAYS]))

    async def watch(self, message: p.Watch, wire: Connection) -> None:
        if message.coordinator and self._agent.round is None:
            self._learning.hear_of(message.coordinator)
        report, news = self._agent.report, self._changes
        if message.changes:
            pace, idle_beat = _bounded(message.pace), _bounded(message.idle_beat)

            def beat(report: p.Report) -> float:
                return idle_beat if report.state is p.State.IDLE else p.REPORT_SECONDS

            await stream(wire, report, news, CHANGES, pace, beat)
        else:
            await stream(wire, report, news, WHOLE, WHOLE_SECONDS, often)

    async def learn(self, message: p.Learn, wire: Connection) -> None:
        await wire.send(self._learning.answer())

    async def join(self, message: p.Join, wire: Connection) -> None:
        joined = False

        def reply(answer: p.Message) -> None:
            nonlocal joined
            wire.write(answer)
            if isinstance(answer, p.Accepted):
                joined = True
                self._members.add(message, wire)

        self._ask(message, reply)
        await wire.drain()
        if joined:
            await self._members.serve(message, wire)

    def _ask(self, message: e.Request, reply: Callable[[p.Message], None]) -> None:
        self._requests += 1
        self._replies[self._requests] = reply
        self._emit(e.RequestReceived(self._requests, message))


def _bounded(seconds: float) -> float:
    return seconds if 0 <= seconds <= LONGEST_SECONDS else LONGEST_SECONDS
