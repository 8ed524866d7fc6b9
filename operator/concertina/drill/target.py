"""Target of a drill: the job, and the cluster that it runs on."""

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
"""Minimum duration of an outage of the API server or of the storage, in seconds."""
SKEW = 30
"""Difference between a node's clock and the operator's up to which a log is found quickly, in seconds."""


_PID = re.compile(r'"pid":(\d+)')
STANDSTILL = 12.0
"""Minimum time for which the operator is stopped, in seconds.

It is longer than the silence after which agents are given up, and than the operator's Lease.
"""


class ProgressSource(enum.Enum):
    """Sources by which the job can be watched while a fault lasts."""

    ALL = enum.auto()
    LOGS = enum.auto()
    """Logs only. No agent reaches the operator, so the status does not change."""
    NOTHING = enum.auto()
    """No source. The API server is the component that is away."""


@dataclass(frozen=True)
class Injection:
    """Description of an injected fault, with its Unix time in seconds."""

    at: float
    text: str
    sight: ProgressSource = ProgressSource.ALL
    replica: str = ""
    """Replica that the fault was injected into, if it is a single one."""


@dataclass(frozen=True)
class DrillTarget:
    """Job that is drilled.

    `local` is the local cluster that the API server belongs to, or None on any other cluster.
    """

    client: Client
    namespace: str
    name: str
    local: LocalCluster | None

    async def job(self) -> Raw:
        return await self.client.get(TRAINING_JOBS, self.namespace, self.name)

    async def status(self) -> JobStatus:
        return status_of(await self.job())

    async def run_python(self, pod: str, program: str, *arguments: str, seconds: float = 30.0) -> str:
        """Run a Python program in the container `trainer` of a pod, and return what it prints."""
        command = ["python3", "-c", program, *arguments]
        return await execute(self.client, self.namespace, pod, TRAINER, command, seconds)

    async def operator(self) -> Raw:
        """Return the pod of the operator that acts on the job.

        It belongs to a release that serves the job's namespace, and holds the Lease.

        Raises:
            UserError: When no pod of the cluster is the acting operator.
        """
        pods, _ = await self.client.list_all(PODS, None, OPERATORS)
        for pod in pods:
            if not _serves(pod, self.namespace):
                continue
            leases, _ = await self.client.list_all(LEASES, pod["metadata"]["namespace"])
            if pod["metadata"]["name"] in [lease["spec"].get("holderIdentity") for lease in leases]:
                return pod
        raise UserError("No pod of this cluster is the acting operator: it runs elsewhere, or it is down.")

    async def victim(self) -> Member:
        """Return a member that is not the coordinator, or the coordinator if it is the only member."""
        world = (await self.status()).world
        return next((member for member in world.members if member.replica != world.coordinator), world.members[0])

    async def coordinator(self) -> Member:
        world = (await self.status()).world
        return next(member for member in world.members if member.replica == world.coordinator)

    async def victim_node(self) -> str:
        """Return the node of a member on which the operator does not run. The loss of both is another drill.

        Raises:
            UserError: When all members are on the operator's node.
        """
        world = (await self.status()).world
        spared = (await self.operator())["spec"].get("nodeName")
        nodes = [member.node for member in world.members if member.node != spared]
        if not nodes:
            raise UserError(
                f"All members of {self.name} are on {spared}, where the operator is: there is no node to stop."
            )
        return nodes[-1]

    async def worker(self, member: Member) -> str:
        """Return the pid of the member's newest worker inside the pod, as its agent logged it.

        Raises:
            UserError: When the log names no worker.
        """
        since = (await self.status()).world.since
        near = rfc3339(int(unix_seconds(since)) - SKEW) if since else ""
        for start, limit in ((near, 1 << 20), ("", None)):
            pid = ""
            lines = self.client.logs(self.namespace, member.replica, TRAINER, since=start, limit_bytes=limit)
            async for line in lines:  # The agent's lines and the workers' output are mixed.
                if '"event":"worker_started"' in line and (match := _PID.search(line)):
                    pid = match[1]
            if pid:
                return pid
        raise UserError(f"The log of {member.replica} names no worker.")

    @property
    def cluster(self) -> LocalCluster:
        """Local cluster of the target. Only scenarios for the local cluster use it."""
        assert self.local is not None
        return self.local


Fault = Callable[[DrillTarget], AbstractAsyncContextManager[Injection]]
"""Function that injects a fault on entry and reverts it on exit, however the block ends."""


def environment_of(job_uid: str, replica: str) -> dict[str, str]:
    """Return the environment variables that identify the agent's process on this machine."""
    return {"CONCERTINA_UID": job_uid, "CONCERTINA_REPLICA": replica}


def watched_namespaces(operator: Raw) -> list[str]:
    """Return the namespaces that an operator's pod is configured to serve.

    An empty list means all namespaces, or those with the labels that the chart names.
    """
    environment = (entry for container in operator["spec"]["containers"] for entry in container.get("env") or ())
    names = next((entry.get("value") for entry in environment if entry["name"] == WATCHED), None)
    return names.split(",") if names else []


def _serves(operator: Raw, namespace: str) -> bool:
    watched = watched_namespaces(operator)
    return not watched or namespace in watched
