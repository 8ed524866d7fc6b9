"""The worker processes of the current round in this replica, and the store that they meet at."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable
from typing import Any, Optional

from concertina_agent.core import events as e
from concertina_agent.runtime.nursery import TaskGroup
from concertina_agent.settings import AgentSettings
from concertina_agent.workers import stacks, worlds
from concertina_agent.workers.child_processes import Reaper
from concertina_agent.workers.environment import worker_environment
from concertina_agent.workers.family import ends, kill_group
from concertina_agent.workers.starters import Starter
from concertina_agent.workers.worker_memory import oom_kills
from concertina_agent.workers.workers import Process, StartError
from concertina_protocol import Assign
from concertina_protocol import worker_channel as w
from concertina_protocol.heartbeat import VARIABLE, HeartbeatFile
from concertina_protocol.log import log_event
from concertina_protocol.waiting import within
from concertina_protocol.worker_channel.agent_end import AgentEnd

CHANNEL_EOF_SECONDS = 0.5
"""How long a dead worker's last messages are waited for."""
GONE_SECONDS = 10.0
"""In which what was killed has to end before other processes start: the driver of a device may never let one go."""
STORE_SECONDS = 0.1
"""By which worker 0 of a command of one's own comes before the others. It serves the store, and torch's client that
finds none looks again after 0.3 to 1 s (decision "Worker 0 comes first")."""


@dataclasses.dataclass
class LocalWorker:
    round: int
    rank: int
    process: Process
    assign: Assign
    oom_kills: int
    """Of this container, before it started."""
    heartbeat: HeartbeatFile
    channel: Optional[AgentEnd] = None
    waiting: list[w.Message] = dataclasses.field(default_factory=list)
    """For it, until it has opened its channel."""
    channel_closed: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)
    alone: str = ""
    """How it trains in a world of its own (`worlds`)."""

    @property
    def running(self) -> bool:
        return not self.process.ended.done()


