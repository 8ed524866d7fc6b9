"""The job that is drilled, and the cluster that it runs on."""

from __future__ import annotations

import enum
import re
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass

from concertina.api import TRAINER
from concertina.api.status import JobStatus, rfc3339, unix_seconds
from concertina.api.world import Member
from concertina.kube.client import Client
from concertina.kube.execute import execute
from concertina.kube.parse.views import status_of
from concertina.kube.resources import LEASES, PODS, TRAINING_JOBS, Raw
from concertina.local.cluster import LocalCluster
from concertina.terminal.cluster_connection import UserError

OPERATORS = "app.kubernetes.io/name=concertina-operator"
WATCHED = "CONCERTINA_WATCH_NAMESPACES"
OUTAGE = 5.0
"""Seconds that the API server or the storage is away, at least."""
SKEW = 30
"""Seconds by which a node's clock may differ from the operator's for its log to be found quickly."""


_PID = re.compile(r'"pid":(\d+)')
STANDSTILL = 12.0
"""Seconds that the operator is stopped, at least: more than its agents' silence, and than its Lease."""


class ProgressSource(enum.Enum):
    """By what the job can be watched while a fault lasts."""

    ALL = enum.auto()
    LOGS = enum.auto()
    """Not by its status: the operator hears nothing."""
    NOTHING = enum.auto()
    """The API server is what was taken away."""


@dataclass(frozen=True)
class Injection:
    """What was done to the job, when (Unix seconds), and in words."""

    at: float
    text: str
    sight: ProgressSource = ProgressSource.ALL
    replica: str = ""
    """The victim, where it is one replica."""


@dataclass(frozen=True)
class DrillTarget:
    """`local`: the local cluster that the API server belongs to, None on any other cluster."""

    client: Client
    namespace: str
    name: str
    local: LocalCluster | None

    async def job(self) -> Raw:
        return await self.client.get(TRAINING_JOBS, self.namespace, self.name)

    async def status(self) -> JobStatus:
        return status_of(await self.job())

    async def run_python(self, pod: str, program: str, *arguments: str, seconds: float = 30.0) -> str:
        """What a Python program prints that runs inside the container `trainer` of a pod."""
        command = ["python3", "-c", program, *arguments]
        return await execute(self.client, self.namespace, pod, TRAINER, command, seconds)

    async def operator(self) -> Raw:
        """The pod of the operator that acts on the job: of a release that serves its namespace, the holder of the
        Lease."""
        pods, _ = await self.client.list_all(PODS, None, OPERATORS)
        for pod in pods:
            if not _serves(pod, self.namespace):
                continue
            leases, _ = await self.client.list_all(LEASES, pod["metadata"]["namespace"])
            if pod["metadata"]["name"] in [each["spec"].get("holderIdentity") for each in leases]:
                return pod
        raise UserError("No pod of this cluster is the acting operator: it runs elsewhere, or it is down.")

    async def victim(self) -> Member:
        """A member that does not coordinate, where there is one."""
        world = (await self.status()).world
        return next((member for member in world.members if member.replica != world.coordinator), world.members[0])

    async def coordinator(self) -> Member:
        world = (await self.status()).world
        return next(member for member in world.members if member.replica == world.coordinator)

    async def victim_node(self) -> str:
        """The node of a member that does not have the operator too: to lose both is another drill."""
        world = (await self.status()).world
        spared = (await self.operator())["spec"].get("nodeName")
        nodes = [member.node for member in world.members if member.node != spared]
        if not nodes:
            raise UserError(
                f"All members of {self.name} are on {spared}, where the operator is: there is no node to stop."
            )
        return nodes[-1]

    async def worker(self, member: Member) -> str:
        """The pid, inside the pod, of the member's newest worker, as its agent logged it."""
        since = (await self.status()).world.since
        near = rfc3339(int(unix_seconds(since)) - SKEW) if since else ""
        for start, limit in ((near, 1 << 20), ("", None)):
            pid = ""
            lines = self.client.logs(self.namespace, member.replica, TRAINER, since=start, limit_bytes=limit)
            async for line in lines:  # what workers print stands among the agent's lines
                if '"event":"worker_started"' in line and (found := _PID.search(line)):
                    pid = found[1]
            if pid:
                return pid
        raise UserError(f"The log of {member.replica} names no worker.")

    @property
    def cluster(self) -> LocalCluster:
        """Of scenarios that are for the local cluster."""
        assert self.local is not None
        return self.local


Fault = Callable[[DrillTarget], AbstractAsyncContextManager[Injection]]
"""Injects the fault on entry, reverts it on exit, however the block ends."""


def environment_of(job_uid: str, replica: str) -> dict[str, str]:
    """What tells the agent's process from all others on this machine."""
    return {"CONCERTINA_UID": job_uid, "CONCERTINA_REPLICA": replica}


def watched_namespaces(operator: Raw) -> list[str]:
    """The namespaces that the chart told an operator's pod to serve; none: all, or those with its labels."""
    environment = (entry for container in operator["spec"]["containers"] for entry in container.get("env") or ())
    names = next((entry.get("value") for entry in environment if entry["name"] == WATCHED), None)
    return names.split(",") if names else []


def _serves(operator: Raw, namespace: str) -> bool:
    watched = watched_namespaces(operator)
    return not watched or namespace in watched
