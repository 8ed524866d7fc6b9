"""TrainingJobs of the benchmark, and their progress as a watch reports it."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterable
from dataclasses import dataclass, field

from concertina.api import pod_names
from concertina.api.status import JobStatus, unix_seconds
from concertina.kube.client import Client
from concertina.kube.errors import Gone, Unreachable
from concertina.kube.resources import PODS, TRAINING_JOBS, Raw

NAMESPACE = "default"
AT_ONCE = 16
LOOK_SECONDS, SAY_SECONDS = 0.05, 5.0
GRACE_SECONDS = 2
MOST_KILLS = 1000
"""Value of maxRestarts. With the default, a job would fail after ten kills."""
GROW_SECONDS = 3600
"""Stabilization window for scaling up. It is long, so that only the scenarios cause new rounds."""


def manifest(name: str, replicas: int, workers: int) -> Raw:
    container = {"name": "trainer", "image": "concertina/trainer:bench", "command": ["python3", "train.py"]}
    template = {"spec": {"terminationGracePeriodSeconds": GRACE_SECONDS, "containers": [container]}}
    elastic = {"minReplicas": max(1, replicas - 1), "scaleUp": {"stabilizationWindowSeconds": GROW_SECONDS}}
    return {
        "apiVersion": "concertina.dev/v1beta1",
        "kind": "TrainingJob",
        "metadata": {"name": name, "namespace": NAMESPACE},
        "spec": {
            "replicas": replicas,
            "elastic": elastic,
            "workersPerReplica": workers,
            "failurePolicy": {"maxRestarts": MOST_KILLS},
            "template": template,
        },
    }


@dataclass
class SeenJob:
    """Status of a job, and the Unix times in seconds at which its changes were first seen."""

    wanted: int
    uid: str = ""
    """Uid of the job. Empty if the job does not exist."""
    ready: str = ""
    """Reason of the condition Ready."""
    members: tuple[str, ...] = ()
    rounds: dict[int, float] = field(default_factory=dict)
    """Time at which each committed round was first seen."""
    claims: dict[int, float] = field(default_factory=dict)
    """Time at which each claimed round was first seen."""
    progress_at: float = 0.0
    """Time of the last progress report, from `status.progress`."""
    trained_at: float = float("inf")
    """Time at which the job was first seen training."""

    @property
    def trains(self) -> bool:
        return self.ready == "Training"

    @property
    def is_smaller(self) -> bool:
        """True if the job started with fewer replicas than requested, because one was too slow to answer."""
        return self.trains and len(self.members) < self.wanted

    @property
    def round(self) -> int:
        return max(self.rounds, default=0)

    def saw(self, job: Raw, at: float) -> None:
        self.uid, status = job["metadata"]["uid"], job.get("status") or {}
        conditions = status.get("conditions") or ()
        self.ready = next((condition["reason"] for condition in conditions if condition["type"] == "Ready"), "")
        world = status.get("world") or {}
        self.members = tuple(member.replica for member in JobStatus.model_validate(status).world.members)
        if world.get("round"):
            self.rounds.setdefault(world["round"], at)
        if claim := world.get("claim"):
            self.claims.setdefault(claim["round"], at)
        if self.trains:
            self.trained_at = min(self.trained_at, at)
        if progress := status.get("progress"):
            self.progress_at = unix_seconds(progress["at"])


class Jobs:
    resource = TRAINING_JOBS

    def __init__(self, client: Client, workers: int = 1) -> None:
        """Create a set without jobs. `workers` is the number of workers in each replica."""
        self._client, self._workers = client, workers
        self.seen: dict[str, SeenJob] = {}

    def of(self, name: str) -> SeenJob:
        """Return the job to which the object with this name belongs. The object's name begins with the job's name."""
        return self.seen.get("-".join(name.split(".")[0].split("-")[:2]), SeenJob(0))

    async def create(self, names: Iterable[str], replicas: int) -> None:
        self.seen |= {name: SeenJob(replicas) for name in names}
        path = (self.resource, NAMESPACE)
        await _some_at_once(self._client.create(*path, self._manifest(name, replicas)) for name in names)

    async def delete(self, names: Iterable[str]) -> None:
        await _some_at_once(self._client.delete(self.resource, NAMESPACE, name) for name in names)

    async def on_nodes(self) -> dict[str, Counter[str]]:
        """Return the number of members of each job, by node. Pods of former members may be on a node too."""
        members_by_node: dict[str, Counter[str]] = {}
        pods, _ = await self._client.list_all(PODS, NAMESPACE)
        for pod in pods:
            name = pod_names.parse(pod["metadata"]["name"])
            if name is not None and pod["metadata"]["name"] in self.seen[name.job].members:
                members_by_node.setdefault(pod["spec"]["nodeName"], Counter())[name.job] += 1
        return members_by_node

    async def follow(self) -> None:
        """Watch the jobs forever."""
        while True:
            try:
                jobs, version = await self._client.list_all(self.resource, NAMESPACE)
                for job in jobs:
                    self._on_job("MODIFIED", job)
                async for kind, job in self._client.watch(self.resource, NAMESPACE, version):
                    self._on_job(kind, job)
            except (Gone, Unreachable) as error:
                print(f"the watch of jobs: {error}", flush=True)
                await asyncio.sleep(0.5)

    def _manifest(self, name: str, replicas: int) -> Raw:
        return manifest(name, replicas, self._workers)

    def _on_job(self, kind: str, job: Raw) -> None:
        seen = self.seen.get(job["metadata"].get("name", ""))
        if seen is None or kind == "BOOKMARK":
            return
        if kind == "DELETED":
            seen.uid = ""
        else:
            seen.saw(job, time.time())

    async def until(
        self,
        what: str,
        begun: float,
        limit: float,
        holds: Callable[[str, SeenJob], bool],
        names: Collection[str] | None = None,
    ) -> dict[str, float]:
        """Return the seconds since `begun` after which `holds` is true for half, 99 % and all of the jobs.

        `holds` is called for all jobs, or for the jobs in `names`. If a share of the jobs does not reach the condition
        within `limit` seconds, its value is infinite.
        """
        of = self.seen if names is None else {name: self.seen[name] for name in names}
        said_at = time.time()
        needed = {"half": (len(of) + 1) // 2, "99 %": -(-len(of) * 99 // 100), "all": len(of)}
        reached = dict.fromkeys(needed, float("inf"))
        while reached["all"] == float("inf"):
            count, now = sum(holds(name, job) for name, job in of.items()), time.time()
            for mark, least in needed.items():
                if count >= least:
                    reached[mark] = min(reached[mark], now - begun)
            if now - said_at >= SAY_SECONDS or count == len(of):
                said_at = now
                print(f"  {now - begun:6.1f} s: {count} of {len(of)} {what}", flush=True)
            if now - begun > limit:
                break
            await asyncio.sleep(LOOK_SECONDS)
        return reached


async def _some_at_once(requests: Iterable[Awaitable[object]]) -> None:
    some = asyncio.Semaphore(AT_ONCE)

    async def one(request: Awaitable[object]) -> None:
        async with some:
            await request

    await asyncio.gather(*map(one, requests))
