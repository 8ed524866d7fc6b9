"""Names, manifests and kubectl for the end-to-end tests, which run on an existing cluster."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from builders.cluster import drills
from builders.cluster.drills import JOB
from builders.until import until
from concertina.drill.faults.by_command import PREFIX
from concertina.local.binaries import programs

Object = dict[str, Any]
ROOT = Path(__file__).resolve().parents[3]
GIVE_UP = 240.0
CLUSTER_WIDE = ("ClusterRole", "ClusterRoleBinding", "CustomResourceDefinition", "Namespace")


def setting(name: str, default: str = "") -> str:
    return os.environ.get(f"CONCERTINA_E2E_{name}", default)


NAMESPACE = setting("NAMESPACE", "concertina-e2e")
IMAGE, TAG = setting("IMAGE", "concertina/operator"), setting("TAG", "0.1.0")
"""The operator's. Where the next ones are not set, it holds agent and trainer too: see tools/image-rootfs.sh."""
AGENT_IMAGE, TRAINER_IMAGE = setting("AGENT_IMAGE", IMAGE), setting("TRAINER_IMAGE", f"{IMAGE}:{TAG}")
MORE_IMAGES = ("SCRIPT_IMAGE", "NO_PYTHON_IMAGE", "BARE_PYTHON_IMAGE")
"""Variables that name other images; tests whose image is missing are skipped."""
SITE_PACKAGES, SITE = setting("SITE_PACKAGES"), "/site"
"""Folder of the nodes that contains torch, for a trainer image without torch, and its path in pods."""
BUCKET = setting("BUCKET", "e2e")
DATA = f"s3://{BUCKET}/data"
RUN = os.getpid()
"""Name that distinguishes the checkpoints of one run of the tests from those of another."""
STORAGE = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_REGION", "AWS_ENDPOINT_URL", "AWS_ALLOW_HTTP")


def chart(*more: str) -> list[Object]:
    """Return the chart's objects for an operator in the tests' namespace that serves only that namespace.

    `more` contains values, as NAME=VALUE.
    """
    images = (f"image.repository={IMAGE}", f"agentImage.repository={AGENT_IMAGE}")
    settings = [f"watchNamespaces={{{NAMESPACE}}}", *images, *more]
    texts = [f"image.tag={TAG}", f"agentImage.tag={TAG}"]
    options = [*(f"--set={each}" for each in settings), *(f"--set-string={each}" for each in texts)]
    command = [str(programs.helm(lambda _: None)), "template", "concertina", str(ROOT / "charts/concertina")]
    done = subprocess.run([*command, "--namespace", NAMESPACE, *options], capture_output=True, text=True, check=True)
    return [each for each in yaml.safe_load_all(done.stdout) if each]


def prerequisites() -> str:
    """Return the YAML that an administrator applies once: CRD, namespace, and the permission to read nodes."""
    wide = [each for each in chart() if each["kind"] in CLUSTER_WIDE]
    namespace = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}}
    return yaml.safe_dump_all([namespace, *wide])


def trainer(**fields: Any) -> Object:
    """Return a container `trainer` that can run torch, whether its image contains torch or not."""
    container: Object = {"name": "trainer", "image": TRAINER_IMAGE, **fields}
    if SITE_PACKAGES:
        container["env"] = [*fields.get("env", ()), {"name": "PYTHONPATH", "value": SITE}]
        container["volumeMounts"] = [{"name": "site", "mountPath": SITE, "readOnly": True}]
    return container


def pod(container: Object, **fields: Any) -> Object:
    """Return the template's pod with that container."""
    volumes = [{"name": "site", "hostPath": {"path": SITE_PACKAGES, "type": "Directory"}}] if SITE_PACKAGES else []
    return {"containers": [container], "volumes": volumes, "terminationGracePeriodSeconds": 20, **fields}


def job() -> Object:
    """Return the job that the tests of the session share, with one replica on each node."""
    spread = {
        "maxSkew": 1,
        "topologyKey": "kubernetes.io/hostname",
        "whenUnsatisfiable": "DoNotSchedule",
        "labelSelector": {"matchLabels": {"e2e": JOB}},
    }
    resources = {"requests": {"cpu": "100m", "memory": "512Mi"}, "limits": {"memory": "1536Mi"}}
    template = {
        "metadata": {"labels": {"e2e": JOB}},
        "spec": pod(trainer(resources=resources), topologySpreadConstraints=[spread]),
    }
    checkpoint = {"uri": f"s3://{BUCKET}/{JOB}-{RUN}", "everySeconds": 5}
    return drills.manifest(template, DATA, checkpoint)


