"""The job into which a drill injects a fault, and the job's cluster."""

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
"""Minimum duration in seconds of an outage of the API server or the storage."""
SKEW = 30
"""Assumed limit, in seconds, for the difference between two clocks when the search reads only recent log lines.

If the clocks differ more, the search reads the whole log.
"""


_PID = re.compile(r'"pid":(\d+)')
STANDSTILL = 12.0
"""Minimum time in seconds for which the operator is stopped.

It is longer than the duration of the operator's Lease, and longer than the silence after which an agent counts as lost.
"""


class ProgressSource(enum.Enum):
    """Sources from which a drill observes the job's progress while the fault is active."""

    ALL = enum.auto()
    LOGS = enum.auto()
    """Only logs. The operator is connected to no agent, so the status does not change."""
    NOTHING = enum.auto()
    """No source, because the API server itself does not run."""


@dataclass(frozen=True)
class Injection:
    """Description of an injected fault, and the Unix time of the injection in seconds."""

    at: float
    text: str
    sight: ProgressSource = ProgressSource.ALL
    replica: str = ""
    """Replica into which the fault was injected, or an empty string if it is not a single replica."""


@dataclass(frozen=True)
class DrillTarget:
    """Job under test, and its cluster.

    `local` is the local cluster that has this API server, or None for any other cluster.
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
        """Run a Python program in the container `trainer` of a pod, and return its output."""
        command = ["python3", "-c", program, *arguments]
        return await execute(self.client, self.namespace, pod, TRAINER, command, seconds)

    async def operator(self) -> Raw:
        """Return the pod of the operator that manages the job.

        This operator serves the job's namespace and holds the Lease of its release.

        Raises:
            UserError: When the cluster has no such pod.
        """
        pods, _ = await self.client.list_all(PODS, None, OPERATORS)
        for pod in pods:
            if not _serves(pod, self.namespace):
                continue
            leases, _ = await self.client.list_all(LEASES, pod["metadata"]["namespace"])
            if pod["metadata"]["name"] in [lease["spec"].get("holderIdentity") for lease in leases]:
                return pod
        raise UserError("No pod of this cluster is the leading operator: the operator runs elsewhere, or it is down.")

    async def victim(self) -> Member:
        """Return the member of the job into which the drill injects the fault.

        This is a member that is not the coordinator (the agent of rank 0), unless there is only one member.
        """
        world = (await self.status()).world
        return next((member for member in world.members if member.replica != world.coordinator), world.members[0])

    async def coordinator(self) -> Member:
        world = (await self.status()).world
        return next(member for member in world.members if member.replica == world.coordinator)

    async def victim_node(self) -> str:
        """Return the node on which the drill causes a fault: the node of a member, but not the operator's node.

        Raises:
            UserError: When all members are on the operator's node.
        """
        world = (await self.status()).world
        spared = (await self.operator())["spec"].get("nodeName")
        nodes = [member.node for member in world.members if member.node != spared]
        if not nodes:
            raise UserError(
                f"All members of {self.name} are on {spared}, where the operator runs, so there is no node to stop."
            )
        return nodes[-1]

    async def worker(self, member: Member) -> str:
        """Return the pid, in the pod's pid namespace, of the member's newest worker. The agent's log contains the pid.

        Raises:
            UserError: When the log contains no pid of a worker.
        """
        since = (await self.status()).world.since
        near = rfc3339(int(unix_seconds(since)) - SKEW) if since else ""
        for start, limit in ((near, 1 << 20), ("", None)):
            pid = ""
            lines = self.client.logs(self.namespace, member.replica, TRAINER, since=start, limit_bytes=limit)
            async for line in lines:  # The log mixes the agent's lines with the workers' output.
                if '"event":"worker_started"' in line and (match := _PID.search(line)):
                    pid = match[1]
            if pid:
                return pid
        raise UserError(f"The log of {member.replica} shows no worker.")

    @property
    def cluster(self) -> LocalCluster:
        """Local cluster on which the job runs. Only scenarios for local clusters use it."""
        assert self.local is not None
        return self.local


Fault = Callable[[DrillTarget], AbstractAsyncContextManager[Injection]]
"""Function that returns a context manager. The manager injects a fault, and always reverts it on exit."""


def environment_of(job_uid: str, replica: str) -> dict[str, str]:
    """Return the environment variables by which the process of a replica's agent is found on this machine."""
    return {"CONCERTINA_UID": job_uid, "CONCERTINA_REPLICA": replica}


def watched_namespaces(operator: Raw) -> list[str]:
    """Return the namespaces to which an operator's pod is limited.

    An empty list means no such limit: the operator serves all namespaces, or the namespaces that its label selector
    matches.
    """
    environment = (entry for container in operator["spec"]["containers"] for entry in container.get("env") or ())
    names = next((entry.get("value") for entry in environment if entry["name"] == WATCHED), None)
    return names.split(",") if names else []


def _serves(operator: Raw, namespace: str) -> bool:
    watched = watched_namespaces(operator)
    return not watched or namespace in watched
