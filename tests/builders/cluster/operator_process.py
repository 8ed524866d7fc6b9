"""The operator as a real process, and TrainingJobs for it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from builders.cluster import e2e
from builders.programs import FAULTS, STAND_IN
from builders.until import GIVE_UP, until
from concertina.api.status import JobStatus
from concertina.local.binaries import programs
from concertina.local.cluster import LocalCluster
from concertina.local.host import linux_namespaces

Object = dict[str, Any]
ROOT = Path(__file__).resolve().parents[3]
ENDLESS = 1_000_000
"""Number of steps of a job that trains until its test is over, at a pace that leaves processor time for others."""
PACE = {"PACE": "0.1", "TINY_PAUSE": "0.1"}
NAMELESS = ("unshare", "--user", "--map-user=65532", "--map-group=65532", "--")
"""Command prefix under which the operator's user has no name, as in a container."""
JOBS = "/apis/concertina.dev/v1beta1/namespaces/{}/trainingjobs"


def bundled(data: Path, fault: Path) -> Object:
    """Return arguments of `Jobs.create` for a small model that trains for long on that data.

    The faults that tests/programs/faults plays take effect as the file `fault` says.
    """
    return {"trainer": endless(data), "pod": {"containers": [paced(PYTHONPATH=FAULTS, FAULT=fault)]}}


def endless(data: Path, **more: Any) -> Object:
    """Return `trainer` of a small model that trains for long on that data."""
    model = {"layers": 1, "dim": 32, "heads": 2, "vocabSize": 256, "sequenceLength": 32}
    return {"steps": ENDLESS, "model": model, "data": {"uri": str(data)}, "globalBatchSize": 4, **more}


def paced(**environment: object) -> Object:
    """Return a container `trainer` whose steps take a while.

    With PYTHONPATH=STAND_IN, the steps are those of tests/programs/tiny, which needs no torch. It is for tests whose
    subject is not the computation.
    """
    variables = {"PYTHONPATH": FAULTS, **PACE, **environment}
    env = [{"name": name, "value": str(value)} for name, value in variables.items()]
    return {"name": "trainer", "image": "concertina/trainer:test", "env": env}


def standing_in(data: Path, **more: Any) -> Object:
    """Return arguments of `Jobs.create` for `endless` without torch. `data` is not read."""
    return {"trainer": endless(data), "pod": {"containers": [paced(PYTHONPATH=STAND_IN)], **more}}


RELEASE, SYSTEM = "tests", "concertina-tests"


def install(cluster: LocalCluster, folder: Path) -> dict[str, str]:
    """Install the chart without its Deployment, and return the environment of an operator with its service account."""
    # The cluster may have the CRD already, from a test or from another release.
    options = ("--namespace", SYSTEM, "--create-namespace", "--take-ownership", "--set", "replicas=0")
    programs.run_helm(cluster.kubeconfig, "install", RELEASE, str(ROOT / "charts/concertina"), *options)
    account = f"{RELEASE}-concertina"
    kubeconfig = yaml.safe_load(cluster.kubeconfig.read_text())
    token = cluster.kubectl("create", "token", account, "-n", SYSTEM, "--duration=24h").strip()
    (user,) = kubeconfig["users"]
    user["user"] = {"token": token}
    (folder / "kubeconfig").write_text(yaml.safe_dump(kubeconfig))
    return {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": os.environ.get("PYTHONPATH", ""),  # the operator of this checkout, whatever is installed
        "HOME": "/",  # Container runtimes set it for such a user.
        "KUBECONFIG": str(folder / "kubeconfig"),
        "CONCERTINA_NAMESPACE": SYSTEM,
        "CONCERTINA_LEASE": f"{account}-operator",
        "CONCERTINA_MASTER_KEY_SECRET": f"{account}-master-key",
        "CONCERTINA_MASTER_KEY_CREATE": "true",
        "CONCERTINA_IMAGE_AGENT": "concertina/agent:test",
        "POD_NAME": "operator-of-the-tests",
    }


