"""Simulated agent of one replica: the real core and the real network code, with simulated workers.

The simulated agent differs from `concertina_agent.agent` to save processor time that is not the operator's. It starts
no process, writes no file, and looks for changes less often while nothing happens. Members and coordinator send
heartbeats less often (`beat_rarely`). Whether another replica can be reached is tested with a connection without a
handshake (`Reach`). The agent's real code sends all messages to the operator and to other simulated agents, over mTLS.
The operator gets messages as often as from a real agent.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import secrets
import socket
import time
from collections.abc import Callable, Mapping
from typing import Any

import concertina_protocol as p
from concertina.agents.calls import dial
from concertina_agent.agent import FAREWELL_SECONDS
from concertina_agent.core import events as e
from concertina_agent.core import machine
from concertina_agent.core.agent_state import AgentState
from concertina_agent.core.round import coordinator
from concertina_agent.net import tls
from concertina_agent.net.net_driver import NetworkDriver
from concertina_agent.net.shard_wire import ShardWire
from concertina_agent.net.wire import Connector
from concertina_agent.runtime.nursery import TaskGroup
from concertina_agent.settings import AgentSettings
from concertina_agent.transfers.learning import ModuleLearning
from concertina_agent.workers.workers_driver import TICK_SECONDS
from concertina_protocol import addresses
from concertina_protocol import worker_channel as w
from concertina_protocol.connection import Connection
from concertina_protocol.heartbeat import WorkerPhase

START_SECONDS = 0.2
"""Seconds until the workers of a round have started."""
STEP_SECONDS = 4.0
QUIET_TICK_SECONDS, ALERT_SECONDS = 15.0, 3.0
"""Seconds between two ticks while there are no events, and seconds for which ticks are frequent after an event.

Frequent ticks have the same interval as in a real agent.
"""
MEMBER_BEAT_SECONDS, MEMBER_SILENCE_SECONDS = 20.0, 90.0
"""Interval of heartbeats between members, and silence after which a member counts as lost, in seconds.

The silence can be long, because a stand-in that dies breaks its connections.
"""
ROUTINE = (e.Tick, e.MemberMessage, e.CoordinatorMessage, e.WorkerMessage)
END_SECONDS = 0.01
"""Seconds until workers have ended after they were stopped."""
REACH_SECONDS = 3.0
"""Time limit in seconds for a connection to another replica.

The limit is long because connections are slow if all processes share two cores. A connection to a dead replica is
refused at once.
"""
STORE_PORT = 29500
"""Port of the round's store. Nothing connects to it."""
REACH_PORT = 29501
REACH_BACKLOG = 64


def beat_rarely() -> None:
    """Make the members and coordinators of this process send heartbeats less often.

    The operator does not receive heartbeats. At the usual rate, they caused almost all of the processor time of a
    simulated agent: 6 ms per second for a job with four replicas.
    """
    p.BEAT_SECONDS = MEMBER_BEAT_SECONDS
    for module in (p, coordinator):
        setattr(module, "SILENCE_SECONDS", MEMBER_SILENCE_SECONDS)  # noqa: B010


class NoShards:
    """Shard store without shards. The jobs have custom commands, which have no snapshots."""

    async def answer_index(self, message: p.Index, wire: Connection) -> None:
        await wire.send(p.Refused("no snapshots here", 0, ""))

    async def answer_pull(self, message: p.Pull, wire: ShardWire) -> None:
        await wire.send(p.Refused("no snapshots here", 0, ""))


