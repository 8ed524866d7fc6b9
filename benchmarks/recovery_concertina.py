"""Fault injection into a TrainingJob on the local cluster for `recovery.py`, and recovery times from the logs."""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import recovery_torchrun
from recovery_faults import BLOWS, OPERATOR_TOO, Victims, operator_started
from until import until

from concertina.api.status import JobStatus, unix_seconds
from concertina.demo import stage as stages
from concertina.demo.stage import Stage
from concertina.local.errors import LocalClusterError
from concertina_protocol import log_lines
from concertina_protocol.log_lines import RoundStarted

GPU = {"limits": {"nvidia.com/gpu": 1}}
"""Resource limit of one GPU. Each node then runs only one replica, so the loss of a node is the loss of one replica."""
PARTS = ("detect and decide", "prepare", "assign", "start", "group", "build", "restore", "first_step")
RECOVERY_LIMIT, GROW_LIMIT = 60.0, 240.0
QUIET_SECONDS, QUIET_JOIN_SECONDS = 1.5, 8.0
"""Seconds after a fault in which the benchmark does nothing, so that it takes no processor time from the recovery.

All times come from logs, which are read afterwards. Each `kubectl` takes a core for 50 to 100 ms, and without the pause
they took a quarter of the two cores during a recovery. A replica needs the second time to come back and join.
"""
WARM = ("warm", "script_parent")
"""Events that an agent logs after it has imported modules in advance."""
STEADY_STEPS = 90
"""Number of steps, summed over all ranks, before a fault is injected into a script."""
OPERATOR_STARTED = "from the operator's start"
SLOW = 5.0
"""Recovery time in seconds above which the operator's actions are printed."""
WINDOW = 5
"""Failure window in seconds.

For a script that reports no steps, all failures seem to happen at the same step. Without a window, the back-off would
grow each time.
"""
SCRIPTS = Path(__file__).parent / "scripts"


@dataclass(frozen=True)
class Recovery:
    """Times of one recovery in seconds.

    The sum of `parts` is `total`, except for the time between an event in one log and the next event in another log.
    """

    total: float
    replayed: float
    parts: dict[str, float]
    within: dict[str, float] = field(default_factory=dict)
    """Seconds between two moments of the recovery that are not the ends of one part, by name."""

    def __str__(self) -> str:
        within = "".join(f", {seconds:.2f} s {name}" for name, seconds in self.within.items())
        return f"{self.total:.2f} s{within}, {self.replayed:.0f} steps replayed"


@dataclass(frozen=True)
class Traced:
    """Recovery of a script, measured from its trace."""

    total: float
    """Seconds from the fault to the first step."""
    replayed: int
    """Number of repeated steps."""

    def __str__(self) -> str:
        return f"{self.total:.2f} s, {self.replayed} steps replayed"


def commit_share(trace: Path) -> list[float]:
    """Return the percentage of time that saving took in each process of a trace, without the process's first second."""
    steps_by_rank: dict[int, list[recovery_torchrun.Step]] = {}
    for step in recovery_torchrun.steps(trace):
        steps_by_rank.setdefault(step.pid, []).append(step)
    settled = ([s for s in steps if s.at > steps[0].at + 1] for steps in steps_by_rank.values())
    long = [steps for steps in settled if len(steps) > 20]
    return [100 * sum(s.committed for s in steps[1:]) / (steps[-1].at - steps[0].at) for steps in long]


