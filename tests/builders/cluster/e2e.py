"""What the end-to-end tests need of a cluster that is not ours: names, manifests, kubectl."""

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
"""Settings that name other images; what lacks one is skipped."""
SITE_PACKAGES, SITE = setting("SITE_PACKAGES"), "/site"
"""A folder of the nodes with torch in it, for a trainer image without, and where pods have it."""
BUCKET = setting("BUCKET", "e2e")
DATA = f"s3://{BUCKET}/data"
RUN = os.getpid()
"""Tells the checkpoints of one run of the tests from those of another."""
STORAGE = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_REGION", "AWS_ENDPOINT_URL", "AWS_ALLOW_HTTP")


def chart(*more: str) -> list[Object]:
    """What the chart makes for an operator in, and of, the tests' namespace alone. `more`: values, as NAME=VALUE."""
    images = (f"image.repository={IMAGE}", f"agentImage.repository={AGENT_IMAGE}")
    settings = [f"watchNamespaces={{{NAMESPACE}}}", *images, *more]
    texts = [f"image.tag={TAG}", f"agentImage.tag={TAG}"]
    options = [*(f"--set={each}" for each in settings), *(f"--set-string={each}" for each in texts)]
    command = [str(programs.helm(lambda _: None)), "template", "concertina", str(ROOT / "charts/concertina")]
    done = subprocess.run([*command, "--namespace", NAMESPACE, *options], capture_output=True, text=True, check=True)
    return [each for each in yaml.safe_load_all(done.stdout) if each]


def prerequisites() -> str:
    """What an administrator applies once: CRD, namespace, and the right to read nodes, which has no namespace."""
    wide = [each for each in chart() if each["kind"] in CLUSTER_WIDE]
    namespace = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}}
    return yaml.safe_dump_all([namespace, *wide])


def trainer(**fields: Any) -> Object:
    """A container `trainer` that can run torch, whatever is in its image."""
    container: Object = {"name": "trainer", "image": TRAINER_IMAGE, **fields}
    if SITE_PACKAGES:
        container["env"] = [*fields.get("env", ()), {"name": "PYTHONPATH", "value": SITE}]
        container["volumeMounts"] = [{"name": "site", "mountPath": SITE, "readOnly": True}]
    return container


def pod(container: Object, **fields: Any) -> Object:
    """The template's pod with that container."""
    volumes = [{"name": "site", "hostPath": {"path": SITE_PACKAGES, "type": "Directory"}}] if SITE_PACKAGES else []
    return {"containers": [container], "volumes": volumes, "terminationGracePeriodSeconds": 20, **fields}


def job() -> Object:
    """The job that the session's tests share: one replica a node."""
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
    """A job of a test's own, of two replicas."""
    return {
        "apiVersion": "concertina.dev/v1beta1",
        "kind": "TrainingJob",
        "metadata": {"name": name},
        "spec": {"replicas": 2, "template": {"spec": template}, **spec},
    }


def bundled_job(name: str, template: Object, **trainer: Any) -> Object:
    """One of the bundled trainer, with checkpoints, that trains until it is deleted unless `trainer` says otherwise."""
    checkpoint = {"uri": f"s3://{BUCKET}/{name}-{RUN}", "secretName": "s3", "everySeconds": 5}
    configuration = {**drills.TRAINER, "data": {"uri": DATA}, **trainer}
    return own_job(name, template, trainer=configuration, checkpoint=checkpoint)


