"""What `recovery.py` does to a TrainingJob on the local cluster, and how it reads what followed from the logs."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import recovery_torchrun

from concertina.cli.demo import stage as stages
from concertina.cli.demo.stage import Stage, until
from concertina.local.errors import LocalClusterError

GPU = {"limits": {"nvidia.com/gpu": 1}}
"""One replica a node, as in life: a node that dies takes one."""
PARTS = ("detect and decide", "prepare", "assign", "start", "group", "build", "restore", "first_step")
AT_WORK = re.compile(r"round (\d+) is at work: step (\d+), .*?seconds: (.*); at ([\d.]+)")
RECOVERY_LIMIT, GROW_LIMIT = 60.0, 240.0
SCRIPT = Path(__file__).parent / "scripts" / "elastic_ddp.py"


@dataclass(frozen=True)
class Recovery:
    """One recovery. Seconds; `parts` add up to `total`, but for what passes between two logs."""

    total: float
    replayed: float
    parts: dict[str, float]

    def __str__(self) -> str:
        return f"{self.total:.2f} s, {self.replayed:.0f} steps replayed"


def job(name: str, container: dict[str, Any], **spec: Any) -> dict[str, Any]:
    """A TrainingJob of three replicas that goes on for longer than any benchmark."""
    return {
        "apiVersion": "concertina.dev/v1alpha1",
        "kind": "TrainingJob",
        "metadata": {"name": name},
        "spec": {
            "replicas": 3,
            "elastic": {"minReplicas": 2, "growAfterSeconds": 1},
            "failurePolicy": {"maxRestarts": 1000},
            "template": {
                "spec": {
                    "containers": [
                        {"name": "trainer", "image": "concertina/trainer:bench", "resources": GPU, **container}
                    ]
                }
            },
            **spec,
        },
    }


def bundled() -> dict[str, Any]:
    """The demo's model, without an end."""
    trainer = {
        "steps": 1_000_000,
        "model": {"layers": 4, "dim": 128, "heads": 4, "sequenceLength": 128},
        "data": {"uri": f"s3://{stages.BUCKET}/data"},
        "globalBatchSize": 12,
        "microBatchSize": 6,
        "logEverySteps": 1,
    }
    checkpoint = {"uri": f"s3://{stages.BUCKET}/recovery", "everySteps": 500, "secretName": "s3"}
    return job("bundled", {}, trainer=trainer, checkpoint=checkpoint)


def own_command(trace: Path) -> dict[str, Any]:
    """The script that torchrun runs too."""
    command = ["python3", str(SCRIPT), "--trace", str(trace), "--checkpoint", str(trace / "model.pt")]
    return job("script", {"command": command})