def job(name: str, container: dict[str, Any], **spec: Any) -> dict[str, Any]:
    """Return a TrainingJob with three replicas that runs longer than any benchmark."""
    return {
        "apiVersion": "concertina.dev/v1beta1",
        "kind": "TrainingJob",
        "metadata": {"name": name},
        "spec": {
            "replicas": 3,
            "elastic": {"minReplicas": 2, "scaleUp": {"stabilizationWindowSeconds": 0}},
            "failurePolicy": {"maxRestarts": 1000, "windowSeconds": WINDOW},
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


def bundled(one_gpu: bool = False) -> dict[str, Any]:
    """Return a job of the bundled trainer with the demo's model. It does not end by itself.

    The job trains on CPUs even if the machine has GPUs, unless `one_gpu` is set. NCCL does not allow two ranks of one
    host on the same GPU. With `one_gpu`, each rank therefore reports a different host, and the ranks communicate over
    sockets.
    """
    env: list[dict[str, Any]] = [{"name": "CUDA_VISIBLE_DEVICES", "value": ""}]
    if one_gpu:
        env = [
            {"name": "NCCL_HOSTID", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
            {"name": "NCCL_SOCKET_IFNAME", "value": "lo"},
        ]
    trainer = {
        "steps": 1_000_000,
        "model": {"layers": 4, "dim": 128, "heads": 4, "sequenceLength": 128},
        "data": {"uri": f"s3://{stages.BUCKET}/data"},
        "globalBatchSize": 12,
        "microBatchSize": 6,
    }
    checkpoint = {"uri": f"s3://{stages.BUCKET}/recovery", "everySteps": 500, "secretName": "s3"}
    return job("bundled", {"env": env}, trainer=trainer, checkpoint=checkpoint)


def own_command(trace: Path) -> dict[str, Any]:
    """Return a job of the same script that also runs under torchrun."""
    script = SCRIPTS / "elastic_ddp.py"
    command = ["python3", str(script), "--trace", str(trace), "--checkpoint", str(trace / "model.pt")]
    return job("script", {"command": command}, warmStart={"enabled": True})


def shell_line(trace: Path) -> dict[str, Any]:
    """Return a job of the same script behind a shell line with a condition, as nanoGPT's users write it."""
    checkpoint = trace / "model.pt"
    start = f"python3 -u {SCRIPTS / 'elastic_ddp.py'} --trace {trace} --checkpoint {checkpoint}"
    line = f"from=scratch; if [ -f {checkpoint} ]; then from=resume; fi; echo from $from; {start}"
    return job("shell-line", {"command": ["bash", "-c", line]}, warmStart={"enabled": True})


def with_state(kind: str, pause: float, run: bool, trace: Path) -> dict[str, Any]:
    """Return a job of a script that uses `trainingjob.State`, and with `run` also `trainingjob.run`.

    Each step sleeps for `pause` seconds and then computes.
    """
    command = ["python3", str(SCRIPTS / "elastic_state.py"), kind, "--trace", str(trace), "--pause", str(pause)]
    return job(f"state-{kind}", {"command": [*command, *(["--run"] if run else [])]}, warmStart={"enabled": True})


class Bench:
    """Job into which faults are injected. It is deleted when the block ends."""

    def __init__(self, stage: Stage, name: str, manifest: dict[str, Any]) -> None:
        self._stage, self._name, self._manifest = stage, name, manifest
        self._stopped: list[int] = []

    def __enter__(self) -> Bench:
        self._stage.cluster.kubectl("apply", "-f", "-", stdin=json.dumps(self._manifest))
        return self

    def __exit__(self, *_: object) -> None:
        self._stage.cluster.kubectl("delete", "trainingjob", self._name, "--wait=true", "--timeout=60s")

    def recover(self, scenario: str) -> Recovery:
        """Inject a fault into a job of the bundled trainer, and return the recovery times from the logs."""
        before = self._steady()
        killed_at = self._inject(scenario, before)
        time.sleep(QUIET_SECONDS)
        at_work = until("a new round", RECOVERY_LIMIT, lambda: self._at_work_since(before["world"]["round"]))
        recovery = self._read(killed_at, at_work, before)
        if scenario == OPERATOR_TOO:
            started = operator_started(self._stage) - killed_at
            recovery = replace(recovery, within={**recovery.within, OPERATOR_STARTED: recovery.total - started})
        if recovery.within.get(OPERATOR_STARTED, recovery.total) > SLOW:
            self._explain(killed_at)
        self._revert()
        if scenario == OPERATOR_TOO:
            self._replace_operator()
        return recovery

    def join(self) -> Recovery:
        """Kill a member, and return the time from the readiness of the new agent to its first step.

        The new agent may be in the same pod or in a new one.
        """
        before = self._steady()
        self._inject("member", before)
        time.sleep(QUIET_SECONDS)
        until("a new round", RECOVERY_LIMIT, lambda: self._at_work_since(before["world"]["round"]))
        replayed = self._status().get("stepsReplayed", 0)
        time.sleep(QUIET_JOIN_SECONDS)
        joined, warm, joined_in = self._joined(before)
        at_work = until("its first step", RECOVERY_LIMIT, lambda: self._at_work_since(joined_in - 1))
        replayed = self._status().get("stepsReplayed", 0) - replayed
        within = {"from the start of the container": at_work.at - self._container_started(joined)}
        return Recovery(at_work.at - warm, replayed, self._parts(at_work, warm), within)

    def _container_started(self, replica: str) -> float:
        """Return the Unix time at which the replica's container trainer started, in whole seconds."""
        pod = next(pod for pod in self._stage.pods(self._name) if pod["metadata"]["name"] == replica)
        statuses = {status["name"]: status for status in pod["status"]["containerStatuses"]}
        return unix_seconds(statuses["trainer"]["state"]["running"]["startedAt"])

    def _joined(self, before: dict[str, Any]) -> tuple[str, float, int]:
        """Return the replacement of a lost member, the Unix time at which it was warm, and the round that it joined.

        The replacement is warm when it has imported the modules that its workers need. For a script, another replica
        may have told it which modules these are.
        """
        known = {*_instance_by_replica(before).values()}

        def with_others() -> dict[str, Any] | None:
            status = self._status()
            instances = {*_instance_by_replica(status).values()}
            return status if len(instances) == 3 and instances != known else None

        after = until("the successor at work", GROW_LIMIT, with_others)
        joined = next(replica for replica, instance in _instance_by_replica(after).items() if instance not in known)
        lines = _entries(self._log(joined))
        committed = unix_seconds(after["world"]["since"])
        warm = [line["t"] for line in lines if line.get("event") in WARM and line["t"] <= committed]
        return joined, warm[-1], after["world"]["round"]

    def recover_traced(self, scenario: str, trace: Path, cold: bool = False) -> Traced:
        """Inject a fault into a script's job, and measure its recovery from the steps in `trace`.

        By default, the fault is injected after all replicas have imported the script's modules in advance. With `cold`,
        the function does not wait for that.
        """

        def steady() -> dict[str, Any] | None:
            status = self._steady()
            made = [s for s in recovery_torchrun.steps(trace) if s.restart == status["world"]["round"]]
            is_warm = cold or all(self._is_warm(member["replica"]) for member in status["world"]["members"])
            return status if is_warm and len(made) > STEADY_STEPS else None

        before = until("a script at work", GROW_LIMIT, steady)
        since = self._inject("member" if scenario == "join" else scenario, before)
        known = before["world"]["round"]
        if scenario == "join":
            _, since, joined_in = self._joined(before)
            known = joined_in - 1

        def first() -> list[recovery_torchrun.Step]:
            return [s for s in recovery_torchrun.steps(trace) if s.at > since and s.restart > known]

        again = until("a step of a new round", RECOVERY_LIMIT, first)[0]
        done = max(s.step for s in recovery_torchrun.steps(trace) if s.restart <= known)
        if again.at - since > SLOW:
            self._explain(since)
        self._revert()
        return Traced(again.at - since, done - again.step + 1)

    def _is_warm(self, replica: str) -> bool:
        """Return whether the replica's latest parent process has imported the modules learned from the script."""
        parents = [line for line in _entries(self._log(replica, lines=-1)) if line.get("event") == "script_parent"]
        return bool(parents and parents[-1]["learned"])

    def _status(self) -> dict[str, Any]:
        return dict(self._stage.job(self._name).get("status", {}))

    def _steady(self) -> dict[str, Any]:
        """Return the job's status after three replicas have trained for a while."""

        def steady() -> dict[str, Any] | None:
            status = self._status()
            training = any(c["type"] == "Ready" and c["reason"] == "Training" for c in status.get("conditions", []))
            return status if training and status["world"]["replicas"] == 3 else None

        until("three replicas at work", GROW_LIMIT, steady)
        time.sleep(3)
        return dict(until("three replicas at work", GROW_LIMIT, steady))

    def _inject(self, scenario: str, status: dict[str, Any]) -> float:
        """Inject the fault, and return its Unix time in seconds."""
        uid = self._stage.job(self._name)["metadata"]["uid"]
        return BLOWS[scenario](Victims(self._stage, uid, status, self._stopped))

    def _revert(self) -> None:
        """Undo the injected faults: start nodes that do not run, and continue stopped processes."""
        for pid in self._stopped:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        self._stopped.clear()
        cluster = self._stage.cluster
        for name, process in cluster.running().items():
            if name in cluster.nodes() and process is None:
                cluster.start_node(name)

    def _replace_operator(self) -> None:
        """Delete the operator's pod, because the kubelet restarts a container later after each of its failures."""
        kubectl = functools.partial(self._stage.cluster.kubectl, "-n", stages.SYSTEM)
        kubectl("delete", "pod", "--all", "--wait=true", "--timeout=60s")
        kubectl("rollout", "status", "deployment/concertina", "--timeout=120s")

    def _at_work_since(self, known: int) -> RoundStarted | None:
        """Return the log line of the first finished step in a round after round `known`, or None before that."""
        for pod in self._stage.pods(self._name):
            if pod["status"].get("phase") != "Running":
                continue
            for line in map(log_lines.parse, self._log(pod["metadata"]["name"]).splitlines()):
                if isinstance(line, RoundStarted) and line.round > known:
                    return line
        return None

    def _log(self, pod: str, lines: int = 200) -> str:
        """Return the last lines of a pod's log, or an empty string if its node is dead. -1 means all lines."""
        try:
            return self._stage.cluster.kubectl("logs", pod, "-c", "trainer", f"--tail={lines}", timeout=5)
        except (LocalClusterError, subprocess.TimeoutExpired):
            return ""

    def _read(self, killed_at: float, at_work: RoundStarted, before: dict[str, Any]) -> Recovery:
        replayed = self._status().get("stepsReplayed", 0) - before.get("stepsReplayed", 0)
        assigned = [entry["t"] for entry in self._journal() if _is_assign(entry, at_work.round)]
        failure = self._status().get("lastFailure", {})
        within = {}
        if assigned and failure.get("round") == before["world"]["round"]:
            within["from the evidence to the last Assign"] = assigned[-1] - unix_seconds(failure["at"])
        return Recovery(at_work.at - killed_at, replayed, self._parts(at_work, killed_at), within)

    def _parts(self, at_work: RoundStarted, since: float) -> dict[str, float]:
        parts = dict(at_work.seconds)
        marks = self._operator_marks(at_work.round)
        parts["detect and decide"] = marks["claimed"] - since
        parts["prepare"] = marks["committed"] - marks["claimed"]
        started = sum(parts[name] for name in ("start", "group", "build", "restore", "first_step"))
        parts["assign"] = max(0.0, at_work.at - marks["committed"] - started)
        return parts

    def _explain(self, since: float) -> None:
        """Print the operator's actions after a Unix time, to explain a slow recovery."""
        for entry in self._journal():
            if entry.get("t", 0) >= since and entry.get("event") != "log":
                words = {key: value for key, value in entry.items() if key not in ("t", "job")}
                print(f"  +{entry['t'] - since:.2f} s {words}"[:300], file=sys.stderr)

    def _journal(self) -> list[dict[str, Any]]:
        log = self._stage.cluster.kubectl("-n", stages.SYSTEM, "logs", "deployment/concertina", "--tail=2000")
        return _entries(log)

    def _operator_marks(self, round_number: int) -> dict[str, float]:
        """Return the Unix times at which the operator claimed and committed a round."""
        marks = {}
        for entry in self._journal():
            if entry.get("round") == round_number and entry.get("event") in ("claimed", "committed"):
                marks[entry["event"]] = float(entry["t"])
        return marks


def _is_assign(entry: dict[str, Any], round_number: int) -> bool:
    """Return whether an entry of the operator's log is about a call to Assign of a round."""
    return entry.get("event") == "assign" and entry.get("round") == round_number


def _instance_by_replica(status: dict[str, Any]) -> dict[str, str]:
    """Return the agent instance of each member, by replica."""
    return {member.replica: member.instance for member in JobStatus.model_validate(status).world.members}


def _entries(log: str) -> list[dict[str, Any]]:
    """Return the decoded JSON lines of a log."""
    return [json.loads(line) for line in log.splitlines() if line.startswith("{")]