class Operator:
    """Processes of the operator, one after the other, with the same identity, like a container that is restarted."""

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        self.folder, self.environment = folder, environment
        self.process: subprocess.Popen[bytes] | None = None
        self.log = folder / "operator.log"

    def start(self, wait: bool = True, **environment: str) -> None:
        begun = len(self.lines("started"))
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [*NAMELESS, sys.executable, "-m", "concertina.controller.operator"],
                env={**self.environment, **environment},
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=linux_namespaces.die_with_parent,  # a run of the tests that is killed leaves none behind
            )
        if wait:
            until(lambda: len(self.lines("started")) > begun, "an operator that works", self.text)

    def end(self, number: int = signal.SIGKILL) -> int:
        """End the process, and return its exit code."""
        assert self.process is not None
        self.process.send_signal(number)
        return self.process.wait(timeout=GIVE_UP)

    def text(self) -> str:
        return self.log.read_text() if self.log.exists() else ""

    def lines(self, event: str, job: str = "") -> list[Object]:
        """Return the log lines of decisions with this name, of one job (namespace/name) if one is given."""
        # The last line may be half written.
        lines = (json.loads(line) for line in self.text().split("\n")[:-1] if line.startswith("{"))
        return [line for line in lines if line["event"] == event and job in ("", line.get("job"))]


