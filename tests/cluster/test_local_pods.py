"""Pods on the nodes of the local cluster, seen through the API server."""

import json
import time
from collections.abc import Callable
from typing import Any

import pytest

from concertina.local.cluster import LocalCluster

Object = dict[str, Any]
IMAGE = "concertina/trainer:test"


class Pods:
    """Creates pods in one namespace and looks at them."""

    def __init__(self, cluster: LocalCluster, namespace: str) -> None:
        self.cluster, self.namespace = cluster, namespace
        self.path = f"/api/v1/namespaces/{namespace}/pods"

    def create(self, name: str, script: str, **spec: Any) -> None:
        """A pod that runs a Python script; spec is merged over, `container` over its container."""
        container = {"name": "main", "image": IMAGE, "command": ["python3", "-c", script]} | spec.pop("container", {})
        body = {"restartPolicy": "Never", "containers": [container]} | spec
        self.cluster.api.call("POST", self.path, {"metadata": {"name": name}, "spec": body})

    def get(self, name: str) -> Object:
        found: Object = self.cluster.api.call("GET", f"{self.path}/{name}")
        return found

    def wait(self, name: str, condition: Callable[[Object], Any], timeout: float = 60) -> Object:
        """The pod as soon as the condition holds for it."""
        deadline = time.monotonic() + timeout
        while True:
            pod = self.get(name)
            if condition(pod):
                return pod
            assert time.monotonic() < deadline, json.dumps(pod["status"], indent=1)
            time.sleep(0.02)

    def wait_phase(self, name: str, *phases: str) -> Object:
        return self.wait(name, lambda pod: pod["status"]["phase"] in phases)

    def logs(self, name: str, *arguments: str) -> str:
        return self.cluster.kubectl("logs", "-n", self.namespace, name, *arguments)


@pytest.fixture
def pods(cluster: LocalCluster, namespace: str) -> Pods:
    return Pods(cluster, namespace)


def terminated(pod: Object, index: int = 0) -> Object:
    found: Object = pod["status"]["containerStatuses"][index]["state"]["terminated"]
    return found


def test_a_pod_runs_to_its_end(pods: Pods) -> None:
    pods.create("a", "import os; print(os.environ['HOSTNAME'], os.getpid())")
    pod = pods.wait_phase("a", "Succeeded", "Failed")
    assert pod["status"]["phase"] == "Succeeded"
    assert terminated(pod)["exitCode"] == 0
    assert terminated(pod)["reason"] == "Completed"
    assert pods.logs("a") == "a 1\n"
