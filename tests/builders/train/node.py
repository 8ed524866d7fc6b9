"""Stand-in for the agents of a job, for tests of the trainer.

Worker processes, the forkserver that forks them, the worker channel and the files are real. The stand-in has a folder
for each node, and copies each snapshot into the folder of the next node.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
import zlib
from collections.abc import Callable
from pathlib import Path

from builders.programs import SEARCH_PATH
from builders.train import gpus
from concertina_protocol import Durable, Progress, Restore, SnapshotId
from concertina_protocol import worker_channel as channel
from concertina_protocol.sidecar import COPY_SLOTS, read_sidecar, remove_sidecar, sidecar_path
from concertina_protocol.worker_channel.agent_end import AgentEnd
from concertina_state.format.shardfile import header_length

GIVE_UP = 120
POLL_SECONDS = 0.005
FRESH = Restore("Fresh")
ENDINGS = 30
"""Seconds for what follows a round that was given up, such as the end of its processes."""
ONLY_IMPORTS = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}


class Parent:
    """Forkserver that has imported the trainer, or another module."""

    def __init__(self, preload: str = "concertina_trainer.preload", **environment: str) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, "-m", "concertina_agent.workers.forkserver", "--control", str(theirs.fileno())]
        command += ["--preload", preload]
        always = {**ONLY_IMPORTS, "PYTHONPATH": SEARCH_PATH, "PYTHONFAULTHANDLER": "1"}
        self._process = subprocess.Popen(
            command, pass_fds=[theirs.fileno()], env={**os.environ, **always, **environment}
        )
        theirs.close()
        self.control = ours
        ours.settimeout(GIVE_UP)
        self.codes: dict[int, int] = {}
        assert json.loads(ours.recv(1 << 16)) == {"warm": True}

    def fork(self, target: str, environment: dict[str, str], output: int, *fds: int, errors: int | None = None) -> int:
        """Fork a worker, and return its pid. Its stderr is `errors`, or its output too."""
        arguments = [f"fd:{i}" for i in range(len(fds))]
        request = {"run": target, "arguments": arguments, "environment": {**os.environ, **environment}}
        streams = [output, output if errors is None else errors]
        socket.send_fds(self.control, [json.dumps(request).encode()], [*streams, *fds])
        while True:
            said = json.loads(self.control.recv(1 << 16))
            if "code" not in said:
                return said["pid"]
            self.codes[said["pid"]] = said["code"]

    def hear(self) -> None:
        """Receive the report that a child has ended, and record its exit code."""
        said = json.loads(self.control.recv(1 << 16))
        self.codes[said["pid"]] = said["code"]

    def wait(self, pid: int) -> int:
        while pid not in self.codes:
            self.hear()
        return self.codes.pop(pid)

    def close(self) -> None:
        self.control.close()
        self._process.wait(GIVE_UP)


class Parents:
    """Forkservers by the module that they have imported, each started when it is first asked for."""

    def __init__(self) -> None:
        self._made: dict[str, Parent] = {}

    def __getitem__(self, preload: str) -> Parent:
        if preload not in self._made:
            self._made[preload] = Parent(preload)
        return self._made[preload]

    def close(self) -> None:
        for parent in self._made.values():
            parent.close()


@dataclasses.dataclass
class Outcome:
    """Result of one round."""

    progress: list[Progress] = dataclasses.field(default_factory=list)
    done: dict[int, channel.Done] = dataclasses.field(default_factory=dict)
    faults: dict[int, channel.Fault] = dataclasses.field(default_factory=dict)
    durable: list[Durable] = dataclasses.field(default_factory=list)
    errors: list[str] = dataclasses.field(default_factory=list)
    codes: dict[int, int] = dataclasses.field(default_factory=dict)
    pids: dict[int, int] = dataclasses.field(default_factory=dict)
    output: str = ""
    """Output of the processes that were started in this round."""
    t0: float = 0.0

    @property
    def losses(self) -> dict[int, float]:
        return {p.step: p.loss for p in self.progress if p.phase == "training"}


@dataclasses.dataclass
class Script:
    """Events that a test plans for a round.

    `kill` is a step and ranks: from that step on, these ranks get SIGKILL as soon as all shards of a snapshot of step
    `kill_with` or later exist. `drain` is a step at which rank 0 is asked to drain, or the first later one. `watch` is
    called every few milliseconds.
    """

    kill: tuple[int, tuple[int, ...]] | None = None
    kill_with: int = 1
    drain: tuple[int, bool] | None = None
    drain_when: Callable[[Outcome], bool] = lambda outcome: False
    copy: Callable[[int], bool] = lambda step: True
    watch: Callable[[Round], None] | None = None


@dataclasses.dataclass(frozen=True)
class Survivor:
    """Worker process that has left its round and waits for the next one."""

    pid: int
    connection: socket.socket


class Job:
    def __init__(
        self,
        folder: Path,
        parent: Parent,
        trainer: dict,
        checkpoint: dict | None = None,
        uid: str = "u1",
        stays: bool = False,
    ):
        self.stays = stays
        """Whether worker processes continue in the next round. They can get another rank there."""
        self.survivors: list[Survivor] = []
        self.folder, self.parent, self.uid = folder, parent, uid
        self.trainer, self.checkpoint = trainer, checkpoint
        self.worker, self.environment = "concertina_trainer.worker:main", {}
        self.images: tuple[str, ...] = ()
        self.number = 0
        self.durable: Durable | None = None
        folder.mkdir(exist_ok=True)

    def run(self, world: int, restore: Restore = FRESH, script: Script | None = None) -> Outcome:
        """Run one round, from its start to the end of all its processes."""
        self.number += 1

        async def play() -> Outcome:
            return await asyncio.wait_for(Round(self, world, restore, script or Script()).play(), GIVE_UP + ENDINGS)

        return asyncio.run(play())

    def lose(self, node: int) -> None:
        shutil.rmtree(self.folder / f"node-{node}")

    def newest(self) -> Restore:
        """Return the newest snapshot whose shards all exist on some node, as the operator would choose it."""
        held: dict[SnapshotId, set[int]] = {}
        for path in self.folder.glob("node-*/*/round-*/shard-*/*.json"):
            if found := held_in(path.with_suffix("")):
                held.setdefault(found[0], set()).add(found[1])
        whole = [id for id, shards in held.items() if len(shards) == id.shards]
        newest = max(whole, key=lambda id: (id.round, id.step))
        return Restore("Memory", newest.step, newest)

    def find(self, id: SnapshotId, shard: int) -> Path | None:
        found = sorted(self.folder.glob(f"node-*/*/round-{id.round}/shard-{shard}/*.json"))
        return next((path.with_suffix("") for path in found if held_in(path.with_suffix("")) == (id, shard)), None)


def held_in(path: Path) -> tuple[SnapshotId, int] | None:
    """Return the snapshot and the shard in a slot, or None if the bytes do not match the sidecar."""
    said = read_sidecar(path)
    return (said.id, said.shard) if said and zlib.crc32(path.read_bytes()) == said.crc32 else None


class Round:
    def __init__(self, job: Job, world: int, restore: Restore, script: Script) -> None:
        self.job, self.world, self.restore, self.script = job, world, restore, script
        self.outcome = Outcome()
        self.ends: dict[int, AgentEnd] = {}
        self.pids: dict[int, int] = {}
        self.uploader: asyncio.Future[AgentEnd] = asyncio.get_running_loop().create_future()
        self.wanted: dict[SnapshotId, int] = {}
        self.over = asyncio.Event()
        self.gone: set[int] = set()
        self.left: dict[int, channel.Left] = {}
        self.committed: dict[int, list[int]] = {}
        self.shards = 0
        self.drained = self.killed = False
        self.torn: list[tuple[int, int]] = []
        """Shard and step of each copy during which the worker changed the slot."""
        self.uploads = asyncio.Lock()
        self.calls: dict[int, int] = {}
        """Number of calls of `should_checkpoint` that each rank has finished, once the ranks have been asked."""

    async def play(self) -> Outcome:
        self.outcome.t0 = time.time()
        path = self.job.folder / "agent.sock"
        path.unlink(missing_ok=True)
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listening.bind(str(path))
        listening.listen(256)
        listening.setblocking(False)
        accepting = asyncio.ensure_future(self._accept(listening))
        accepting.add_done_callback(lambda _: self.over.set())
        watching = asyncio.ensure_future(self._watch())
        log = (self.job.folder / f"round-{self.job.number}.log").open("w+b")
        listener = socket.create_server(("127.0.0.1", 0))
        store = self.job.parent.fork("concertina_trainer.store:serve", {}, log.fileno(), listener.fileno())
        port = listener.getsockname()[1]
        listener.close()
        common = {
            "CONCERTINA_SOCKET": str(path),
            "CONCERTINA_UID": self.job.uid,
            "CONCERTINA_ROUND": str(self.job.number),
            "CONCERTINA_POD_IP": "127.0.0.1",
            "CONCERTINA_TRAINER": json.dumps(self.job.trainer),
            "CONCERTINA_CHECKPOINT": json.dumps(self.job.checkpoint),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "WORLD_SIZE": str(self.world),
            "LOCAL_WORLD_SIZE": "1",
        }
        others = [store]
        if self.job.checkpoint:
            environment = {**common, **self.job.environment}
            others.append(self.job.parent.fork("concertina_trainer.uploader:main", environment, log.fileno()))
        survivors, self.job.survivors = self.job.survivors, []
        serving: list[asyncio.Task[None]] = []
        for rank in range(self.world):
            folder = self.job.folder / f"node-{rank}" / "snapshots" / f"round-{self.job.number}"
            mine = {"RANK": str(rank), "CONCERTINA_SNAPSHOTS": str(folder)}
            environment = {**common, **mine, **gpus.variables(rank, self.world), **self.job.environment}
            if survivors:
                survivor = survivors.pop()
                self.pids[rank], end = survivor.pid, AgentEnd(survivor.connection)
                end.send(channel.Enter(environment))
                serving.append(asyncio.ensure_future(self._serve(end)))
            else:
                self.pids[rank] = self.job.parent.fork(self.job.worker, environment, log.fileno())
        for survivor in survivors:
            os.kill(survivor.pid, signal.SIGKILL)
            survivor.connection.close()
        try:
            async with asyncio.timeout(GIVE_UP):
                await self.over.wait()
                if self.job.stays:
                    await self._leave()
                async with self.uploads:
                    pass
        except TimeoutError as error:
            for pid in self._stuck():
                os.kill(pid, signal.SIGABRT)  # so that it writes its stacks
            await asyncio.sleep(1.0)
            log.seek(0)
            words = log.read().decode(errors="replace")[-20_000:]
            raise AssertionError(
                f"round {self.job.number} does not end; {sorted(self.gone)} are gone\n{words}"
            ) from error
        finally:
            watching.cancel()
            accepting.cancel()
            for task in serving:
                task.cancel()
            await asyncio.gather(*serving, return_exceptions=True)
            with contextlib.suppress(asyncio.CancelledError):
                await accepting
            listening.close()
            for pid in (*self._stuck(), *others):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self.outcome.codes = {
                rank: self.left[rank].code if rank in self.left else self.job.parent.wait(pid)
                for rank, pid in self.pids.items()
            }
            self.outcome.pids = self.pids
            self.job.survivors = [Survivor(self.pids[rank], self.ends[rank]._socket) for rank in sorted(self.left)]
            for pid in others:
                self.job.parent.wait(pid)
            log.seek(0)
            self.outcome.output = log.read().decode()
            log.close()
        self._check_torn()
        return self.outcome

    async def _leave(self) -> None:
        """Make all remaining workers leave the round, wherever they are, and wait until they have left."""
        for rank, end in self.ends.items():
            if rank not in self.gone:
                end.send(channel.Leave(self.job.number))
        while len(self.gone) < self.world:
            await asyncio.sleep(POLL_SECONDS)

    async def _watch(self) -> None:
        while self.script.watch is not None:
            self.script.watch(self)
            await asyncio.sleep(POLL_SECONDS)

    def tell_scripts_to_stop(self) -> None:
        """Ask all ranks how often they have called `should_checkpoint`.

        They stop at the call after the highest number.
        """
        for end in self.ends.values():
            end.send(channel.QueryCalls())

    def kill(self) -> None:
        """Kill all remaining ranks at once."""
        for pid in self._stuck():
            os.kill(pid, signal.SIGKILL)

    def _stuck(self) -> list[int]:
        return [pid for rank, pid in self.pids.items() if rank not in self.gone]

    async def _accept(self, listening: socket.socket) -> None:
        async with asyncio.TaskGroup() as connections:
            while True:
                connection, _ = await asyncio.get_running_loop().sock_accept(listening)
                connections.create_task(self._serve(AgentEnd(connection)))

    async def _serve(self, end: AgentEnd) -> None:
        if (hello := await end.receive()) is None:  # it was killed before its first message
            return
        if isinstance(hello, channel.UploaderHello):
            self.uploader.set_result(end)
            return
        self.ends[hello.rank] = end
        start = channel.Start(self.restore, self.world, self.job.uid, self.job.durable, images=self.job.images)
        end.send(dataclasses.replace(start, stays=self.job.stays and hello.stays))
        while (message := await end.receive()) is not None:
            if isinstance(message, channel.Left):
                self.left[hello.rank] = message
                break
            await self._hear(hello.rank, end, message)
        else:
            end.release()
        # A worker is gone. If it did not finish, the other workers are stuck, and agents would kill them.
        self.gone.add(hello.rank)
        if len(self.gone) == self.world or not (
            hello.rank in self.outcome.done or (hello.rank not in self.left and await self._completes(hello.rank))
        ):
            self.over.set()

    async def _completes(self, rank: int) -> bool:
        """Wait for the end of a worker, and return whether its exit code is 0.

        A script that completes sends no message.
        """
        parent, pid = self.job.parent, self.pids[rank]
        while pid not in parent.codes:
            if select.select([parent.control], [], [], 0)[0]:
                parent.hear()
            else:
                await asyncio.sleep(POLL_SECONDS)
        return parent.codes[pid] == 0

    async def _hear(self, rank: int, end: AgentEnd, message: channel.Message) -> None:
        match message:
            case Progress():
                self.outcome.progress.append(message)
                self._follow_script(message.step)
            case channel.Committed(id, shard, path):
                self.committed.setdefault(shard, []).append(id.step)
                self.shards = id.shards
                if self.script.copy(id.step) and self._copy((rank + 1) % self.world, id, shard, Path(path)):
                    end.send(channel.CopiedUpTo(id.step))
            case channel.WantDurable(id, shard, path, complete):
                async with self.uploads:
                    await self._make_durable(id, shard, path, complete)
            case channel.FetchHeader(id, shard):
                path = self.job.find(id, shard)
                content = path.read_bytes()
                end.send(channel.FetchedHeader(content[8 : header_length(content[:8])].decode()))
            case channel.Fetch(id, shard):
                path = self.job.find(id, shard)
                end.send(channel.Fetched(str(path)) if path else channel.Fetched(error="no node holds it"))
            case channel.Register():
                end.send(channel.Registered())
            case channel.CallCount(_, calls):
                self.calls[rank] = calls
                if len(self.calls) == self.world:
                    for each in self.ends.values():
                        each.send(channel.StopAtCall(1 + max(self.calls.values())))
            case channel.Done():
                self.outcome.done[rank] = message
            case channel.Fault():
                self.outcome.faults[rank] = message

    def _follow_script(self, step: int) -> None:
        if self.script.drain and not self.drained and step >= self.script.drain[0]:
            self.drained = True
            self.ends[0].send(channel.DrainRequest(self.script.drain[1]))
        if self.script.drain_when(self.outcome):
            self.ends[0].send(channel.DrainRequest(durable=False))
        kill = self.script.kill
        if kill and not self.killed and step >= kill[0] and self._newest_whole() >= self.script.kill_with:
            self.killed = True
            for rank in kill[1]:
                os.kill(self.pids[rank], signal.SIGKILL)

    def _newest_whole(self) -> int:
        """Return the newest step of this round whose shards all exist, or 0."""
        if not self.committed or len(self.committed) < self.shards:
            return 0
        return max(set.intersection(*map(set, self.committed.values())), default=0)

    def _copy(self, node: int, id: SnapshotId, shard: int, path: Path) -> bool:
        """Copy a shard to another node, and return whether the copy is whole.

        It is not if the worker has changed the slot in the meantime. An agent notices this by the sidecar.
        """
        folder = self.job.folder / f"node-{node}" / "copies" / f"round-{id.round}" / f"shard-{shard}"
        folder.mkdir(parents=True, exist_ok=True)
        target = folder / f"slot-{id.step % COPY_SLOTS}"
        remove_sidecar(target)
        with contextlib.suppress(FileNotFoundError):
            shutil.copyfile(path, target)
            shutil.copyfile(sidecar_path(path), sidecar_path(target))
            if held_in(target) == (id, shard):
                return True
        remove_sidecar(target)
        self.torn.append((shard, id.step))
        return False

    def _check_torn(self) -> None:
        """Check that the worker changed only slots of the round's last snapshots while they were copied.

        Only the last snapshot of a round does not wait for running copies (decision "A drain may write over a running
        copy").
        """
        for shard, step in self.torn:
            assert step in self.committed[shard][-3:], f"the slot of step {step} was written while it was copied"

    async def _make_durable(self, id: SnapshotId, shard: int, path: str, complete: bool) -> None:
        uploader = await self.uploader
        uploader.send(channel.Ship(id, shard, path))
        shipped = await uploader.receive()
        if shipped.error:
            self.outcome.errors.append(shipped.error)
            return
        self.wanted[id] = self.wanted.get(id, 0) + 1
        if self.wanted[id] == id.shards:
            uploader.send(channel.Publish(id, complete))
            published = await uploader.receive()
            if published.durable:
                self.outcome.durable.append(published.durable)
            else:
                self.outcome.errors.append(published.error)
