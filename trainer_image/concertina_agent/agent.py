"""The shell around `core.machine`: events in from sockets, processes and files, effects out to them. One thread."""

from __future__ import annotations

import asyncio
import collections
import concurrent.futures
import dataclasses
import secrets
import signal
import socket
import time
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any, Optional

import concertina_protocol as p
from concertina_agent.changes import Changes
from concertina_agent.channel import ChannelServer
from concertina_agent.core import events as e
from concertina_agent.core import machine
from concertina_agent.core.agent_state import AgentState
from concertina_agent.files import seen
from concertina_agent.files.snapshots import Snapshots
from concertina_agent.log import log
from concertina_agent.net import tls
from concertina_agent.net.link import MemberStreams, follow_lead, tell
from concertina_agent.net.server import Answered, Server
from concertina_agent.net.shard_wire import ShardWire
from concertina_agent.net.wire import Dialer, Pinger, Wire
from concertina_agent.settings import Settings
from concertina_agent.transfers import store
from concertina_agent.transfers.copies import Peers
from concertina_agent.transfers.uploads import Uploads
from concertina_agent.workers.local_workers import LocalWorkers
from concertina_agent.workers.processes import Reaper
from concertina_agent.workers.workers import ForkParent
from concertina_protocol import addresses

PING_SECONDS = 0.3
PINGS, MORE_SECONDS = 8, 0.03
"""Handshakes cost milliseconds at both ends, and all agents make theirs at the same time: an agent has so many pings
under way, and where there are more candidates each has so much longer for each of them."""
TICK_SECONDS = 0.25
FAREWELL_SECONDS = 0.2
"""For the last lines to the lead and the operator to arrive before the streams break."""
QUIET = (e.Tick, e.WorkerSaid, e.MemberSaid, e.LeadSaid, e.PeerCopied, e.CopyHeld)
"""Events that come all the time; not logged."""