class StandIn:
    def __init__(self, settings: AgentSettings) -> None:
        """Initialize the simulated agent. An event loop must be running.

        Raises OSError or ssl.SSLError if the agent's certificate can't be read.
        """
        self._settings = settings
        self.ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        """Exit code. The future is done when the stand-in has ended on its own."""
        self._events: collections.deque[e.Event] = collections.deque()
        self._busy = self._dead = False
        self._alert_until = 0.0
        self._ticks: asyncio.TimerHandle | None = None
        self._tasks = TaskGroup(self._fail)
        self._reach = Reach(settings.pod_ip)
        self._core = AgentState(
            settings.replica, settings.uid, secrets.token_hex(8), settings.workers, bundled=settings.bundled
        )
        self._workers = StandInWorkers(self.emit, self._tasks)
        connector = Connector(tls.client_context(settings.identity), settings.uid)
        learning = ModuleLearning(settings.uid, None, connector, self.emit, self._tasks)
        self._network = network = NetworkDriver(
            settings, self._core, connector, NoShards(), learning, self.emit, self._tasks
        )
        self._carry_out: Mapping[type, tuple[Callable[[Any], object], ...]] = {
            e.PersistSeen: (),
            e.KillWorkers: (network.leave_round, self._workers.kill),
            e.BindStore: (self._bind_store,),
            e.PingPeers: (self._look_for_peers,),
            e.Reply: (network.reply,),
            e.StartRound: (self._workers.start, network.join_coordinator),
            e.SendToWorker: (),
            e.SignalWorkers: (self._workers.signal,),
            e.CollectStacks: (lambda effect: self._soon(e.StacksCollected(effect.round, {})),),
            e.Broadcast: (network.broadcast,),
            e.ReportChanged: (network.report_changed,),
            e.Exit: (self._exit,),
        }
        """Functions that carry out each type of effect, in order. Effects on storage have no functions."""

    def start(self) -> None:
        """Start to listen for connections.

        Raises OSError if the address is not available.
        """
        self._network.start()
        self._reach.start()
        self._soon(e.Warm())

    @property
    def address(self) -> str:
        return self._settings.pod_ip

    def notice(self, grace: float) -> None:
        """Handle a SIGTERM from the simulated node."""
        self.emit(e.TerminationNotice(grace))

    async def die(self) -> None:
        """Close the port and break all connections, as happens when an agent's process is killed."""
        self._dead = True
        self._tasks.cancel()
        if self._ticks is not None:
            self._ticks.cancel()
        self._reach.close()
        await self._network.stop()

    def emit(self, event: e.Event) -> None:
        """Handle an event. Events that occur while effects are carried out are handled afterwards."""
        if self._dead:
            return
        if not isinstance(event, ROUTINE):
            self._stay_alert()
        self._events.append(event)
        if self._busy:
            return
        self._busy = True
        try:
            while self._events:
                for effect in machine.step(self._core, self._events.popleft(), time.monotonic(), time.time()):
                    for carry_out in self._carry_out[type(effect)]:
                        carry_out(effect)
        except Exception as error:
            self._fail(error)
            raise
        finally:
            self._busy = False

    def _soon(self, event: e.Event) -> None:
        asyncio.get_running_loop().call_soon(self.emit, event)

    def _stay_alert(self) -> None:
        loop = asyncio.get_running_loop()
        was_alert, self._alert_until = loop.time() < self._alert_until, loop.time() + ALERT_SECONDS
        if not was_alert:
            if self._ticks is not None:
                self._ticks.cancel()
            self._ticks = loop.call_later(TICK_SECONDS, self._tick)

    def _tick(self) -> None:
        loop = asyncio.get_running_loop()
        alert = loop.time() < self._alert_until
        self._ticks = loop.call_later(TICK_SECONDS if alert else QUIET_TICK_SECONDS, self._tick)
        self.emit(e.Tick(self._workers.heartbeats()))

    def _bind_store(self, effect: e.BindStore) -> None:
        self._soon(e.StoreBound(effect.round, effect.claim, addresses.join(self._settings.pod_ip, STORE_PORT)))

    def _look_for_peers(self, effect: e.PingPeers) -> None:
        self._tasks.start("look for peers", self._reached(effect.prepare, effect.asked))

    async def _reached(self, prepare: p.Prepare, asked: tuple[p.Candidate, ...]) -> None:
        reaches = self._reach.of if len(asked) < len(prepare.candidates) else _listens
        there = await asyncio.gather(*(reaches(candidate.address) for candidate in asked))
        reached = tuple(c.replica for c, listens in zip(asked, there, strict=True) if listens)
        self.emit(e.Reached(prepare, reached))

    def _exit(self, effect: e.Exit) -> None:
        loop = asyncio.get_running_loop()
        loop.call_later(FAREWELL_SECONDS, lambda: None if self.ended.done() else self.ended.set_result(effect.code))

    def _fail(self, error: BaseException) -> None:
        if not self.ended.done():
            self.ended.set_exception(error)