class Bench:
    """A job that is hurt again and again; it goes away with the block."""

    def __init__(self, stage: Stage, name: str, manifest: dict[str, Any]) -> None:
        self._stage, self._name, self._manifest = stage, name, manifest
        self._tails: dict[str, list[str]] = {}

    def __enter__(self) -> Bench:
        self._stage.cluster.kubectl("apply", "-f", "-", stdin=json.dumps(self._manifest))
        return self

    def __exit__(self, *_: object) -> None:
        self._stage.cluster.kubectl("delete", "trainingjob", self._name, "--wait=true", "--timeout=60s")

    def recover(self, scenario: str) -> Recovery:
        """Hurt the bundled trainer's job and read the recovery from the logs."""
        before = self._steady()
        killed_at = self._hurt(scenario, before)
        at_work = until("a new round", RECOVERY_LIMIT, lambda: self._at_work_since(before["world"]["round"]))
        recovery = self._read(killed_at, at_work, before)
        self._heal()
        return recovery

    def recover_traced(self, scenario: str, trace: Path) -> float:
        """The same for the script, whose steps stand in `trace`."""
        before = self._steady()
        killed_at = self._hurt(scenario, before)
        known = before["world"]["round"]

        def first() -> list[recovery_torchrun.Step]:
            return [s for s in recovery_torchrun.steps(trace) if s.at > killed_at and s.restart > known]

        seconds = until("a step of a new round", RECOVERY_LIMIT, first)[0].at - killed_at
        self._heal()
        return float(seconds)

    def _status(self) -> dict[str, Any]:
        return dict(self._stage.job(self._name).get("status", {}))

    def _steady(self) -> dict[str, Any]:
        """The status once three replicas train, and have for a while."""

        def steady() -> dict[str, Any] | None:
            status = self._status()
            training = any(c["type"] == "Ready" and c["reason"] == "Training" for c in status.get("conditions", []))
            return status if training and status["world"]["replicas"] == 3 else None

        until("three replicas at work", GROW_LIMIT, steady)
        time.sleep(3)
        return dict(until("three replicas at work", GROW_LIMIT, steady))

    def _hurt(self, scenario: str, status: dict[str, Any]) -> float:
        """SIGKILL; returns when, in Unix seconds."""
        members = {member["replica"]: member["node"] for member in status["world"]["members"]}
        lead, spared = status["world"]["lead"], self._stage.operator_node()
        other = next(name for name in members if name != lead)
        if scenario == "node":
            node = next(node for node in members.values() if node != spared)
            killed_at = time.time()
            self._stage.cluster.kill_node(node)
            return killed_at
        if scenario == "worker":
            pid = worker_of(other, self._stage.cluster.kubectl("logs", other, "-c", "trainer"))
        else:
            pid = agent_of(lead if scenario == "lead" else other)
        killed_at = time.time()
        os.kill(pid, signal.SIGKILL)
        return killed_at

    def _heal(self) -> None:
        """Boot what does not run."""
        cluster = self._stage.cluster
        for name, process in cluster.running().items():
            if name in cluster.nodes() and process is None:
                cluster.start_node(name)

    def _at_work_since(self, known: int) -> re.Match[str] | None:
        """The line of the first round above `known` that has made a step."""
        for pod in self._stage.pods(self._name):
            if pod["status"].get("phase") != "Running":
                continue
            found = [m for m in AT_WORK.finditer(self._log(pod["metadata"]["name"])) if int(m[1]) > known]
            if found:
                return found[0]
        return None

    def _log(self, pod: str) -> str:
        """The end of a pod's log; empty where it can't be had (its node is dead)."""
        try:
            return self._stage.cluster.kubectl("logs", pod, "-c", "trainer", "--tail=200", timeout=5)
        except (LocalClusterError, subprocess.TimeoutExpired):
            return ""

    def _read(self, killed_at: float, at_work: re.Match[str], before: dict[str, Any]) -> Recovery:
        words = at_work[3].split()
        parts = {name: float(value) for name, value in zip(words[::2], words[1::2], strict=True)}
        round_number, at = int(at_work[1]), float(at_work[4])
        marks = self._operator_marks(round_number)
        parts["detect and decide"] = marks["claimed"] - killed_at
        parts["prepare"] = marks["committed"] - marks["claimed"]
        started = sum(parts[name] for name in ("start", "group", "build", "restore", "first_step"))
        parts["assign"] = max(0.0, at - marks["committed"] - started)
        replayed = self._status().get("stepsReplayed", 0) - before.get("stepsReplayed", 0)
        return Recovery(at - killed_at, replayed, parts)

    def _operator_marks(self, round_number: int) -> dict[str, float]:
        """When the operator claimed and committed the round, in Unix seconds."""
        log = self._stage.cluster.kubectl("-n", stages.SYSTEM, "logs", "deployment/concertina", "--tail=400")
        marks = {}
        for line in log.splitlines():
            entry = json.loads(line) if line.startswith("{") else {}
            if entry.get("round") == round_number and entry.get("event") in ("claimed", "committed"):
                marks[entry["event"]] = float(entry["t"])
        return marks


def processes_of(replica: str) -> dict[int, str]:
    """Command lines of all processes of a replica on this machine, by pid."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if f"CONCERTINA_REPLICA={replica}\0".encode() in (folder / "environ").read_bytes():
                found[int(folder.name)] = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue
    return found


def agent_of(replica: str) -> int:
    """Pid of process 1 of a replica."""
    return next(pid for pid, command in processes_of(replica).items() if "agent.pyz run" in command)


def worker_of(replica: str, log: str) -> int:
    """Pid, on this machine, of the worker that the agent started last."""
    inside = [json.loads(line)["pid"] for line in log.splitlines() if '"event":"worker_started"' in line][-1]
    for pid in processes_of(replica):
        status = Path(f"/proc/{pid}/status").read_text()
        if re.search(rf"^NSpid:.*\t{inside}$", status, re.M):
            return pid
    raise LookupError(f"no process of {replica} has pid {inside} in its namespace")
