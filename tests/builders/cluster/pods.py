"""Pods in one namespace, for tests: created from a Python script, waited for, and inspected."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from builders.until import until
from concertina.local.cluster import LocalCluster

Object = dict[str, Any]
IMAGE = "concertina/trainer:test"


@dataclass(frozen=True)
class Pods:
    """Pods of one namespace."""

    cluster: LocalCluster
    namespace: str

    @property
    def path(self) -> str:
        return f"/api/v1/namespaces/{self.namespace}/pods"

    def create(self, name: str, script: str, container: Object | None = None, **spec: Any) -> None:
        """Create a pod whose container "main" runs a Python script; container and spec are merged over the defaults."""
        main = {"name": "main", "image": IMAGE, "command": ["python3", "-u", "-c", script]} | (container or {})
        body = {"restartPolicy": "Never", "terminationGracePeriodSeconds": 1, "containers": [main]} | spec
        self.cluster.api.call("POST", self.path, {"metadata": {"name": name, "labels": {"app": name}}, "spec": body})

    def get(self, name: str) -> Object:
        pod: Object = self.cluster.api.call("GET", f"{self.path}/{name}")
        return pod

    def delete(self, name: str, **options: Any) -> None:
        self.cluster.api.call("DELETE", f"{self.path}/{name}", options)

    def wait(self, name: str, condition: Callable[[Object], Any], timeout: float = 60) -> Object:
        """Return the pod as soon as the condition holds for it."""

        def look() -> Object:
            pod = self.get(name)
            return pod if condition(pod) else {}

        return until(look, f"what the test waits for of pod {name}", lambda: self.describe(name), timeout)

    def describe(self, name: str) -> str:
        return json.dumps(self.get(name)["status"], indent=1)

    def wait_phase(self, name: str, *phases: str, timeout: float = 60) -> Object:
        return self.wait(name, lambda pod: pod["status"]["phase"] in phases, timeout)

    def wait_gone(self, name: str, timeout: float = 60) -> None:
        def gone() -> bool:
            return not self.cluster.api.exists(f"{self.path}/{name}")

        until(gone, f"the end of pod {name}", lambda: self.describe(name), timeout)

    def run(self, name: str, script: str, container: Object | None = None, **spec: Any) -> str:
        """Run a pod to its successful end, and return its output."""
        self.create(name, script, container, **spec)
        pod = self.wait_phase(name, "Succeeded", "Failed")
        output = self.logs(name)
        assert pod["status"]["phase"] == "Succeeded", output + json.dumps(pod["status"], indent=1)
        return output

    def logs(self, name: str, *arguments: str) -> str:
        return self.cluster.kubectl("logs", "-n", self.namespace, name, *arguments)

    def put(self, kind: str, name: str, data: dict[str, str]) -> None:
        """Create a ConfigMap ("configmaps") or Secret ("secrets", with data that are not encoded)."""
        field = "stringData" if kind == "secrets" else "data"
        path = f"/api/v1/namespaces/{self.namespace}/{kind}"
        self.cluster.api.call("POST", path, {"metadata": {"name": name}, field: data})


def state(pod: Object, kind: str = "containerStatuses", index: int = 0) -> Object:
    """Return the state of a container: waiting, running or terminated."""
    container_state: Object = pod["status"][kind][index]["state"]
    return container_state


def status_of(pod: Object) -> Object:
    """Return the status of the first container, or an empty one while there is none."""
    container_status: Object = (pod["status"].get("containerStatuses") or [{}])[0]
    return container_status


def condition(pod: Object, kind: str) -> str | None:
    """Return the status of a pod condition."""
    return next((each["status"] for each in pod["status"].get("conditions", []) if each["type"] == kind), None)