class StandInWorkers:
    """Simulated workers. Each finishes a step every few seconds, and rank 0 reports its steps."""

    def __init__(self, emit: Callable[[e.Event], None], tasks: TaskGroup) -> None:
        self._emit, self._tasks = emit, tasks
        self._running: asyncio.Task[None] | None = None
        self._ranks: range = range(0)
        self._round, self._first, self._begun = 0, 0, 0.0

    def start(self, effect: e.StartRound) -> None:
        mine = effect.assign.members[effect.me]
        ranks = range(mine.first_rank, mine.first_rank + mine.workers)
        self._round = effect.assign.round
        self._running = self._tasks.start("train", self._train(ranks, effect.assign.restore.step))

    def heartbeats(self) -> tuple[p.Heartbeat, ...]:
        steps, still = divmod(time.monotonic() - self._begun, STEP_SECONDS)
        step = self._first + int(steps)
        return tuple(p.Heartbeat(rank, step, WorkerPhase.COMPUTING, still) for rank in self._ranks)

    def kill(self, effect: e.KillWorkers) -> None:
        self._stop()
        asyncio.get_running_loop().call_later(END_SECONDS, self._emit, e.WorkersGone(effect.round))

    def signal(self, effect: e.SignalWorkers) -> None:
        ranks = self._ranks
        self._stop()
        for rank in ranks:
            exited = e.WorkerExited(self._round, rank, -effect.signal)
            asyncio.get_running_loop().call_later(END_SECONDS, self._emit, exited)

    def _stop(self) -> None:
        if self._running is not None:
            self._running.cancel()
        self._running, self._ranks = None, range(0)

    async def _train(self, ranks: range, step: int) -> None:
        await asyncio.sleep(START_SECONDS)
        self._ranks, self._first, self._begun = ranks, step, time.monotonic()
        for rank in ranks:
            self._emit(e.WorkerMessage(self._round, rank, w.Hello(rank, 1)))
        first_step_at = time.time() + STEP_SECONDS
        while 0 in ranks:
            await asyncio.sleep(STEP_SECONDS)
            step += 1
            self._emit(e.WorkerMessage(self._round, 0, self._progress(step, first_step_at)))

    def _progress(self, step: int, first_step_at: float) -> p.Progress:
        return p.Progress(
            step=step,
            steps=None,
            loss=1.0,
            tokens_per_second=1000.0,
            step_seconds=STEP_SECONDS,
            position=step,
            phase=WorkerPhase.TRAINING,
            at=time.time(),
            first_step_at=first_step_at,
        )


class Reach:
    """Check of whether other simulated agents can be reached, over connections that stay open.

    In a large job, each simulated agent always checks the same few others. Real agents also keep the connections for
    their pings open. For an agent, a ping takes 0.05 ms for both ends together.
    """

    def __init__(self, pod_ip: str) -> None:
        self._listening = socket.create_server(
            (pod_ip, REACH_PORT), family=addresses.family(pod_ip), backlog=REACH_BACKLOG
        )
        self._listening.setblocking(False)
        self._accepted: list[socket.socket] = []
        self._kept: dict[str, socket.socket] = {}

    def start(self) -> None:
        asyncio.get_running_loop().add_reader(self._listening, self._accept)

    def close(self) -> None:
        """Close all connections, so that the other ends notice."""
        asyncio.get_running_loop().remove_reader(self._listening)
        for connection in (self._listening, *self._accepted, *self._kept.values()):
            connection.close()

    async def of(self, agent: str) -> bool:
        host, _ = addresses.split(agent)
        if (connection := self._kept.get(host)) is not None:
            if _is_open(connection):
                return True
            self._kept.pop(host).close()
        connected = await _dial(host, REACH_PORT)
        if connected is not None:
            self._kept[host] = connected
        return connected is not None

    def _accept(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while True:
                self._accepted.append(self._listening.accept()[0])


def _is_open(connected: socket.socket) -> bool:
    """Return whether the connection is open. The other end never sends anything."""
    try:
        connected.recv(1)
    except BlockingIOError:
        return True
    except OSError:
        pass
    return False


async def _listens(agent: str) -> bool:
    connected = await _dial(*addresses.split(agent))
    if connected is not None:
        connected.close()
    return connected is not None


async def _dial(host: str, port: int) -> socket.socket | None:
    made = socket.socket(addresses.family(host))
    try:
        return await asyncio.wait_for(dial(made, host, port), REACH_SECONDS)
    except (OSError, TimeoutError):
        made.close()
        return None
