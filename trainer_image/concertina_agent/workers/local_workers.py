"""Worker processes of the current round in this replica, and the c10d store at which the ranks rendezvous.

A round is a period in which a fixed set of replicas trains.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from typing import Any, Optional

from concertina_agent.core import events as e
from concertina_agent.runtime.nursery import TaskGroup
from concertina_agent.settings import AgentSettings
from concertina_agent.workers import optimizer_steps, stacks, step_file, worlds
from concertina_agent.workers.child_processes import Reaper, ancestors
from concertina_agent.workers.environment import VARYING, worker_environment
from concertina_agent.workers.family import ends, kill_group
from concertina_agent.workers.starters import Starter
from concertina_agent.workers.step_file import StepFile
from concertina_agent.workers.worker_memory import oom_kills
from concertina_agent.workers.workers import Process, StartError
from concertina_protocol import Assign, GroupCalls, Replaced
from concertina_protocol import worker_channel as w
from concertina_protocol.heartbeat import VARIABLE, HeartbeatFile
from concertina_protocol.log import log_event
from concertina_protocol.waiting import within
from concertina_protocol.worker_channel.agent_end import AgentEnd

CHANNEL_EOF_SECONDS = 0.5
"""Seconds to wait for the last messages of a dead worker."""
GONE_SECONDS = 10.0
"""Seconds within which killed processes must end before new processes start.

A device's driver can prevent a process from ending.
"""
LEAVE_SECONDS = 1.0
"""Seconds within which a worker whose process stays must leave its round.

A worker that takes longer is killed, and a new worker is forked.
"""
STORE_SECONDS = 0.1
"""Seconds by which worker 0 of a user's own command starts before the other workers.

Worker 0 serves the store, and torch's client retries only after 0.3 to 1 s if there is no store (decision "Worker 0
starts before the other workers").
"""


@dataclasses.dataclass
class LocalWorker:
    """Worker process of this replica."""

    round: int
    rank: int
    process: Process
    assign: Assign
    oom_kills: int
    """Number of OOM kills in this container before the worker started."""
    heartbeat: HeartbeatFile
    steps: StepFile
    local_rank: int
    over: asyncio.Event
    """Event that is set when the round of this worker is over."""
    channel: Optional[AgentEnd] = None
    waiting: list[w.Message] = dataclasses.field(default_factory=list)
    """Messages to the worker, until it has opened its channel."""
    channel_closed: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)
    lists_calls: bool = False
    """True if the worker supports ListCalls."""
    calls: Optional[asyncio.Future[tuple[GroupCalls, ...]]] = None
    """The worker's answer to ListCalls, or None if none is expected."""
    alone: str = ""
    """Part of a sentence that says how the worker trains in a world of its own (see `worlds`), or "" if it does not."""
    stays: bool = False
    """True if the process can leave its round and enter the next one."""
    in_round: bool = True
    """True if the process is in its round.

    The value is False from the message Left to the next Hello. In this time, messages of the process are dropped.
    """
    has_left: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)
    """Event that is set when the process has left `round`.

    Before that, the end of the process ends a worker of the round.
    """

    @property
    def running(self) -> bool:
        return not self.process.ended.done()


