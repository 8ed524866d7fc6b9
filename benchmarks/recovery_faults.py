"""Faults for `recovery.py`. Each function injects one fault, and returns the Unix time of the injection in seconds."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from concertina.demo.stage import SYSTEM, Stage
from concertina.local.host import processes

OPERATOR_TOO = "member and operator"


@dataclass
class Victims:
    """Processes of a job into which faults can be injected.

    The job's status names these processes. The object also lists the processes that a fault has stopped, to continue
    them later.
    """

    stage: Stage
    uid: str
    status: dict[str, Any]
    stopped: list[int]

    @property
    def coordinator(self) -> str:
        return str(self.status["world"]["coordinator"])

    @property
    def member(self) -> str:
        """Name of a member that is not the coordinator.

        Members that joined in the last scale-up are avoided, because their loss delays the next scale-up.
        """
        joined = self.status.get("internal", {}).get("growth", {}).get("joined", [])
        names = [
            member["replica"] for member in self.status["world"]["members"] if member["replica"] != self.coordinator
        ]
        return str(next((name for name in names if name not in joined), names[0]))

    @property
    def node(self) -> str:
        """Name of a member's node, but not of the operator's node."""
        spared = self.stage.operator_node()
        joined = self.status.get("internal", {}).get("growth", {}).get("joined", [])
        nodes = {
            member["replica"]: member["node"] for member in self.status["world"]["members"] if member["node"] != spared
        }
        return str(next((node for name, node in nodes.items() if name not in joined), next(iter(nodes.values()))))

    def agent(self, replica: str) -> int:
        return agent_of(self.uid, replica)

    def worker(self, replica: str) -> int:
        return worker_of(self.uid, replica, self.stage.cluster.kubectl("logs", replica, "-c", "trainer"))


def kill_worker(victims: Victims) -> float:
    return _signal(victims.worker(victims.member), signal.SIGKILL)


def kill_member(victims: Victims) -> float:
    return _signal(victims.agent(victims.member), signal.SIGKILL)


def kill_coordinator(victims: Victims) -> float:
    return _signal(victims.agent(victims.coordinator), signal.SIGKILL)


def kill_node(victims: Victims) -> float:
    at = time.time()
    victims.stage.cluster.kill_node(victims.node)
    return at


def stop_agent(victims: Victims) -> float:
    """Stop an agent without closing its connections, and return the Unix time in seconds."""
    pid = victims.agent(victims.member)
    victims.stopped.append(pid)
    return _signal(pid, signal.SIGSTOP)


def stop_worker(victims: Victims) -> float:
    pid = victims.worker(victims.member)
    victims.stopped.append(pid)
    return _signal(pid, signal.SIGSTOP)


def notice(victims: Victims) -> float:
    """Delete the pod with its grace period, and return the Unix time of the request in seconds."""
    at = time.time()
    victims.stage.cluster.kubectl("delete", "pod", victims.member, "--wait=false")
    return at


def operator_too(victims: Victims) -> float:
    """Kill an agent and the operator at the same moment, and return the Unix time in seconds.

    The kubelet restarts the operator's container.
    """
    pid, operator = victims.agent(victims.member), operator_of(victims.stage)
    if operator is not None:
        operator.signal(signal.SIGKILL)
    return _signal(pid, signal.SIGKILL)


def operator_of(stage: Stage) -> processes.ProcessIdentity | None:
    pods = stage.cluster.api.call("GET", f"/api/v1/namespaces/{SYSTEM}/pods")["items"]
    return processes.container({"POD_NAME": pods[0]["metadata"]["name"]})


def operator_started(stage: Stage) -> float:
    """Return the Unix time at which the operator was started."""
    operator = operator_of(stage)
    assert operator is not None, "no operator runs"
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + operator.start / os.sysconf("SC_CLK_TCK")


BLOWS: dict[str, Callable[[Victims], float]] = {
    "worker": kill_worker,
    "member": kill_member,
    "coordinator": kill_coordinator,
    "node": kill_node,
    "stopped agent": stop_agent,
    "stopped worker": stop_worker,
    "notice": notice,
    OPERATOR_TOO: operator_too,
}


def _signal(pid: int, number: int) -> float:
    at = time.time()
    os.kill(pid, number)
    return at


def processes_of(uid: str, replica: str) -> dict[int, str]:
    """Return the command lines of all processes of a replica on this machine, by pid.

    The processes are identified by the job's uid, because a replica in another cluster may have the same name.
    """
    marks = {f"CONCERTINA_REPLICA={replica}".encode(), f"CONCERTINA_UID={uid}".encode()}
    commands = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if marks <= set((folder / "environ").read_bytes().split(b"\0")):
                commands[int(folder.name)] = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue
    return commands


def agent_of(uid: str, replica: str) -> int:
    """Return the pid of process 1 of a replica."""
    return next(pid for pid, command in processes_of(uid, replica).items() if "agent.pyz run" in command)


def worker_of(uid: str, replica: str, log: str) -> int:
    """Return the pid, on this machine, of the worker that the agent started last.

    Raises:
        LookupError: When no process of the replica has that pid inside its container.
    """
    inside = [json.loads(line)["pid"] for line in log.splitlines() if '"event":"worker_started"' in line][-1]
    for pid in processes_of(uid, replica):
        status = Path(f"/proc/{pid}/status").read_text()
        if re.search(rf"^NSpid:.*\t{inside}$", status, re.M):
            return pid
    raise LookupError(f"no process of {replica} has pid {inside} in its namespace")