class LocalWorkers:
    def __init__(
        self,
        settings: AgentSettings,
        reaper: Reaper,
        starter: Starter,
        emit: Callable[[e.Event], None],
        tasks: TaskGroup,
    ) -> None:
        """`tasks`: of these workers alone; they end with the workers, as what is half started could not be killed."""
        self._settings, self._reaper, self._starter, self._emit = settings, reaper, starter, emit
        self._workers: dict[int, LocalWorker] = {}
        """By rank."""
        self._others: list[Process] = []
        self._starting: Optional[asyncio.Task[None]] = None
        self._reaping: Optional[asyncio.Task[None]] = None
        """Of what was killed."""
        self._over, self._told_to_end = asyncio.Event(), asyncio.Event()
        self._tasks, self._collecting = tasks, TaskGroup()
        self._started = asyncio.Event()
        self._signal: Optional[int] = None
        """What the workers of this round were sent; who is just being started gets it, too."""
        self._started_at = self._next_look = 0.0
        """When the round's workers were started, and when to look for worlds of their own."""
        self._mismatch = ""
        """As the last WorldsSeen of this round says."""

    # --- start ------------------------------------------------------------------------------------------------------

    def start(self, assign: Assign, me: int, store: Optional[socket.socket], environment: dict[str, str]) -> None:
        """Start the workers of members[me] in the background; `store`: a bound socket to be served here."""
        self._over, self._told_to_end = asyncio.Event(), asyncio.Event()
        self._started, self._signal = asyncio.Event(), None
        self._started_at, self._next_look, self._mismatch = time.monotonic(), 0.0, ""
        self._starting = self._tasks.start("start workers", self._start(assign, me, store, environment))

    async def _start(
        self, assign: Assign, me: int, store: Optional[socket.socket], environment: dict[str, str]
    ) -> None:
        try:
            await self._until_reaped()
            if not await self._until_warm():
                return
            if store is not None:
                self._others.append(await self._starter.serve_store(store))
            first_rank = assign.members[me].first_rank
            for local_rank in range(assign.members[me].workers):
                if first_rank + local_rank == max(first_rank, 1) and not await self._store_may_serve():
                    return
                while not await self._start_one(assign, me, local_rank, environment):
                    if not await self._until_warm():
                        return
        except (StartError, OSError) as error:
            self._emit(e.StartFailed(assign.round, f"Workers could not be started: {error}"))
        finally:
            self._started.set()
            self._not_started(assign, me)
            if store is not None:
                store.close()

    def _not_started(self, assign: Assign, me: int) -> None:
        """Who was sent a signal before there was a process has ended by it."""
        if self._signal is None or self._over.is_set():
            return
        member = assign.members[me]
        for rank in range(member.first_rank, member.first_rank + member.workers):
            if rank not in self._workers:
                log_event("worker_not_started", round=assign.round, rank=rank, signal=self._signal)
                self._emit(e.WorkerExited(assign.round, rank, -self._signal))

    async def _until_reaped(self) -> None:
        """Raises StartError."""
        try:
            await within(GONE_SECONDS, self._reaped())
        except asyncio.TimeoutError:
            raise StartError(
                f"processes that were killed have not ended for {GONE_SECONDS:.0f} s; the driver of a device may hang"
            ) from None

    async def _until_warm(self) -> bool:
        """False where the workers were to end first: what a parent still imports, seconds of it, is not for them."""
        ends = asyncio.ensure_future(self._told_to_end.wait())
        either: set[asyncio.Future[Any]] = {asyncio.ensure_future(self._starter.until_warm()), ends}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        for each in either:
            each.cancel()
        return not self._told_to_end.is_set()

    async def _store_may_serve(self) -> bool:
        """False where the round was over first."""
        if not self._settings.bundled:
            with contextlib.suppress(asyncio.TimeoutError):
                await within(STORE_SECONDS, self._over.wait())
        return not self._over.is_set()

    async def _start_one(self, assign: Assign, me: int, local_rank: int, extra: dict[str, str]) -> bool:
        """False where it has to be asked for again."""
        member = assign.members[me]
        rank = member.first_rank + local_rank
        base = {**self._settings.environment, **extra}
        heartbeat = self._heartbeat(assign.round, rank)
        base[VARIABLE] = heartbeat.path
        environment = worker_environment(base, assign, me, local_rank, self._settings.bundled)
        prefix = f"[rank {rank}] " if member.workers > 1 else ""
        killed = oom_kills()
        process = await self._starter.start(environment, local_rank, prefix)
        if process is None:
            return False
        log_event("worker_started", round=assign.round, rank=rank, pid=process.pid)
        worker = self._workers[rank] = LocalWorker(assign.round, rank, process, assign, killed, heartbeat)
        self._tasks.start("watch worker", self._watch(worker, self._over))
        if not self._settings.bundled:
            self._emit(e.WorkerMessage(assign.round, rank, w.Hello(rank, process.pid)))
        if self._signal is not None:
            process.send_signal(self._signal)
        return True

    async def _watch(self, worker: LocalWorker, over: asyncio.Event) -> None:
        code = await worker.process.ended
        out_of_memory = code == -signal.SIGKILL and oom_kills() > worker.oom_kills
        log_event("worker_ended", round=worker.round, rank=worker.rank, code=code)
        if worker.channel is not None:
            with contextlib.suppress(asyncio.TimeoutError):
                await within(CHANNEL_EOF_SECONDS, worker.channel_closed.wait())
        lines = await worker.process.last_lines()
        if not over.is_set():
            last_error = worker.process.lines.last_error
            self._emit(e.WorkerExited(worker.round, worker.rank, code, lines, last_error, out_of_memory))

    # --- while they run ---------------------------------------------------------------------------------------------

    async def of(self, pid: int) -> Optional[LocalWorker]:
        """The worker that this process is, or belongs to; a fork may speak before its parent's answer has been read."""
        await self._started.wait()
        pids = {pid, _session(pid)}  # a command of one's own may be a shell that runs the script
        return next((worker for worker in self._workers.values() if worker.process.pid in pids), None)

    def attach(self, worker: LocalWorker, channel: AgentEnd) -> None:
        worker.channel = channel
        for message in worker.waiting:
            channel.send(message)
        worker.waiting.clear()

    def send(self, rank: int, message: w.Message) -> None:
        worker = self._workers.get(rank)
        if worker is None:
            return
        if worker.channel is None:
            worker.waiting.append(message)
        else:
            worker.channel.send(message)

    def signal(self, number: int) -> None:
        self._signal = number
        self._told_to_end.set()
        for worker in self._workers.values():
            worker.process.send_signal(number)

    # --- how they are -----------------------------------------------------------------------------------------------

    def poll(self) -> e.Tick:
        """Where each is, and who is stopped."""
        now, running = time.monotonic(), [worker for worker in self._workers.values() if worker.running]
        heartbeats = (heartbeat for worker in running if (heartbeat := worker.heartbeat.read(now)) is not None)
        stopped = ((worker.rank, stacks.stopped(worker.process.pid)) for worker in running)
        return e.Tick(tuple(heartbeats), tuple((rank, used) for rank, used in stopped if used is not None))

    def look_for_own_worlds(self) -> None:
        """Look, less and less often, whether a command's workers train in worlds of their own: WorldsSeen on news."""
        now = time.monotonic()
        running = [worker for worker in self._workers.values() if worker.running]
        if self._settings.bundled or not running or not self._started.is_set() or now < self._next_look:
            return
        self._next_look = now + worlds.seconds_to_next_look(now - self._started_at)
        assign = running[0].assign
        world = worlds.world_of_round(assign)
        for worker in running if world.size > 1 else ():
            worker.alone = worlds.alone(worker.process.pid, world, worker.alone)
        clauses = [worker.alone for worker in self._workers.values()]
        mismatch = clauses[0] if all(clauses) else ""
        if bool(mismatch) != bool(self._mismatch):
            self._mismatch = mismatch
            self._emit(e.WorldsSeen(assign.round, mismatch))

    def running(self) -> dict[int, int]:
        """Rank and pid of each that runs."""
        return {worker.rank: worker.process.pid for worker in self._workers.values() if worker.running}

    def collect_stacks(self, round: int) -> None:
        """Then StacksCollected; in full they go to our own stderr, which is the pod's log."""
        running = [worker for worker in self._workers.values() if worker.running]
        self._collecting.start("collect stacks", self._collect_stacks(round, running))

    async def _collect_stacks(self, round: int, workers: list[LocalWorker]) -> None:
        found = await asyncio.gather(*(stacks.collect(w.process.pid, w.heartbeat.path, self._reaper) for w in workers))
        for worker, lines in zip(workers, found):
            text = "\n".join(f"[rank {worker.rank}] {line}" for line in lines)
            sys.stderr.write(f"[rank {worker.rank}] the round stands still; stacks, innermost frame first:\n{text}\n")
        sys.stderr.flush()
        bounded = {worker.rank: stacks.bounded(lines) for worker, lines in zip(workers, found)}
        self._emit(e.StacksCollected(round, bounded))

    def _heartbeat(self, round: int, rank: int) -> HeartbeatFile:
        folder = self._settings.volume / "heartbeats"
        folder.mkdir(exist_ok=True)
        heartbeat = HeartbeatFile(rank, str(folder / f"round-{round}-rank-{rank}"))
        for path in (heartbeat.path, heartbeat.path + stacks.SUFFIX):  # of an agent before us, in this round
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
        return heartbeat

    # --- the end ----------------------------------------------------------------------------------------------------

    async def halt(self) -> None:
        """SIGKILL everything of the current round; returns when it has written its last byte. A process with a GPU then
        still takes a quarter of a second to go, for which the next ones of this replica wait, and nobody else
        (decision "A killed worker is waited for by its successor alone")."""
        self._over.set()
        self._told_to_end.set()
        if self._starting is not None:
            await asyncio.wait({self._starting})
        await self._reaped()  # one that never ends keeps this replica out of rounds
        processes = [*(worker.process for worker in self._workers.values()), *self._others]
        for process in processes:
            process.send_signal(signal.SIGKILL)
        for worker in self._workers.values():
            if worker.channel is not None:
                worker.channel.close()
        self._workers.clear()
        self._others.clear()
        self._reaping = self._tasks.start("reap", self._reap(processes))
        if not self._settings.bundled:  # what a script has started may write, too
            return await self._reaped()
        while not all(process.ended.done() or ends(process.pid) for process in processes):
            await asyncio.sleep(0.002)
        return None

    async def kill(self) -> None:
        """Returns when all of it has been reaped, strays included."""
        await self.halt()
        await self._reaped()

    async def _reaped(self) -> None:
        """Nothing that was killed is left."""
        while self._reaping is not None and not self._reaping.done():
            await asyncio.wait({self._reaping})

    async def _reap(self, processes: list[Process]) -> None:
        for process in processes:
            await process.ended
        while strays := self._reaper.strays():
            for pid in strays:
                kill_group(pid)
            await asyncio.sleep(0.002)
        shutil.rmtree(self._settings.volume / "heartbeats", ignore_errors=True)


def _session(pid: int) -> int:
    """-1 where the process is gone."""
    try:
        return os.getsid(pid)
    except OSError:
        return -1
