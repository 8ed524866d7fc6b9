"""TrainingJobs of the benchmark, as one watch sees them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from concertina.api.status import unix_seconds
from concertina.kube.client import Client
from concertina.kube.errors import Gone, Unreachable
from concertina.kube.resources import TRAINING_JOBS, Raw

NAMESPACE = "default"
AT_ONCE = 16
LOOK_SECONDS, SAY_SECONDS = 0.05, 5.0
GRACE_SECONDS = 2
GROW_SECONDS = 3600
"""A job begins whole, and no round begins but those that a scenario asks for."""


def manifest(name: str, replicas: int) -> Raw:
    container = {"name": "trainer", "image": "concertina/trainer:bench", "command": ["python3", "train.py"]}
    template = {"spec": {"terminationGracePeriodSeconds": GRACE_SECONDS, "containers": [container]}}
    elastic = {"minReplicas": max(1, replicas - 1), "growAfterSeconds": GROW_SECONDS}
    return {
        "apiVersion": "concertina.dev/v1alpha1",
        "kind": "TrainingJob",
        "metadata": {"name": name, "namespace": NAMESPACE},
        "spec": {"replicas": replicas, "elastic": elastic, "template": template},
    }


@dataclass
class SeenJob:
    """What its status says; when that was seen first, in Unix seconds."""

    wanted: int
    ready: str = ""
    """Reason of the condition Ready."""
    members: tuple[str, ...] = ()
    rounds: dict[int, float] = field(default_factory=dict)
    """That were committed."""
    claims: dict[int, float] = field(default_factory=dict)
    """Rounds that were claimed."""
    progress_at: float = 0.0
    """Of which moment its progress is."""

    @property
    def trains(self) -> bool:
        return self.ready == "Training" and len(self.members) == self.wanted

    @property
    def round(self) -> int:
        return max(self.rounds, default=0)

    def saw(self, status: Raw, at: float) -> None:
        conditions = status.get("conditions") or ()
        self.ready = next((each["reason"] for each in conditions if each["type"] == "Ready"), "")
        world = status.get("world") or {}
        self.members = tuple(member["replica"] for member in world.get("members") or ())
        if world.get("round"):
            self.rounds.setdefault(world["round"], at)
        if claim := world.get("claim"):
            self.claims.setdefault(claim["round"], at)
        if progress := status.get("progress"):
            self.progress_at = unix_seconds(progress["at"])


class Jobs:
    def __init__(self, client: Client) -> None:
        self._client = client
        self.seen: dict[str, SeenJob] = {}

    async def create(self, count: int, replicas: int) -> None:
        some = asyncio.Semaphore(AT_ONCE)

        async def one(name: str) -> None:
            async with some:
                await self._client.create(TRAINING_JOBS, NAMESPACE, manifest(name, replicas))

        names = [f"job-{number}" for number in range(count)]
        self.seen = {name: SeenJob(replicas) for name in names}
        await asyncio.gather(*map(one, names))

    async def follow(self) -> None:
        """Without end."""
        while True:
            try:
                jobs, version = await self._client.list_all(TRAINING_JOBS, NAMESPACE)
                for job in jobs:
                    self._on_job(job)
                async for kind, job in self._client.watch(TRAINING_JOBS, NAMESPACE, version):
                    if kind != "BOOKMARK":
                        self._on_job(job)
            except (Gone, Unreachable) as error:
                print(f"the watch of jobs: {error}", flush=True)
                await asyncio.sleep(0.5)

    def _on_job(self, job: Raw) -> None:
        seen = self.seen.get(job["metadata"]["name"])
        if seen is not None:
            seen.saw(job.get("status") or {}, time.time())

    async def until(
        self, what: str, begun: float, limit: float, holds: Callable[[str, SeenJob], bool]
    ) -> dict[str, float]:
        """Seconds since `begun` until it holds for half, for 99 % and for all of the jobs; infinite where it was not so
        within `limit` seconds."""
        total, said = len(self.seen), time.time()
        marks = {"half": (total + 1) // 2, "99 %": -(-total * 99 // 100), "all": total}
        reached = dict.fromkeys(marks, float("inf"))
        while reached["all"] == float("inf"):
            count, now = sum(holds(name, job) for name, job in self.seen.items()), time.time()
            for mark, needed in marks.items():
                if count >= needed:
                    reached[mark] = min(reached[mark], now - begun)
            if now - said >= SAY_SECONDS or count == total:
                said = now
                print(f"  {now - begun:6.1f} s: {what}: {count} of {total}", flush=True)
            if now - begun > limit:
                break
            await asyncio.sleep(LOOK_SECONDS)
        return reached
