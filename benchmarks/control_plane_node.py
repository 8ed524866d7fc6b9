"""Simulated node: its Node and Lease at the API server, and the pods that are bound to it.

A pod runs as soon as the node observes it. Each pod has its own loopback address, on which a simulated agent listens. A
pod that is being deleted gets a termination notice. The node confirms the end of the pod after the simulated agent has
ended. A pod without an agent's identity runs nothing.
"""

from __future__ import annotations

import asyncio
import base64
import itertools
import time
from collections.abc import Awaitable
from dataclasses import dataclass, field
from pathlib import Path

from control_plane_agent import StandIn

from concertina.api import TRAINER
from concertina.api.status import rfc3339
from concertina.kube.client import Client
from concertina.kube.errors import ApiError, Conflict, Gone, NotFound, Unreachable
from concertina.kube.manifests.agent_container import IDENTITY
from concertina.kube.resources import LEASES, NODES, PODS, SECRETS, Raw
from concertina_agent.runtime.nursery import TaskGroup
from concertina_agent.settings import AgentSettings

LEASE_SECONDS, RENEWED_SECONDS = 40, 10.0
PODS_A_NODE = 250
"""Maximum number of pods on a node. It equals the number of the node's addresses."""
NOTICED_SECONDS = 0.05
"""Seconds until a node reports that one of its pods has died."""
KILLED = 137


@dataclass
class Identities:
    """Certificates of jobs, read from Secrets.

    Each Secret is read once, and its certificates are stored in a folder.
    """

    client: Client
    folder: Path
    _known: dict[str, asyncio.Task[Path]] = field(default_factory=dict)

    async def of(self, pod: Raw) -> Path:
        """Return the folder with the certificates from the pod's Secret.

        Raises:
            ApiError: When the Secret can't be read.
        """
        name = next(volume["secret"]["secretName"] for volume in pod["spec"]["volumes"] if volume["name"] == IDENTITY)
        if name not in self._known:
            self._known[name] = asyncio.create_task(self._read(pod["metadata"]["namespace"], name))
        return await asyncio.shield(self._known[name])

    async def _read(self, namespace: str, name: str) -> Path:
        secret = await self.client.get(SECRETS, namespace, name)
        folder = self.folder / name
        folder.mkdir(exist_ok=True)
        for file, content in secret["data"].items():
            (folder / file).write_bytes(base64.b64decode(content))
        return folder


class NoAgent:
    def __init__(self, address: str) -> None:
        self.address = address
        self.ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    def notice(self, grace: float) -> None:
        self.ended.set_result(0)

    async def die(self) -> None:
        pass


@dataclass
class RunningPod:
    pod: Raw
    agent: StandIn | NoAgent
    ending: bool = False