def run_concertina(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The real command, on a terminal that is wide enough for its tables."""
    command = [sys.executable, "-m", "concertina.cli", *arguments]
    environment = os.environ | {"COLUMNS": "200"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)


def concertina(*arguments: str) -> str:
    """What the real command prints; fails with what it complains about."""
    done = run_concertina(*arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def on_node(node: str, *words: str) -> str:
    """What a command prints that is run in the network of a node, as root there."""
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
"""The beginning of a program for `on_node`: `process_1()` of a replica's container, as the node numbers it."""

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
"""On the operator's node: a signal to it, or a filter in its pod's network (-I, -D) of all that agents say and hear."""
ACTIONS = {"OPERATOR_STOP": "STOP", "OPERATOR_CONTINUE": "CONT", "OPERATOR_CUT": "-I", "OPERATOR_REJOIN": "-D"}


def operator_commands() -> dict[str, str]:
    """For drills, in the variables that they read; without a way into nodes, none."""
    run = setting("NODE_RUN").replace("{node}", "{operator_node}")
    program = f"{run} python3 -c {shlex.quote(OPERATOR)}"
    return {PREFIX + name: f"{program} {action} {{operator}}" for name, action in ACTIONS.items()} if run else {}


@dataclass
class Cluster:
    """The cluster of a kubeconfig, as the tests' namespace is seen."""

    kubeconfig: str
    kubectl_path: str = field(default_factory=lambda: str(programs.control_plane(lambda _: None)["kubectl"]))

    def kubectl(self, *arguments: str, stdin: str | None = None, check: bool = True) -> str:
        command = [self.kubectl_path, f"--kubeconfig={self.kubeconfig}", "-n", NAMESPACE, *arguments]
        done = subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=200, check=False)
        assert done.returncode == 0 or not check, f"kubectl {' '.join(arguments)}: {done.stderr.strip()}"
        return done.stdout if done.returncode == 0 else ""

    def job(self, name: str = JOB) -> Object:
        found: Object = json.loads(self.kubectl("get", "tj", name, "-o", "json"))
        return found

    def status(self, name: str = JOB) -> Object:
        return dict(self.job(name).get("status", {}))

    def pods(self, name: str = JOB) -> list[Object]:
        found: list[Object] = json.loads(self.kubectl("get", "pods", "-l", f"concertina.dev/job={name}", "-o", "json"))[
            "items"
        ]
        return found

    def operator_nodes(self) -> list[str]:
        """Where pods of the operator are: a test had better hurt another node."""
        path = "-o=jsonpath={.items[*].spec.nodeName}"
        return self.kubectl("get", "pods", "-l", "app.kubernetes.io/name=concertina-operator", path).split()

    def operator_pod(self) -> tuple[str, str]:
        """Its name and its node."""
        path = "-o=jsonpath={.items[0].metadata.name} {.items[0].spec.nodeName}"
        name, node = self.kubectl("get", "pods", "-l", "app.kubernetes.io/name=concertina-operator", path).split()
        return name, node

    def until(self, what: str, look: Callable[[Object], Any], name: str = JOB) -> Object:
        """The job's status as soon as `look` finds it right."""

        def right() -> Object:
            status = self.status(name)
            return status if look(status) else {}

        return until(right, what, lambda: json.dumps(self.status(name), indent=1), GIVE_UP, pause=0.3)

    def training(self, replicas: int, above: int = -1, name: str = JOB) -> Object:
        """The status once so many replicas train in a round above that number."""

        def right(status: Object) -> bool:
            world = status.get("world", {})
            return reason(status) == "Training" and world["replicas"] == replicas and world["round"] > above

        return self.until(f"a world of {replicas} above round {above}", right, name)

    def event(self, name: str, reason: str) -> str:
        """The message of a job's first event with that reason, as soon as there is one."""
        of_it = f"involvedObject.name={name},reason={reason}"

        def look(_: Object) -> list[Object]:
            found: list[Object] = json.loads(self.kubectl("get", "events", "--field-selector", of_it, "-o", "json"))[
                "items"
            ]
            return found

        self.until(f"an event {reason}", look, name)
        return str(look({})[0]["message"])

    def log(self, replica: str) -> str:
        return self.kubectl("logs", replica, "-c", "trainer")

    def apply(self, *objects: Object) -> None:
        self.kubectl("apply", "-f", "-", stdin=yaml.safe_dump_all(objects))

    @contextmanager
    def running(self, *jobs: Object) -> Iterator[None]:
        """They are deleted afterwards, with their pods."""
        self.apply(*jobs)
        try:
            yield
        finally:
            names = [job["metadata"]["name"] for job in jobs]
            self.kubectl("delete", "tj", *names, "--ignore-not-found", "--timeout=60s", check=False)
            # The object goes at once, as it has no finalizer; its pods drain, and save, for some seconds more.
            for name in names:
                pods = ("pods", "-l", f"concertina.dev/job={name}")
                self.kubectl("wait", "--for=delete", *pods, "--timeout=60s", check=False)


def condition(status: Object, kind: str) -> Object:
    """Return the condition of that type, or one that is False when it was never true."""
    conditions = status.get("conditions", ())
    return next((condition for condition in conditions if condition["type"] == kind), {"status": "False"})


def reason(status: Object) -> str:
    """The word in the column Status."""
    return str(condition(status, "Ready").get("reason", ""))


if __name__ == "__main__":
    sys.stdout.write(prerequisites())