class LocalWorkers:
    """Worker processes of the current round.

    A round is a period in which a fixed set of replicas trains.
    """

    def __init__(
        self,
        settings: AgentSettings,
        reaper: Reaper,
        starter: Starter,
        emit: Callable[[e.Event], None],
        tasks: TaskGroup,
    ) -> None:
        """Prepare to start workers.

        `tasks` contains only tasks of these workers. The tasks are not cancelled when the agent kills the workers,
        because a process that is just being started can't be killed.
        """
        self._settings, self._reaper, self._starter, self._emit = settings, reaper, starter, emit
        self._workers: dict[int, LocalWorker] = {}
        """Workers, keyed by rank."""
        self._staying: dict[int, LocalWorker] = {}
        """Workers whose process stays between two rounds, keyed by local rank.

        A process has a context on the GPU that it uses, so the process keeps its local rank.
        """
        self._store_processes: list[Process] = []
        self._starting: Optional[asyncio.Task[None]] = None
        self._reaping: Optional[asyncio.Task[None]] = None
        """Task that reaps killed processes."""
        self._over, self._must_end = asyncio.Event(), asyncio.Event()
        self._tasks, self._collecting = tasks, TaskGroup()
        self._ending = asyncio.Lock()
        self._started = asyncio.Event()
        self._signal: Optional[int] = None
        """Signal that was sent to the workers of this round. A worker that is being started gets it, too."""
        self._started_at = self._next_look = 0.0
        """Time at which the round's workers were started, and time of the next check for separate worlds."""
        self._mismatch = ""
        """Text of the last WorldsSeen event of this round."""

    # --- start ------------------------------------------------------------------------------------------------------

    def start(self, assign: Assign, me: int, store: Optional[socket.socket], environment: dict[str, str]) -> None:
        """Start this replica's workers for a round, in the background.

        Args:
            assign: The round. This replica is members[me].
            me: Index of this replica among the members.
            store: Bound socket on which to serve the round's c10d store, or None if another replica serves the store.
            environment: Additional environment variables of the workers.
        """
        self._over, self._must_end = asyncio.Event(), asyncio.Event()
        self._started, self._signal = asyncio.Event(), None
        self._started_at, self._next_look, self._mismatch = time.monotonic(), 0.0, ""
        self._starting = self._tasks.start("start workers", self._start(assign, me, store, environment))

    async def _start(
        self, assign: Assign, me: int, store: Optional[socket.socket], environment: dict[str, str]
    ) -> None:
        first_rank, ranks = assign.members[me].first_rank, range(assign.members[me].workers)
        try:
            # A worker that stays waits by itself for the store, which is a fork that takes longer than most parts of a
            # recovery.
            entered = [rank for rank in ranks if self._enter_if_staying(assign, me, rank, environment)]
            await self._until_reaped()
            if not await self._until_warm():
                return
            if store is not None:
                self._store_processes.append(await self._starter.serve_store(store))
            for local_rank in ranks:
                if local_rank in entered:
                    continue
                is_first_client = first_rank + local_rank == max(first_rank, 1)
                if is_first_client and not await self._store_may_serve():
                    return
                while not await self._start_one(assign, me, local_rank, environment):
                    if not await self._until_warm():
                        return
        except (StartError, OSError) as error:
            self._emit(e.StartFailed(assign.round, f"Workers could not be started: {error}"))
        finally:
            self._started.set()
            self._report_not_started(assign, me)
            if store is not None:
                store.close()

    def _report_not_started(self, assign: Assign, me: int) -> None:
        """Report the workers that were not started because of a signal, as if the signal had ended them.

        The agent was asked to send the signal before these workers' processes existed.
        """
        if self._signal is None or self._over.is_set():
            return
        member = assign.members[me]
        for rank in range(member.first_rank, member.first_rank + member.workers):
            if rank not in self._workers:
                log_event("worker_not_started", round=assign.round, rank=rank, signal=self._signal)
                self._emit(e.WorkerExited(assign.round, rank, -self._signal))

    async def _until_reaped(self) -> None:
        """Wait until killed processes have ended.

        Raises:
            StartError: If a killed process does not end within GONE_SECONDS.
        """
        try:
            await within(GONE_SECONDS, self._reaped())
        except asyncio.TimeoutError:
            raise StartError(
                f"processes that were killed have not ended for {GONE_SECONDS:.0f} s: the driver of a device may hang"
            ) from None

    async def _until_warm(self) -> bool:
        """Wait until workers can be started. Return False if the round ends before that.

        The wait can take seconds, while the warm process imports modules.
        """
        ends = asyncio.ensure_future(self._must_end.wait())
        futures: set[asyncio.Future[Any]] = {asyncio.ensure_future(self._starter.until_warm()), ends}
        await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)
        for future in futures:
            future.cancel()
        return not self._must_end.is_set()

    async def _store_may_serve(self) -> bool:
        """Give the worker that serves the round's c10d store time to start, before other workers connect to the store.

        Return False if the round ends before that time is over.
        """
        if not self._settings.bundled:
            with contextlib.suppress(asyncio.TimeoutError):
                await within(STORE_SECONDS, self._over.wait())
        return not self._over.is_set()

    async def _start_one(self, assign: Assign, me: int, local_rank: int, extra: dict[str, str]) -> bool:
        """Start a worker.

        Return False if the worker cannot be started yet. The caller then calls this method again.
        """
        member = assign.members[me]
        rank = member.first_rank + local_rank
        base = {**self._settings.environment, **extra}
        heartbeat = self._heartbeat(assign.round, rank)
        base[VARIABLE] = heartbeat.path
        steps = StepFile(rank, heartbeat.path + step_file.SUFFIX)
        if self._settings.step_detection:
            base[optimizer_steps.VARIABLE] = steps.path
        environment = worker_environment(base, assign, me, local_rank, self._settings.bundled)
        killed = oom_kills()
        process = await self._starter.start(environment, local_rank, _prefix(rank, member.workers))
        if process is None:
            return False
        log_event("worker_started", round=assign.round, rank=rank, pid=process.pid)
        worker = self._workers[rank] = LocalWorker(
            assign.round, rank, process, assign, killed, heartbeat, steps, local_rank, self._over
        )
        self._tasks.start("watch worker", self._watch(worker))
        if not self._settings.bundled:
            self._emit(e.WorkerMessage(assign.round, rank, w.Hello(rank, process.pid)))
        if self._signal is not None:
            process.send_signal(self._signal)
        return True

    def _enter_if_staying(self, assign: Assign, me: int, local_rank: int, extra: dict[str, str]) -> bool:
        """Make the process of the local rank that has stayed enter this round.

        Return False if no process has stayed.
        """
        worker = self._staying.pop(local_rank, None)
        if worker is None or not worker.running:
            return False
        member, base = assign.members[me], {**self._settings.environment, **extra}
        rank = member.first_rank + worker.local_rank
        base[VARIABLE] = worker.heartbeat.path
        with contextlib.suppress(OSError):
            os.truncate(worker.heartbeat.path, 0)  # what it says is of the old round
        worker.round, worker.rank, worker.assign, worker.over = assign.round, rank, assign, self._over
        worker.heartbeat, worker.oom_kills = HeartbeatFile(rank, worker.heartbeat.path), oom_kills()
        _remove(worker.steps.path)
        worker.steps = StepFile(rank, self._path(assign.round, rank) + step_file.SUFFIX)
        if self._settings.step_detection:
            base[optimizer_steps.VARIABLE] = worker.steps.path
        worker.has_left.clear()
        worker.process.lines.start_anew(_prefix(rank, member.workers))
        self._workers[rank] = worker
        log_event("worker_started", round=assign.round, rank=rank, pid=worker.process.pid, stayed=True)
        environment = worker_environment(base, assign, me, worker.local_rank, self._settings.bundled)
        assert worker.channel is not None  # it has said Left
        worker.channel.send(w.Enter({name: environment[name] for name in VARYING if name in environment}))
        if self._signal is not None:
            worker.process.send_signal(self._signal)
        return True

    async def _watch(self, worker: LocalWorker) -> None:
        code = await worker.process.ended
        out_of_memory = code == -signal.SIGKILL and oom_kills() > worker.oom_kills
        log_event("worker_ended", round=worker.round, rank=worker.rank, code=code)
        if worker.channel is not None:
            with contextlib.suppress(asyncio.TimeoutError):
                await within(CHANNEL_EOF_SECONDS, worker.channel_closed.wait())
        lines = await worker.process.last_lines()
        if not worker.has_left.is_set() and not worker.over.is_set():
            last_error = worker.process.lines.last_error
            self._emit(e.WorkerExited(worker.round, worker.rank, code, lines, last_error, out_of_memory))

    # --- while they run ---------------------------------------------------------------------------------------------

    async def of(self, pid: int) -> Optional[LocalWorker]:
        """Return the worker to which a process id belongs, or None if it belongs to no worker.

        A forked worker may connect before the agent has read its process id in the answer to the fork request.
        """
        await self._started.wait()
        pids = {pid, _group(pid), *ancestors(pid)}  # a user's own command may be a shell that runs the script
        workers = self._workers.values()
        return next((worker for worker in workers if not pids.isdisjoint(worker.process.pids)), None)

    def attach(self, worker: LocalWorker, channel: AgentEnd, stays: bool, lists_calls: bool = False) -> None:
        """Record the connection between a worker and the agent.

        This happens at the beginning of each round in which the worker takes part.
        """
        worker.channel, worker.stays, worker.in_round = channel, stays, True
        worker.lists_calls = lists_calls
        for message in worker.waiting:
            channel.send(message)
        worker.waiting.clear()

    def left(self, worker: LocalWorker, message: w.Left) -> None:
        """Record that a worker has left its round while its process continues. The agent treats the worker as ended."""
        if message.round != worker.round or worker.has_left.is_set():
            return
        worker.in_round = False
        log_event("worker_left", round=worker.round, rank=worker.rank, pid=worker.process.pid, code=message.code)
        if not worker.over.is_set():
            last = next((line for line in reversed(message.output) if line.strip()), "")
            self._emit(e.WorkerExited(worker.round, worker.rank, message.code, message.output, last))
        worker.has_left.set()

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
        self._must_end.set()
        for worker in self._workers.values():
            worker.process.send_signal(number)

    # --- how they are -----------------------------------------------------------------------------------------------

    def poll(self) -> e.Tick:
        """Return a Tick with the present heartbeats of the workers, and with the workers that are stopped (SIGSTOP)."""
        now, running = time.monotonic(), self._at_work()
        heartbeats = (heartbeat for worker in running if (heartbeat := worker.heartbeat.read(now)) is not None)
        stopped = ((worker.rank, stacks.stopped(worker.process.pids[-1])) for worker in running)
        counted = running if self._settings.step_detection else ()
        counts = tuple(count for worker in counted if (count := worker.steps.read(now)) is not None)
        return e.Tick(tuple(heartbeats), tuple((rank, used) for rank, used in stopped if used is not None), counts)

    def look_for_own_worlds(self) -> None:
        """Check whether a command's workers train separately from each other, and emit WorldsSeen on a change.

        For example, the command may start torchrun on each replica without the round's rendezvous. The intervals
        between checks grow with the age of the workers.
        """
        now = time.monotonic()
        running = self._at_work()
        if self._settings.bundled or not running or not self._started.is_set() or now < self._next_look:
            return
        self._next_look = now + worlds.seconds_to_next_look(now - self._started_at)
        assign = running[0].assign
        world = worlds.world_of_round(assign)
        for worker in running if world.size > 1 else ():
            worker.alone = worlds.alone(worker.process.pids, world, worker.alone)
        clauses = [worker.alone for worker in self._workers.values()]
        mismatch = clauses[0] if all(clauses) else ""
        if bool(mismatch) != bool(self._mismatch):
            self._mismatch = mismatch
            self._emit(e.WorldsSeen(assign.round, mismatch))

    def running(self) -> dict[int, tuple[int, ...]]:
        """Return the ids of each running worker's top-level processes, keyed by the worker's rank."""
        return {worker.rank: worker.process.pids for worker in self._at_work()}

    def _at_work(self) -> list[LocalWorker]:
        return [worker for worker in self._workers.values() if worker.running and not worker.has_left.is_set()]

    def collect_stacks(self, round: int) -> None:
        """Collect the workers' stacks, and emit StacksCollected with the most relevant frames.

        The complete stacks are written to stderr, which is the pod's log.
        """
        running = self._at_work()
        self._collecting.start("collect stacks", self._collect_stacks(round, running))

    async def _collect_stacks(self, round: int, workers: list[LocalWorker]) -> None:
        calls_by_worker = asyncio.gather(*map(_list_calls, workers))
        stacks_by_worker = await asyncio.gather(
            *(stacks.collect(w.process.pids, w.heartbeat.path, self._reaper) for w in workers)
        )
        calls = {worker.rank: groups for worker, groups in zip(workers, await calls_by_worker) if groups is not None}
        bounded = {worker.rank: stacks.bounded(lines) for worker, lines in zip(workers, stacks_by_worker)}
        for worker, lines in zip(workers, stacks_by_worker):
            lines += map(_calls_line, calls.get(worker.rank, ()))
            text = "\n".join(f"[rank {worker.rank}] {line}" for line in lines)
            sys.stderr.write(
                f"[rank {worker.rank}] the round makes no progress. Stacks, innermost frame first:⏎{text}⏎"
            )
        sys.stderr.flush()
        self._emit(e.StacksCollected(round, bounded, calls))

    def _path(self, round: int, rank: int) -> str:
        """Return the path of a worker's heartbeat."""
        folder = self._settings.volume / "heartbeats"
        folder.mkdir(exist_ok=True)
        return str(folder / f"round-{round}-rank-{rank}")

    def _heartbeat(self, round: int, rank: int) -> HeartbeatFile:
        heartbeat = HeartbeatFile(rank, self._path(round, rank))
        _remove_heartbeat(heartbeat.path)  # left over from the previous agent in this round
        return heartbeat

    # --- the end ----------------------------------------------------------------------------------------------------

    async def halt(self) -> tuple[Replaced, ...]:
        """End the current round of this replica's workers.

        The result says which workers were killed although their processes could have continued, and why.

        Worker processes that can stay have LEAVE_SECONDS to leave the round. All other processes of the round get
        SIGKILL. The call returns when all workers have left the round or have written their last byte. A killed process
        with a GPU takes a quarter of a second longer to end. Only the next processes of this replica wait until the
        killed process has ended (decision "Only the next worker waits for a killed worker").
        """
        async with self._ending:
            await self._stop_starting()
            workers = [*self._workers.values(), *self._staying.values()]
            # The workers of a command that does not use `trainingjob.run` are no exception, so no reason is reported.
            asked = workers if self._settings.bundled else [worker for worker in workers if worker.stays]
            reasons = await asyncio.gather(*(self._leave(worker) for worker in asked))
            staying = [worker for worker, why in zip(asked, reasons) if why is None and worker.running]
            self._staying = {worker.local_rank: worker for worker in staying}
            await self._kill([worker for worker in workers if worker not in staying])
            return tuple(why for why in reasons if why is not None)

    async def kill(self) -> None:
        """Kill all worker processes, and wait until these processes and all their orphans have been reaped."""
        async with self._ending:
            await self._stop_starting()
            await self._kill([*self._workers.values(), *self._staying.values()])
            self._staying.clear()
            await self._reaped()

    async def _stop_starting(self) -> None:
        self._over.set()
        self._must_end.set()
        if self._starting is not None:
            await asyncio.wait({self._starting})
        await self._reaped()  # a process that never ends keeps this replica out of rounds
        for process in self._store_processes:  # workers may be waiting for it
            process.send_signal(signal.SIGKILL)

    async def _leave(self, worker: LocalWorker) -> Optional[Replaced]:
        """Ask a worker to leave its round while its process continues. Return None if the worker has left or ended.

        If the worker does not leave in time, it is killed, and the reason is returned.
        """
        why = await self._stands_in_the_way(worker)
        if why is not None:
            log_event("worker_replaced", round=worker.round, rank=worker.rank, pid=worker.process.pid, why=why.value)
            worker.process.send_signal(signal.SIGKILL)
        return why

    async def _stands_in_the_way(self, worker: LocalWorker) -> Optional[Replaced]:
        """Return why a worker process that has left its round can't enter the next round, or None if it can."""
        if not worker.running:
            return None
        if worker.channel is None:
            return Replaced.STARTING
        if not worker.stays:
            return Replaced.UNABLE
        if stacks.stopped(worker.process.pids[-1]) is not None:
            return Replaced.STOPPED
        if not worker.has_left.is_set():
            worker.channel.send(w.Leave(worker.round))
        left = asyncio.ensure_future(worker.has_left.wait())
        ends: set[asyncio.Future[Any]] = {left, worker.process.ended}
        done, _ = await asyncio.wait(ends, timeout=LEAVE_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        left.cancel()
        return None if done else Replaced.LATE

    async def _kill(self, workers: list[LocalWorker]) -> None:
        """Send SIGKILL to these workers and the store's process, and wait until they can't write any more output."""
        processes = [*(worker.process for worker in workers), *self._store_processes]
        for process in processes:
            process.send_signal(signal.SIGKILL)
        for worker in workers:
            if worker.channel is not None:
                worker.channel.close()
        self._workers.clear()
        self._store_processes.clear()
        self._reaping = self._tasks.start("reap", self._reap(processes, workers))
        if not self._settings.bundled:  # processes that a script has started may write, too
            return await self._reaped()
        while not all(process.ended.done() or ends(process.pid) for process in processes):
            await asyncio.sleep(0.002)
        return None

    async def _reaped(self) -> None:
        """Wait until all killed processes have been reaped."""
        while self._reaping is not None and not self._reaping.done():
            await asyncio.wait({self._reaping})

    async def _reap(self, processes: list[Process], workers: list[LocalWorker]) -> None:
        for process in processes:
            await process.gone()
        while strays := self._reaper.strays():
            for pid in strays:
                kill_group(pid)
            await asyncio.sleep(0.002)
        for worker in workers:
            _remove_heartbeat(worker.heartbeat.path)
            _remove(worker.steps.path)


def _remove_heartbeat(path: str) -> None:
    for suffix in ("", stacks.SUFFIX, step_file.SUFFIX):
        _remove(path + suffix)


async def _list_calls(worker: LocalWorker) -> Optional[tuple[GroupCalls, ...]]:
    """Return the collectives that a worker has called, or None if its flight recorder does not answer in time."""
    if worker.channel is None or not worker.lists_calls:
        return None
    worker.calls = asyncio.get_running_loop().create_future()
    worker.channel.send(w.ListCalls())
    try:
        return await within(stacks.ANSWER_SECONDS, worker.calls)
    except asyncio.TimeoutError:
        return None
    finally:
        worker.calls = None


def _calls_line(calls: GroupCalls) -> str:
    """Return a line of the log about the collectives of one process group."""
    number = calls.called if calls.waits_for is None else calls.waits_for
    does = "has called" if calls.waits_for is None else "waits in"
    operation = calls.operations.get(str(number), "collective")
    return f"process group {calls.title or calls.group}: it {does} {operation} number {number}, newest {calls.called}"


def _remove(path: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)


def _prefix(rank: int, workers: int) -> str:
    """Return the prefix of a worker's lines in the pod's log. It is empty if the replica has one worker."""
    return f"[rank {rank}] " if workers > 1 else ""


def _group(pid: int) -> int:
    """Return the process group of a process, or -1 if the process is gone."""
    try:
        return os.getpgid(pid)
    except OSError:
        return -1
