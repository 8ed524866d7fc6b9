"""A cluster with real kubelets, as a platform team has it: releases of concertina, teams with queues, and jobs."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from builders.cluster import e2e
from builders.cluster.drills import TRAINER
from builders.cluster.queued import PRIORITY_LABEL, QUEUE_LABEL
from builders.cluster.queues import KUEUE, Client, cluster_queue, local_queue, priority_class, resource_flavor
from builders.programs import FAULTS
from builders.until import until
from concertina.local.binaries import programs
from concertina.local.control_plane.api import ControlPlaneError

Object = dict[str, Any]
SYSTEM = "concertina-system"
OPERATOR_PODS = f"/api/v1/namespaces/{SYSTEM}/pods?labelSelector=app.kubernetes.io/name=concertina-operator"
GPU = "nvidia.com/gpu"
QUOTAS = {"red": 3, "blue": 1}
"""GPUs of each team, by its namespace. The teams lend to each other."""
FLAVOR, COHORT, HIGH = "gpu-nodes", "first-day", "high"
ABUNDANT = {"cpu": "1000", "memory": "1000Gi"}
"""Quota of the resources that are not scarce. They need one, because Kueue refuses a pod that requests a resource
without quota."""
PACE = "0.1"
"""Additional seconds of each step, because the jobs of a day share the processors of one machine."""
GIVE_UP = 240.0
MADE_BY_KUBERNETES = {"events", "events.events.k8s.io", "componentstatuses"}


@dataclass(frozen=True)
class Release:
    """Checkout with a chart, and the tag of the images that are made of it."""

    checkout: Path
    tag: str

    def manifests(self) -> str:
        images = (f"image.repository={e2e.IMAGE}", f"agentImage.repository={e2e.AGENT_IMAGE}")
        tags = (f"image.tag={self.tag}", f"agentImage.tag={self.tag}")
        options = [*(f"--set={each}" for each in images), *(f"--set-string={each}" for each in tags)]
        command = [
            str(programs.helm(lambda _: None)),
            "template",
            "concertina",
            str(self.checkout / "charts/concertina"),
        ]
        command += ["--namespace", SYSTEM, "--include-crds", *options]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


class Platform:
    """The cluster of a kubeconfig, and a folder that this machine and all nodes see."""

    def __init__(self, kubeconfig: Path, shared: Path) -> None:
        self.kubeconfig, self.shared = kubeconfig, shared
        self.client = Client.of_token(kubeconfig)
        self._kubectl = str(programs.control_plane(lambda _: None)["kubectl"])

    def kubectl(self, *arguments: str, stdin: str | None = None) -> str:
        command = [self._kubectl, f"--kubeconfig={self.kubeconfig}", *arguments]
        done = subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=GIVE_UP, check=False)
        assert done.returncode == 0, f"kubectl {' '.join(arguments)}: {done.stderr.strip()}"
        return done.stdout

    def create_namespaces(self) -> None:
        """Create the namespaces of the operator and of the teams, and wait for their service accounts."""
        for name in (SYSTEM, *QUOTAS):
            self.client.call("POST", "/api/v1/namespaces", {"metadata": {"name": name}})
        accounts = [f"/api/v1/namespaces/{name}/serviceaccounts/default" for name in (SYSTEM, *QUOTAS)]
        until(lambda: all(map(self.exists, accounts)), "the service accounts")

    def exists(self, path: str) -> bool:
        """Return whether there is such an object.

        Raises:
            ControlPlaneError: When the API server refuses the request for another reason.
        """
        try:
            self.client.call("GET", path)
        except ControlPlaneError as error:
            if error.status != 404:
                raise
            return False
        return True

    def inventory(self) -> set[str]:
        """Return resource/namespace/name of all objects, except those that only describe other objects."""
        listed = set(self.kubectl("api-resources", "--verbs=list", "-o", "name").split()) - MADE_BY_KUBERNETES
        line = '{range .items[*]}{.kind}/{.metadata.namespace}/{.metadata.name}{"\\n"}{end}'
        return set(self.kubectl("get", ",".join(sorted(listed)), "-A", "-o", f"jsonpath={line}").splitlines())

    def install(self, release: Release) -> None:
        """Apply the release on the server's side, also over an earlier one, and wait until its operator starts."""
        self.kubectl("apply", "--server-side", "-f", "-", stdin=release.manifests())
        self.kubectl("rollout", "status", "deployment/concertina", "-n", SYSTEM, "--timeout=200s")

    def uninstall(self, release: Release) -> None:
        """Follow the section Uninstall of docs/install.md."""
        self.kubectl("delete", "tj", "--all", "-A")
        until(self._without_pods, "no pod of a team", limit=GIVE_UP)
        until(lambda: not self.workloads(), "no Workload", limit=GIVE_UP)
        self.kubectl("delete", "-f", "-", stdin=release.manifests())
        self.kubectl("delete", "namespace", SYSTEM)

    def _without_pods(self) -> bool:
        return not any(self.items(f"/api/v1/namespaces/{team}/pods") for team in QUOTAS)

    def create_queues(self) -> None:
        self.client.call("POST", f"{KUEUE}/resourceflavors", resource_flavor(FLAVOR))
        self.client.call("POST", f"{KUEUE}/workloadpriorityclasses", priority_class(HIGH, 1000))
        for team, gpus in QUOTAS.items():
            quotas = {**ABUNDANT, GPU: str(gpus)}
            resources = [{"name": resource, "nominalQuota": amount} for resource, amount in quotas.items()]
            flavors = [{"name": FLAVOR, "resources": resources}]
            groups = [{"coveredResources": list(quotas), "flavors": flavors}]
            queue = cluster_queue(team, FLAVOR, 0, cohortName=COHORT, resourceGroups=groups)
            self.client.call("POST", f"{KUEUE}/clusterqueues", queue)
            self.client.call("POST", f"{KUEUE}/namespaces/{team}/localqueues", local_queue(team, "gpus", team))

    def remove_kueue(self) -> None:
        """Delete all queues, and then the CRDs of Kueue."""
        for team in QUOTAS:
            self.kubectl("delete", "localqueue", "--all", "-n", team)
        self.kubectl("delete", "clusterqueue,resourceflavor,workloadpriorityclass", "--all")
        names = self.kubectl("get", "crd", "-o", "name").split()
        self.kubectl("delete", *(name for name in names if name.endswith("kueue.x-k8s.io")))

    def items(self, path: str) -> list[Object]:
        items: list[Object] = self.client.call("GET", path)["items"]
        return items

    def create(
        self, team: str, name: str, replicas: int = 1, queue: str = "gpus", priority: str = "", **spec: Any
    ) -> None:
        """Create a job of the bundled trainer, with a checkpoint in the shared folder and one GPU for each replica.

        Args:
            queue: "" for a job without a queue and without GPUs.
        """
        limits = {"memory": "1536Mi", **({GPU: "1"} if queue else {})}
        resources = {"requests": {"cpu": "50m", "memory": "256Mi"}, "limits": limits}
        container = e2e.trainer(resources=resources)
        path = {"name": "PYTHONPATH", "value": f"{FAULTS}:{e2e.SITE}"}
        container["env"] = [{"name": "PACE", "value": PACE}, path]
        template = e2e.pod(container)
        for folder, read_only in ((self.shared, False), (FAULTS, True)):
            volume = {"name": folder.name.replace("_", "-"), "hostPath": {"path": str(folder), "type": "Directory"}}
            template["volumes"].append(volume)
            mount = {"name": volume["name"], "mountPath": str(folder), "readOnly": read_only}
            container.setdefault("volumeMounts", []).append(mount)
        trainer = {**TRAINER, "data": {"uri": str(self.shared / "data")}, **spec.pop("trainer", {})}
        labels = {label: value for label, value in ((QUEUE_LABEL, queue), (PRIORITY_LABEL, priority)) if value}
        checkpoint = {"uri": f"file://{self.shared}/{team}-{name}-{os.getpid()}", "everySeconds": 30}
        job = {
            "apiVersion": "concertina.dev/v1beta1",
            "kind": "TrainingJob",
            "metadata": {"name": name, "labels": labels},
            "spec": {
                "replicas": replicas,
                "template": {"spec": template},
                "trainer": trainer,
                "checkpoint": checkpoint,
                **spec,
            },
        }
        self.client.call("POST", self.jobs(team), job)

    def jobs(self, team: str) -> str:
        return f"/apis/concertina.dev/v1beta1/namespaces/{team}/trainingjobs"

    def status(self, team: str, name: str) -> Object:
        return dict(self.client.call("GET", f"{self.jobs(team)}/{name}").get("status", {}))

    def pods(self, team: str, name: str) -> list[Object]:
        return self.items(f"/api/v1/namespaces/{team}/pods?labelSelector=concertina.dev/job={name}")

    def workloads(self) -> list[Object]:
        return self.items(f"{KUEUE}/workloads")

    def until(self, team: str, name: str, what: str, look: Callable[[Object], Any]) -> Object:
        """Return the job's status as soon as `look` accepts it."""

        def right() -> Object:
            status = self.status(team, name)
            return status if look(status) else {}

        return until(right, f"{what} of {name}", lambda: self._describe(team, name), GIVE_UP, pause=0.1)

    def _describe(self, team: str, name: str) -> str:
        pods = [(pod["metadata"]["name"], pod["status"].get("phase")) for pod in self.pods(team, name)]
        return yaml.safe_dump([self.status(team, name), pods, self.workloads()])

    def trains(self, team: str, name: str, replicas: int, past: int = 0) -> Object:
        """Return the status once this number of replicas have done a step in a round after `past`."""

        def in_round(status: Object) -> bool:
            world = status.get("world", {})
            right = world.get("replicas") == replicas and world.get("round", 0) > past
            return right and e2e.reason(status) == "Training"

        step = self.until(team, name, f"a world of {replicas}", in_round).get("progress", {}).get("step", 0)
        return self.until(team, name, "a step", lambda status: status.get("progress", {}).get("step", 0) > step)

    def delete(self, team: str, name: str) -> None:
        self.client.call("DELETE", f"{self.jobs(team)}/{name}")

    def kill_operator(self) -> None:
        """Delete the operator's pods without grace; its Deployment creates another one."""
        for pod in self.items(OPERATOR_PODS):
            path = f"/api/v1/namespaces/{SYSTEM}/pods/{pod['metadata']['name']}"
            self.client.call("DELETE", path, {"gracePeriodSeconds": 0})