class Agent:
    def __init__(self, settings: Settings) -> None:
        """Inside a running event loop. Reads the volume; raises OSError or ssl.SSLError with what is missing."""
        self._settings = settings
        settings.volume.mkdir(parents=True, exist_ok=True)
        self._snapshots = Snapshots(settings.volume)
        self.instance = secrets.token_hex(8)
        self._core = AgentState(
            settings.replica,
            settings.uid,
            self.instance,
            settings.workers,
            bundled=settings.bundled,
            storage=p.Storage("Unknown") if settings.checkpoints else None,
            seen=seen.read(settings.volume),
            held=self._snapshots.scan(),
        )
        self._disk = concurrent.futures.ThreadPoolExecutor(1, "seen")
        self._persisted: asyncio.Future[None]
        """Of the last PersistSeen; one comes before every KillWorkers."""
        self._changes = Changes()
        self._dialer = Dialer(tls.client_context(settings.identity), settings.uid)
        self._pinger = Pinger(self._dialer, settings.uid)
        self._server = Server(settings.uid, tls.server_context(settings.identity), self)
        self._members = MemberStreams(self._core.beat, self.emit)
        self._reaper = Reaper()
        self._parent: Optional[ForkParent] = None
        if settings.bundled:
            self._parent = ForkParent(f"{settings.package}.preload", settings.environment, self._reaper)
        self._local = LocalWorkers(settings, self._reaper, self._parent, self.emit)
        self._peers = Peers(settings.uid, self._dialer, self._snapshots, self.emit)
        self._uploads = Uploads(self.emit)
        parts = (self._local, self._peers, self._uploads, self._snapshots)
        self._channel = ChannelServer(settings.volume, *parts, self.emit, lambda: self._core.latest)
        self._store: Optional[socket.socket] = None
        self._link: Optional[asyncio.Task[None]] = None
        self._replies: dict[int, Callable[[p.Message], None]] = {}
        self._requests = 0
        self._events: collections.deque[e.Event] = collections.deque()
        self._busy = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._exit: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    # --- life -------------------------------------------------------------------------------------------------------

    async def run(self) -> int:
        """Until it is told to go; the exit code."""
        settings, loop = self._settings, asyncio.get_running_loop()
        self._reaper.start()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.emit, e.Noticed(settings.grace))
        self._channel.start()
        self._server.start(settings.pod_ip, settings.port)
        address = addresses.join(settings.pod_ip, settings.port)
        log("agent_started", replica=settings.replica, instance=self.instance, address=address, seen=self._core.seen)
        self._spawn(self._tick())
        self._spawn(self._warm_up())
        try:
            code = await self._exit
            await asyncio.sleep(FAREWELL_SECONDS)
            return code
        finally:
            await self._stop()

    async def _stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await self._server.close()
        self._members.close()
        self._pinger.close()
        await self._local.kill()
        if self._parent is not None:
            self._parent.stop()
        self._channel.close()

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_SECONDS)
            self.emit(self._local.look())

    async def _warm_up(self) -> None:
        if self._parent is not None:
            self._parent.start()
            error = await asyncio.shield(self._parent.warm)
            log("warm", error=error)
            self.emit(e.Warm(error))
            if self._settings.checkpoints and not self._parent.warm.result():
                await self._uploads.keep_running(self._parent, self._settings, self._channel.path)
        else:
            self.emit(e.Warm())

    # --- events and effects -----------------------------------------------------------------------------------------

    def emit(self, event: e.Event) -> None:
        """Events that come up while effects are carried out wait for their turn."""
        self._events.append(event)
        if self._busy:
            return
        self._busy = True
        try:
            while self._events:
                self._take(self._events.popleft())
        except Exception as error:  # half carried out: better gone and started again than wrong
            if not self._exit.done():
                self._exit.set_exception(error)
            raise
        finally:
            self._busy = False

    def _take(self, event: e.Event) -> None:
        effects = machine.step(self._core, event, time.monotonic(), time.time())
        if not isinstance(event, QUIET):
            what = event.message if isinstance(event, e.Asked) else event
            log(type(what).__name__, round=getattr(what, "round", self._core.seen[0]))
        for effect in effects:
            _CARRY_OUT[type(effect)](self, effect)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        """An error nobody expected ends the agent: its pod is replaced, and the log says why."""
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None and not self._exit.done():
            self._exit.set_exception(error)

    def _persist(self, effect: e.PersistSeen) -> None:
        """In a thread, one at a time: a disk that takes seconds keeps no beat waiting."""
        self._persisted = asyncio.get_running_loop().run_in_executor(
            self._disk, seen.write, self._settings.volume, effect.round, effect.claim
        )

    def _kill(self, effect: e.KillWorkers) -> None:
        self._members.close()
        if self._link is not None:
            self._link.cancel()
        self._peers.stop()
        self._uploads.abandon()
        self._spawn(self._kill_and_scan(effect.round, self._persisted))

    async def _kill_and_scan(self, round: int, persisted: asyncio.Future[None]) -> None:
        await self._local.kill()
        await persisted
        self.emit(e.WorkersGone(round, self._snapshots.scan()))

    def _bind_store(self, effect: e.BindStore) -> None:
        host = self._settings.pod_ip
        self._close_store()
        if self._settings.bundled:
            self._store = store.bind(host)
            port = self._store.getsockname()[1]
        else:
            port = store.reserve(host)
        self.emit(e.StoreBound(effect.round, effect.claim, addresses.join(host, port)))

    def _close_store(self) -> None:
        if self._store is not None:
            self._store.close()
        self._store = None

    def _reach_out(self, effect: e.ReachOut) -> None:
        self._spawn(self._ping_all(effect.prepare))

    async def _ping_all(self, prepare: p.Prepare) -> None:
        some = asyncio.Semaphore(PINGS)
        timeout = PING_SECONDS + MORE_SECONDS * max(0, len(prepare.candidates) - PINGS)

        async def reachable(candidate: p.Candidate) -> bool:
            if candidate.replica == self._settings.replica:
                return True
            async with some:
                return await self._pinger.reachable(candidate.address, timeout)

        answers = await asyncio.gather(*map(reachable, prepare.candidates))
        reached = tuple(c.replica for c, there in zip(prepare.candidates, answers) if there)
        self.emit(e.Reached(prepare, reached))

    def _reply(self, effect: e.Reply) -> None:
        self._replies.pop(effect.request)(effect.message)

    def _start_round(self, effect: e.StartRound) -> None:
        assign = effect.assign
        listening, self._store = (self._store, None) if effect.lead else (None, self._store)
        self._close_store()
        self._peers.begin(assign, self._settings.replica)
        self._local.start(assign, effect.me, listening, self._channel.environment(assign.round))
        if not effect.lead:
            join = p.Join(assign.uid, assign.round, assign.claim, self._settings.replica, self.instance)
            address = assign.members[0].address
            self._link = self._spawn(
                follow_lead(self._dialer, join, address, self._core.member_state, self._changes, self.emit)
            )

    def _ship(self, effect: e.Ship) -> None:
        if effect.is_slot:
            link = self._snapshots.link_for_shipping(Path(effect.path), effect.id.step)
            effect = dataclasses.replace(effect, path=str(link), is_slot=False)
        self._uploads.ship(effect)

    def _exit_with(self, effect: e.Exit) -> None:
        if not self._exit.done():
            log("agent_exits", code=effect.code)
            self._exit.set_result(effect.code)

    # --- what the server asks ---------------------------------------------------------------------------------------

    async def answer(self, message: Answered) -> p.Message:
        future: asyncio.Future[p.Message] = asyncio.get_running_loop().create_future()
        self._ask(message, lambda reply: None if future.done() else future.set_result(reply))
        return await future

    def _ask(self, message: e.Request, reply: Callable[[p.Message], None]) -> None:
        self._requests += 1
        self._replies[self._requests] = reply
        self.emit(e.Asked(self._requests, message))

    async def watch(self, wire: Wire) -> None:
        await tell(wire, self._core.report, self._changes)

    async def join(self, message: p.Join, wire: Wire) -> None:
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

    async def index(self, message: p.Index, wire: Wire) -> None:
        await self._peers.answer_index(message, wire)

    async def pull(self, message: p.Pull, wire: ShardWire) -> None:
        await self._peers.answer_pull(message, wire)


_CARRY_OUT: Mapping[type, Callable[[Agent, Any], None]] = {
    e.PersistSeen: Agent._persist,
    e.KillWorkers: Agent._kill,
    e.BindStore: Agent._bind_store,
    e.ReachOut: Agent._reach_out,
    e.Reply: Agent._reply,
    e.StartRound: Agent._start_round,
    e.CopyFrom: lambda agent, effect: agent._peers.copy_from(effect),
    e.DropSnapshots: lambda agent, effect: agent._snapshots.drop(effect.ids),
    e.ToWorker: lambda agent, effect: agent._local.send(effect.rank, effect.message),
    e.SignalWorkers: lambda agent, effect: agent._local.signal(effect.signal),
    e.ToMembers: lambda agent, effect: agent._members.send(effect.message, effect.only),
    e.Ship: Agent._ship,
    e.Publish: lambda agent, effect: agent._uploads.publish(effect),
    e.Undo: lambda agent, effect: agent._uploads.undo(effect.undone),
    e.LookAtStorage: lambda agent, effect: agent._uploads.look(),
    e.CollectStacks: lambda agent, effect: agent._local.collect_stacks(effect.round),
    e.ReportChanged: lambda agent, effect: agent._changes.tell(),
    e.Exit: Agent._exit_with,
}