class Jobs:
    """TrainingJobs of one namespace."""

    def __init__(self, cluster: LocalCluster, namespace: str) -> None:
        self.cluster, self.namespace = cluster, namespace
        self.path = JOBS.format(namespace)

    def create(
        self,
        name: str,
        script: str = "",
        replicas: int = 1,
        pod: Object | None = None,
        labels: Mapping[str, str] | None = None,
        **spec: Any,
    ) -> Object:
        """Create a job whose workers run a Python script; `pod` is merged into the template's spec."""
        container: Object = {"name": "trainer", "image": "concertina/trainer:test"}
        if script:
            container["command"] = ["python3", "-uc", script]
        template = {"spec": {"terminationGracePeriodSeconds": 1, "containers": [container], **(pod or {})}}
        body = {
            "apiVersion": "concertina.dev/v1beta1",
            "kind": "TrainingJob",
            "metadata": {"name": name, **({"labels": dict(labels)} if labels else {})},
            "spec": {"replicas": replicas, "template": template, **spec},
        }
        return self.cluster.api.call("POST", self.path, body)

    def get(self, name: str) -> Object:
        return self.cluster.api.call("GET", f"{self.path}/{name}")

    def wait(self, name: str, condition: Callable[[Object], Any]) -> Object:
        """Return the job as soon as the condition holds for it."""

        def look() -> Object | None:
            job = self.get(name)
            return job if condition(job) else None

        # Each look takes processor time of the API server's that the job lacks.
        return until(look, f"what the test waits for of job {name}", lambda: self.describe(name), pause=0.25)

    def wait_reason(self, name: str, *reasons: str) -> Object:
        """Wait until Ready has one of these reasons. The reason is the word in the column Status."""
        return self.wait(name, lambda job: self.condition(job, "Ready").get("reason") in reasons)

    def wait_true(self, name: str, kind: str) -> Object:
        return self.wait(name, lambda job: self.condition(job, kind).get("status") == "True")

    def wait_training(self, name: str, replicas: int, past: int = 0) -> Object:
        """Wait until this number of replicas train in a round higher than `past`."""

        def trains(job: Object) -> bool:
            world = job.get("status", {}).get("world", {})
            ready = self.condition(job, "Ready").get("reason") == "Training"
            return ready and len(world.get("members", ())) == replicas and world["round"] > past

        return self.wait(name, trains)

    def wait_gone(self, what: str, *selector: str) -> None:
        """Wait until objects are deleted, given as kind/name, or as kinds and a selector.

        The garbage collector deletes the objects that a deleted job owned. It learns of a new kind within 30 s, and
        doubles its delay for an object whose owner's kind it does not know: in a new cluster this took up to 40 s.
        """
        arguments = ("wait", what, *selector, "-n", self.namespace, "--for=delete", "--timeout=180s")
        self.cluster.kubectl(*arguments, timeout=200)

    def kill_pod(self, name: str) -> None:
        """Kill a pod's processes at once. The pod ends with them."""
        path = f"/api/v1/namespaces/{self.namespace}/pods/{name}"
        self.cluster.api.call("DELETE", path, {"gracePeriodSeconds": 0})

    def kill_worker(self, name: str, replica: str) -> None:
        """Send SIGKILL to the newest worker of a replica."""
        os.kill(self.worker(name, replica), signal.SIGKILL)

    def worker(self, name: str, replica: str) -> int:
        """Return the pid, on this machine, of the newest worker of a replica, according to its agent's log."""
        started = [line for line in self.logs(replica).splitlines() if '"event":"worker_started"' in line]
        return self.process(name, replica, json.loads(started[-1])["pid"])

    def process(self, name: str, replica: str, pid: int = 1) -> int:
        """Return the pid, on this machine, of a process of a replica's container; by default that of the agent.

        Raises:
            LookupError: If there is no such process.
        """
        wanted = {f"CONCERTINA_JOB={self.namespace}/{name}".encode(), f"CONCERTINA_REPLICA={replica}".encode()}
        for process in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):  # gone
                inside = re.search(r"NSpid:.*\s(\d+)\n", (process / "status").read_text())
                if wanted <= set((process / "environ").read_bytes().split(b"\0")) and inside and int(inside[1]) == pid:
                    return int(process.name)
        raise LookupError(f"no process {pid} of {replica}")

    def patch(self, name: str, spec: Object) -> None:
        self.cluster.kubectl(
            "patch", "tj", name, "-n", self.namespace, "--type=merge", "-p", json.dumps({"spec": spec})
        )

    def delete(self, name: str) -> None:
        self.cluster.api.call("DELETE", f"{self.path}/{name}", {"propagationPolicy": "Background"})

    def gone(self, name: str) -> bool:
        return not self.cluster.api.exists(f"{self.path}/{name}")

    @staticmethod
    def condition(job: Object, kind: str) -> Object:
        return e2e.condition(job.get("status", {}), kind)

    @staticmethod
    def members(job: Object, field: str = "replica") -> list[str]:
        """Return one field of each member, coordinator first."""
        members = JobStatus.model_validate(job["status"]).world.members
        return [getattr(member, field) for member in members]

    def pods(self, name: str) -> list[Object]:
        pods = self.cluster.api.call("GET", f"/api/v1/namespaces/{self.namespace}/pods")["items"]
        owned = (pod for pod in pods if pod["metadata"].get("labels", {}).get("concertina.dev/job") == name)
        return sorted(owned, key=lambda pod: pod["metadata"]["name"])

    def describe(self, name: str) -> str:
        """Return a description of a job for the message of a test that fails."""
        pods = [f"{pod['metadata']['name']}: {pod['status'].get('phase')}" for pod in self.pods(name)]
        return json.dumps([self.get(name).get("status"), pods], indent=1)

    def events(self, name: str | None, reason: str) -> list[Object]:
        """Return the events with this reason, of one job if it is named, as soon as there is one.

        Events are written after the status that they describe.
        """

        def found() -> list[Object]:
            events = self.cluster.api.call("GET", f"/api/v1/namespaces/{self.namespace}/events")["items"]
            named = (event for event in events if name in (None, event["involvedObject"]["name"]))
            return [event for event in named if event["reason"] == reason]

        return until(found, f"an event {reason} of {name or 'any job'}")

    def logs(self, pod: str) -> str:
        return self.cluster.kubectl("logs", "-n", self.namespace, pod, "-c", "trainer")
