"""Real agents on loopback addresses of their own, with the test in the place of the operator, with its CA and calls."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import concertina_protocol as p
from builders.programs import SEARCH_PATH
from concertina.agents.authority import Authority
from concertina.agents.calls import CallError, ConnectionIdentity, call, connection, receive

GIVE_UP = 120.0
"""Time limit in seconds. It is only a limit: nothing takes this long."""
UID, MASTER_KEY = "7d1f3f0e-job", b"k" * 32
IMPORTED = {"CONCERTINA_WARM_START": json.dumps({"enabled": True, "preload": ["torch.distributed.fsdp"]})}
"""Environment of a job whose replicas import torch once. Otherwise each imports it twice: in the first worker, and in
the warm parent that learns of it."""


def write_identity(folder: Path, authority: Authority) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in authority.secret_data().items():
        (folder / name).write_bytes(base64.b64decode(content))
    return folder


def gone(pid: int) -> bool:
    return not os.path.exists(f"/proc/{pid}")


class Replica:
    """One replica: its volume, its address and its agent process."""

    def __init__(
        self, name: str, folder: Path, address: str, environment: dict[str, str], arguments: list[str]
    ) -> None:
        self.name, self.folder, self.address = name, folder, address
        self.environment, self._arguments = environment, arguments
        self.program = [sys.executable, "-m", "concertina_agent.main"]
        self.process: subprocess.Popen[bytes] | None = None
        self.report: p.Report | None = None
        self.changed = asyncio.Event()

    def start(self) -> None:
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(
                [*self.program, "run", *self._arguments],
                env=self.environment, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip

    def restart(self, arguments: list[str]) -> None:
        """Kill the agent, and start another one in its place with the same volume."""
        self.kill()
        self._arguments, self.report = arguments, None
        self.start()

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def end_workers(self) -> None:
        """End the workers with all processes that they started, as the end of a container would in a pod."""
        for pid in self.worker_pids().values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)

    def log(self) -> str:
        return (self.folder / "log").read_text(errors="replace")

    def events(self) -> list[dict]:
        lines = [line for line in self.log().splitlines() if line.startswith('{"t"')]
        return [json.loads(line) for line in lines]

    def worker_pids(self) -> dict[int, int]:
        """Return the pid of each rank, from the newest start of each."""
        return {event["rank"]: event["pid"] for event in self.events() if event["event"] == "worker_started"}


class Job:
    """Some replicas of one job."""

    def __init__(self, folder: Path, count: int, arguments: list[str], workers: int = 1, **environment: str) -> None:
        self.created = time.time()
        self.authority = Authority(MASTER_KEY, UID, self.created)
        self.identity = ConnectionIdentity(UID, self.authority.client_context())
        write_identity(folder / "identity", self.authority)
        network = f"127.{random.randrange(64, 250)}.{random.randrange(1, 250)}"
        self.replicas: dict[str, Replica] = {}
        for index in range(count):
            self._make(folder, f"job-{index}-0", f"{network}.{index + 1}", arguments, workers, environment)
        self._watches: dict[str, asyncio.Task[None]] = {}
        self.coordinator = ""
        """Address of the coordinator, which agents receive with a Watch."""

    def _make(
        self, folder: Path, name: str, ip: str, arguments: list[str], workers: int, extra: dict[str, str]
    ) -> None:
        (folder / name).mkdir()
        environment = {
            "PATH": os.environ["PATH"], "HOME": str(folder), "PYTHONPATH": SEARCH_PATH,
            "CONCERTINA_JOB": "test/job", "CONCERTINA_UID": UID, "CONCERTINA_REPLICA": name, "CONCERTINA_POD_IP": ip,
            "CONCERTINA_NODE": f"node-{name}", "CONCERTINA_PORT": "29400", "CONCERTINA_WORKERS": str(workers),
            "CONCERTINA_TRAINER": "{}", "CONCERTINA_CHECKPOINT": "null",
            "CONCERTINA_WARM_START": '{"enabled": true}',
            "CONCERTINA_VOLUME": str(folder / name), "CONCERTINA_IDENTITY": str(folder / "identity"), **extra,
        }  # fmt: skip
        self.replicas[name] = Replica(name, folder / name, f"{ip}:29400", environment, arguments)

    @property
    def names(self) -> list[str]:
        return list(self.replicas)

    def __getitem__(self, index: int) -> Replica:
        return list(self.replicas.values())[index]

    # --- the operator's part ----------------------------------------------------------------------------------------

    def watch(self, replica: Replica) -> None:
        watch = self._watches[replica.name] = asyncio.ensure_future(self._follow(replica))
        watch.add_done_callback(lambda _: replica.changed.set())

    async def _follow(self, replica: Replica) -> None:
        while True:
            with contextlib.suppress(OSError, CallError):
                async with connection(
                    self.identity, replica.address, p.Watch(UID, coordinator=self.coordinator)
                ) as reader:
                    while True:
                        message = await receive(reader, self.identity, replica.address)
                        assert isinstance(message, p.Report), message
                        replica.report = message
                        replica.changed.set()
            await asyncio.sleep(0.02)

    async def until(self, replica: Replica, holds: Callable[[p.Report], object], why: str = "") -> p.Report:
        """Return the next report of this replica for which `holds` is true.

        Raises:
            AssertionError: If there is none in time.
        """
        if replica.name not in self._watches:
            self.watch(replica)
        try:
            async with asyncio.timeout(GIVE_UP):
                while replica.report is None or not holds(replica.report):
                    if self._watches[replica.name].done():
                        self._watches[replica.name].result()  # Raise the error that ended the watch.
                    replica.changed.clear()
                    await replica.changed.wait()
        except TimeoutError:
            raise AssertionError(f"{why}: {replica.report}\n{replica.log()[-5000:]}") from None
        return replica.report

    async def ready(self) -> None:
        for replica in self.replicas.values():
            await self.until(replica, lambda report: report.ready, "never ready")

    async def call(self, replica: Replica, message: p.Prepare | p.Assign | p.Drain) -> object:
        async with asyncio.timeout(GIVE_UP):
            while True:
                try:
                    return await call(self.identity, replica.address, message)
                except CallError as error:
                    if "can't be reached" not in str(error):
                        raise
                    await asyncio.sleep(0.02)

    async def prepare(self, round: int, *replicas: Replica, claim: str = "") -> dict[str, p.Prepared]:
        candidates = tuple(p.Candidate(replica.name, replica.address) for replica in replicas)
        message = p.Prepare(UID, round, claim or f"claim-{round}", candidates)
        answers = await asyncio.gather(*(self.call(replica, message) for replica in replicas))
        assert all(isinstance(answer, p.Prepared) for answer in answers), answers
        return {answer.replica: answer for answer in answers}

    def assignment(self, prepared: dict[str, p.Prepared], restore: p.Restore | None = None) -> p.Assign:
        members, rank = [], 0
        for name, answer in prepared.items():
            members.append(p.Member(name, answer.instance, self.replicas[name].address, rank, answer.workers))
            rank += answer.workers
        first = next(iter(prepared.values()))
        return p.Assign(UID, first.round, first.claim, tuple(members), first.store, restore or p.Restore("Fresh"))

    async def assign(self, message: p.Assign) -> None:
        answers = await asyncio.gather(*(self.call(self.replicas[m.replica], message) for m in message.members))
        assert all(isinstance(answer, p.Accepted) for answer in answers), answers

    async def begin(self, round: int, *replicas: Replica, restore: p.Restore | None = None) -> p.Assign:
        """Prepare and assign a round; the first of the replicas coordinates."""
        message = self.assignment(await self.prepare(round, *replicas), restore)
        await self.assign(message)
        return message

    async def stop(self) -> None:
        for task in self._watches.values():
            task.cancel()
        await asyncio.gather(*self._watches.values(), return_exceptions=True)
        for replica in self.replicas.values():
            if replica.process is not None and replica.process.poll() is None:
                replica.end_workers()
                replica.process.send_signal(signal.SIGCONT)
                replica.kill()


@contextlib.asynccontextmanager
async def running(
    folder: Path, count: int, arguments: list[str], workers: int = 1, **environment: str
) -> AsyncIterator[Job]:
    """Run a job whose agents are ready, and remove everything of it afterwards."""
    job = Job(folder, count, arguments, workers, **environment)
    try:
        for replica in job.replicas.values():
            replica.start()
        await job.ready()
        yield job
    finally:
        await job.stop()


def newest_complete(prepared: dict[str, p.Prepared]) -> p.Restore:
    """Return the newest snapshot id of which every shard is held somewhere, as the operator's plan does."""
    held: dict[p.SnapshotId, dict[int, list[str]]] = {}
    for replica, answer in prepared.items():
        for one in answer.snapshots:
            for shard in one.shards:
                held.setdefault(one.id, {}).setdefault(shard, []).append(replica)
    complete = [id for id, shards in held.items() if len(shards) == id.shards]
    id = max(complete, key=lambda id: (id.round, id.step))
    holders = {str(shard): tuple(replicas) for shard, replicas in held[id].items()}
    return p.Restore("Memory", id.step, id, holders)


def trained(step: int):
    return lambda report: report.progress is not None and report.progress.step >= step