class SimulatedNode:
    def __init__(self, name: str, network: str, client: Client, identities: Identities, tasks: TaskGroup) -> None:
        """Create the node. `network` is the first three numbers of its pods' IPv4 addresses."""
        self.name = name
        self._client, self._identities, self._tasks = client, identities, tasks
        self._addresses = itertools.cycle(f"{network}.{last}" for last in range(1, PODS_A_NODE + 1))
        self._taken: set[str] = set()
        self._pods: dict[str, RunningPod] = {}
        """Running pods by uid."""
        self._seen: set[str] = set()
        self._parts: list[asyncio.Task[None]] = []

    async def join(self) -> None:
        """Register the node with the API server, and start to run its pods."""
        labels = {"kubernetes.io/hostname": self.name}
        await self._client.create(NODES, None, {"metadata": {"name": self.name, "labels": labels}})
        room = {"cpu": "256", "memory": "1Ti", "pods": str(PODS_A_NODE)}
        address = {"type": "InternalIP", "address": "127.0.0.1"}
        status = {"capacity": room, "allocatable": room, "conditions": _conditions("Ready"), "addresses": [address]}
        await self._client.patch(NODES, None, self.name, {"status": status}, subresource="status")
        lease = {"metadata": {"name": self.name}, "spec": self._renewed()}
        await self._client.create(LEASES, "kube-node-lease", lease)
        self._parts = [
            self._tasks.start("lease", self._renew()),
            self._tasks.start("pods", self._watch()),
        ]

    async def kill(self, pod: str) -> float | None:
        """Kill the agent of the named pod, and return the Unix time in seconds.

        Return None if the pod does not run here.
        """
        running = next(
            (candidate for candidate in self._pods.values() if candidate.pod["metadata"]["name"] == pod), None
        )
        if running is None:
            return None
        at = time.time()
        await self._stop(running)
        self._tasks.start("say that it died", self._say_died(running.pod))
        return at

    async def power_off(self) -> float:
        """Kill all pods of the node without reporting that to the API server, and return the Unix time in seconds."""
        at = time.time()
        for part in self._parts:
            part.cancel()
        await asyncio.gather(*(self._stop(running) for running in list(self._pods.values())))
        return at

    # --- its own objects --------------------------------------------------------------------------------------------

    def _renewed(self) -> Raw:
        now = rfc3339(round(time.time()) + 1e-6)  # a MicroTime has a fraction
        return {"holderIdentity": self.name, "leaseDurationSeconds": LEASE_SECONDS, "renewTime": now}

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(RENEWED_SECONDS)
            try:
                await self._client.patch(LEASES, "kube-node-lease", self.name, {"spec": self._renewed()})
            except Unreachable as error:
                print(f"{self.name}: {error}", flush=True)

    async def _watch(self) -> None:
        mine = f"spec.nodeName={self.name}"
        while True:
            try:
                pods, version = await self._client.list_all(PODS, fields=mine)
                for pod in pods:
                    self._on_pod("MODIFIED", pod)
                async for kind, pod in self._client.watch(PODS, None, version, fields=mine):
                    version = pod["metadata"]["resourceVersion"]
                    self._on_pod(kind, pod)
            except (Gone, Unreachable) as error:
                print(f"{self.name}: {error}", flush=True)
                await asyncio.sleep(0.5)

    # --- pods -------------------------------------------------------------------------------------------------------

    def _on_pod(self, kind: str, pod: Raw) -> None:
        if kind == "BOOKMARK":
            return
        uid = pod["metadata"]["uid"]
        running = self._pods.get(uid)
        if kind == "DELETED":
            self._seen.discard(uid)
            if running is not None:
                self._tasks.start("stop", self._stop(running))
        elif "deletionTimestamp" in pod["metadata"]:
            if running is None or not running.ending:
                self._tasks.start("end", self._end(pod, running))
        elif uid not in self._seen and pod["status"].get("phase") == "Pending":
            self._seen.add(uid)
            self._tasks.start("run", self._run(pod))

    async def _run(self, pod: Raw) -> None:
        address = next(free for free in self._addresses if free not in self._taken)
        self._taken.add(address)
        try:
            agent = await self._agent(pod, address)
        except (ApiError, OSError) as error:  # Later pods may still succeed.
            print(f"{pod['metadata']['name']}: {error!r}", flush=True)
            return
        running = self._pods[pod["metadata"]["uid"]] = RunningPod(pod, agent)
        began = {"running": {"startedAt": rfc3339(int(time.time()))}}
        status = _status(pod, "Running", began) | {"podIP": address, "podIPs": [{"ip": address}], "hostIP": "127.0.0.1"}
        await self._say(pod, status | {"startTime": rfc3339(int(time.time()))})
        code = await agent.ended
        if not running.ending:
            await self._stop(running)
            await self._say(pod, _status(pod, "Failed" if code else "Succeeded", _terminated(code)))

    async def _agent(self, pod: Raw, address: str) -> StandIn | NoAgent:
        if all(volume["name"] != IDENTITY for volume in pod["spec"].get("volumes", ())):
            return NoAgent(address)
        agent = StandIn(_settings(pod, address, await self._identities.of(pod)))
        agent.start()
        return agent

    async def _end(self, pod: Raw, running: RunningPod | None) -> None:
        """End a pod that is being deleted: stop its simulated agent, and report the end to the API server."""
        if running is not None:
            running.ending = True
            if not running.agent.ended.done():
                grace = float(pod["metadata"].get("deletionGracePeriodSeconds") or 0)
                running.agent.notice(grace)
                await asyncio.wait([running.agent.ended], timeout=grace)
            await self._stop(running)
        metadata = pod["metadata"]
        await _unless_gone(
            self._client.delete(PODS, metadata["namespace"], metadata["name"], uid=metadata["uid"], grace=0)
        )

    async def _stop(self, running: RunningPod) -> None:
        self._pods.pop(running.pod["metadata"]["uid"], None)
        running.ending = True
        await running.agent.die()
        self._taken.discard(running.agent.address)

    async def _say_died(self, pod: Raw) -> None:
        await asyncio.sleep(NOTICED_SECONDS)
        await self._say(pod, _status(pod, "Failed", _terminated(KILLED)))

    async def _say(self, pod: Raw, status: Raw) -> None:
        metadata = pod["metadata"]
        patch = {"metadata": {"uid": metadata["uid"]}, "status": status}
        await _unless_gone(self._client.patch(PODS, metadata["namespace"], metadata["name"], patch, "status"))


async def _unless_gone(request: Awaitable[object]) -> None:
    try:
        await request
    except (NotFound, Conflict):
        pass
    except Unreachable as error:
        print(error, flush=True)


def _settings(pod: Raw, address: str, identity: Path) -> AgentSettings:
    """Return the agent settings, as `concertina_agent.settings.read` would read them from the pod's environment."""
    trainer = next(each for each in pod["spec"]["containers"] if each["name"] == TRAINER)
    values = {each["name"]: each.get("value", "") for each in trainer["env"]}
    return AgentSettings(
        uid=values["CONCERTINA_UID"],
        replica=pod["metadata"]["name"],
        pod_ip=address,
        port=int(values["CONCERTINA_PORT"]),
        workers=int(values["CONCERTINA_WORKERS"]),
        volume=identity,
        identity=identity,
        grace=float(values["CONCERTINA_GRACE_SECONDS"]),
        checkpoints=False,
        environment={},
        command=tuple(trainer["command"]),
    )


def _conditions(*kinds: str) -> list[Raw]:
    now = rfc3339(int(time.time()))
    return [{"type": kind, "status": "True", "reason": "Simulated", "lastTransitionTime": now} for kind in kinds]


def _status(pod: Raw, phase: str, state: Raw) -> Raw:
    """Return a pod status in which all containers have the same state."""
    runs = phase == "Running"
    alike = {"image": "", "imageID": "", "ready": runs, "restartCount": 0, "state": state}
    containers = [{"name": each["name"]} | alike for each in pod["spec"]["containers"]]
    conditions = _conditions("Initialized", "PodScheduled", *(("Ready", "ContainersReady") if runs else ()))
    return {"phase": phase, "containerStatuses": containers, "conditions": conditions}


def _terminated(code: int) -> Raw:
    return {"terminated": {"exitCode": code, "reason": "Error" if code else "Completed"}}