def own_job(name: str, template: Object, **spec: Any) -> Object:
    """Return a job of two replicas for a single test."""
    return {
        "apiVersion": "concertina.dev/v1beta1",
        "kind": "TrainingJob",
        "metadata": {"name": name},
        "spec": {"replicas": 2, "template": {"spec": template}, **spec},
    }


def bundled_job(name: str, template: Object, **trainer: Any) -> Object:
    """Return a job of the bundled trainer with checkpoints.

    Without a limit in `trainer` it trains until it is deleted.
    """
    checkpoint = {"uri": f"s3://{BUCKET}/{name}-{RUN}", "secretName": "s3", "everySeconds": 5}
    configuration = {**drills.TRAINER, "data": {"uri": DATA}, **trainer}
    return own_job(name, template, trainer=configuration, checkpoint=checkpoint)


def run_concertina(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the real command, on a terminal that is wide enough for its tables."""
    command = [sys.executable, "-m", "concertina.cli", *arguments]
    environment = os.environ | {"COLUMNS": "200"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)


def concertina(*arguments: str) -> str:
    """Return what the real command prints; fail with its error message."""
    done = run_concertina(*arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def on_node(node: str, *words: str) -> str:
    """Return the output of a command that runs as root in the network of a node."""
    run = setting("NODE_RUN")
    if not run:
        pytest.skip('set CONCERTINA_E2E_NODE_RUN="... {node}" to what runs a command in the network of a node')
    command = [*shlex.split(run.replace("{node}", node)), *words]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout


PROCESS_1 = """
import os, sys
wanted = f"CONCERTINA_REPLICA={sys.argv[1]}".encode()
def process_1():
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            inside = next(line for line in open(f"/proc/{pid}/status") if line.startswith("NSpid:")).split()[-1]
            if inside == "1" and wanted in open(f"/proc/{pid}/environ", "rb").read().split(b"\\0"):
                return int(pid)
        except OSError:
            pass
    sys.exit(f"there is no {sys.argv[1]} here")
"""
"""Beginning of a program for `on_node`: `process_1()` is the pid of a replica's process 1 on the node."""

OPERATOR = """
import os, subprocess, sys
action, pod = sys.argv[1:]
def first(pid):
    lines = open(f"/proc/{pid}/status").read().splitlines()
    return [line.split()[-1] for line in lines if line.startswith("NSpid:")] == ["1"]
def is_operator(pid):
    try:
        return f"POD_NAME={pod}".encode() in open(f"/proc/{pid}/environ", "rb").read().split(b"\\0") and first(pid)
    except OSError:
        return False
pid = next(filter(is_operator, filter(str.isdigit, os.listdir("/proc"))))
if action in ("STOP", "CONT"):
    sys.exit(subprocess.run(["kill", f"-{action}", pid]).returncode)
for chain, port in (("OUTPUT", "--dport"), ("INPUT", "--sport")):
    rule = ["iptables", "-w", action, chain, "-p", "tcp", port, "29400", "-j", "DROP"]
    subprocess.run(["nsenter", "-t", pid, "-n", *rule], check=True)
"""
"""Program for the operator's node. It sends a signal to the operator, or adds (-I) or removes (-D) a filter in its
pod's network for all traffic with agents."""
ACTIONS = {"OPERATOR_STOP": "STOP", "OPERATOR_CONTINUE": "CONT", "OPERATOR_CUT": "-I", "OPERATOR_REJOIN": "-D"}


def operator_commands() -> dict[str, str]:
    """Return the variables with which drills reach the operator; none without access to nodes."""
    run = setting("NODE_RUN").replace("{node}", "{operator_node}")
    program = f"{run} python3 -c {shlex.quote(OPERATOR)}"
    return {PREFIX + name: f"{program} {action} {{operator}}" for name, action in ACTIONS.items()} if run else {}


@dataclass
class Cluster:
    """Cluster of a kubeconfig, in the tests' namespace."""

    kubeconfig: str
    kubectl_path: str = field(default_factory=lambda: str(programs.control_plane(lambda _: None)["kubectl"]))

    def kubectl(self, *arguments: str, stdin: str | None = None, check: bool = True) -> str:
        command = [self.kubectl_path, f"--kubeconfig={self.kubeconfig}", "-n", NAMESPACE, *arguments]
        done = subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=200, check=False)
        assert done.returncode == 0 or not check, f"kubectl {' '.join(arguments)}: {done.stderr.strip()}"
        return done.stdout if done.returncode == 0 else ""

    def job(self, name: str = JOB) -> Object:
        job: Object = json.loads(self.kubectl("get", "tj", name, "-o", "json"))
        return job

    def status(self, name: str = JOB) -> Object:
        return dict(self.job(name).get("status", {}))

    def pods(self, name: str = JOB) -> list[Object]:
        pods: list[Object] = json.loads(self.kubectl("get", "pods", "-l", f"concertina.dev/job={name}", "-o", "json"))[
            "items"
        ]
        return pods

    def operator_nodes(self) -> list[str]:
        """Return the nodes of the operator's pods, which a test should not disturb."""
        path = "-o=jsonpath={.items[*].spec.nodeName}"
        return self.kubectl("get", "pods", "-l", "app.kubernetes.io/name=concertina-operator", path).split()

    def operator_pod(self) -> tuple[str, str]:
        """Return the name and the node of the operator's pod."""
        path = "-o=jsonpath={.items[0].metadata.name} {.items[0].spec.nodeName}"
        name, node = self.kubectl("get", "pods", "-l", "app.kubernetes.io/name=concertina-operator", path).split()
        return name, node

    def until(self, what: str, look: Callable[[Object], Any], name: str = JOB) -> Object:
        """Return the job's status as soon as `look` accepts it."""

        def right() -> Object:
            status = self.status(name)
            return status if look(status) else {}

        return until(right, what, lambda: json.dumps(self.status(name), indent=1), GIVE_UP, pause=0.3)

    def training(self, replicas: int, above: int = -1, name: str = JOB) -> Object:
        """Return the status once this number of replicas train in a round above the given one."""

        def right(status: Object) -> bool:
            world = status.get("world", {})
            return reason(status) == "Training" and world["replicas"] == replicas and world["round"] > above

        return self.until(f"a world of {replicas} above round {above}", right, name)

    def event(self, name: str, reason: str) -> str:
        """Return the message of a job's first event with that reason, as soon as there is one."""
        of_it = f"involvedObject.name={name},reason={reason}"

        def look(_: Object) -> list[Object]:
            events: list[Object] = json.loads(self.kubectl("get", "events", "--field-selector", of_it, "-o", "json"))[
                "items"
            ]
            return events

        self.until(f"an event {reason}", look, name)
        return str(look({})[0]["message"])

    def log(self, replica: str) -> str:
        return self.kubectl("logs", replica, "-c", "trainer")

    def apply(self, *objects: Object) -> None:
        self.kubectl("apply", "-f", "-", stdin=yaml.safe_dump_all(objects))

    @contextmanager
    def running(self, *jobs: Object) -> Iterator[None]:
        """Create the jobs, and delete them with their pods after the block."""
        self.apply(*jobs)
        try:
            yield
        finally:
            names = [job["metadata"]["name"] for job in jobs]
            self.kubectl("delete", "tj", *names, "--ignore-not-found", "--timeout=60s", check=False)
            # The object is gone at once, because it has no finalizer. Its pods drain and save for some seconds more.
            for name in names:
                pods = ("pods", "-l", f"concertina.dev/job={name}")
                self.kubectl("wait", "--for=delete", *pods, "--timeout=60s", check=False)


def condition(status: Object, kind: str) -> Object:
    """Return the condition of that type, or one that is False when it was never true."""
    conditions = status.get("conditions", ())
    return next((condition for condition in conditions if condition["type"] == kind), {"status": "False"})


def reason(status: Object) -> str:
    """Return the word in the column Status."""
    return str(condition(status, "Ready").get("reason", ""))


if __name__ == "__main__":
    sys.stdout.write(prerequisites())
