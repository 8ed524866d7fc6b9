"""Flavors, queues and priorities of Kueue for tests, and what Kueue counts as their usage."""

from __future__ import annotations

import http.client
import json
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from concertina.local.cluster import LocalCluster
from concertina.local.control_plane.api import ControlPlaneError

Object = dict[str, Any]
API_VERSION = "kueue.x-k8s.io/v1beta2"
KUEUE = f"/apis/{API_VERSION}"
CPU = "cpu"


def resource_flavor(
    name: str, labels: Mapping[str, str] | None = None, tolerations: Sequence[Mapping[str, str]] = ()
) -> Object:
    spec = {"nodeLabels": dict(labels or {}), "tolerations": [dict(toleration) for toleration in tolerations]}
    return {"apiVersion": API_VERSION, "kind": "ResourceFlavor", "metadata": {"name": name}, "spec": spec}


def cluster_queue(name: str, flavor: str, quota: object, memory: str = "", **spec: Any) -> Object:
    """ClusterQueue for all namespaces, with one flavor of cpu, and of memory where pods request some."""
    quotas = {CPU: str(quota), **({"memory": memory} if memory else {})}
    resources = [{"name": resource, "nominalQuota": amount} for resource, amount in quotas.items()]
    groups = [{"coveredResources": list(quotas), "flavors": [{"name": flavor, "resources": resources}]}]
    default: Object = {
        "namespaceSelector": {},
        "preemption": {"withinClusterQueue": "LowerPriority", "reclaimWithinCohort": "Any"},
        "resourceGroups": groups,
    }
    metadata = {"name": name}
    return {"apiVersion": API_VERSION, "kind": "ClusterQueue", "metadata": metadata, "spec": default | spec}


def local_queue(namespace: str, name: str, queue: str) -> Object:
    metadata = {"name": name, "namespace": namespace}
    return {"apiVersion": API_VERSION, "kind": "LocalQueue", "metadata": metadata, "spec": {"clusterQueue": queue}}


def priority_class(name: str, value: int) -> Object:
    return {"apiVersion": API_VERSION, "kind": "WorkloadPriorityClass", "metadata": {"name": name}, "value": value}


def workload(
    namespace: str,
    name: str,
    queue: str,
    count: int,
    priority: int = 0,
    cpu: str = "1",
    replaces: str = "",
    first: str = "",
    elastic: bool = True,
) -> Object:
    """Workload with one pod set.

    Args:
        replaces: Name of the Workload that this one, a slice, replaces.
        first: Name of the first slice.
    """
    annotations = {"kueue.x-k8s.io/elastic-job": "true"} if elastic else {}
    if replaces:
        annotations["kueue.x-k8s.io/workload-slice-replacement-for"] = f"{namespace}/{replaces}"
        annotations["kueue.x-k8s.io/workload-slice-name"] = first or replaces
    container = {"name": "trainer", "image": "none", "resources": {"requests": {CPU: cpu}}}
    template = {"spec": {"restartPolicy": "Never", "containers": [container]}}
    return {
        "apiVersion": API_VERSION,
        "kind": "Workload",
        "metadata": {
            "name": name,
            "namespace": namespace,
            "annotations": annotations,
            "finalizers": ["kueue.x-k8s.io/resource-in-use"],
        },
        "spec": {
            "queueName": queue,
            "priority": priority,
            "active": True,
            "podSets": [{"name": "main", "count": count, "template": template}],
        },
    }


def condition(item: Object, kind: str) -> Object:
    """Return the condition of that type, or one that is False."""
    conditions = item.get("status", {}).get("conditions") or ()
    return next((entry for entry in conditions if entry["type"] == kind), {"status": "False", "reason": ""})


def is_true(item: Object, kind: str) -> bool:
    return bool(condition(item, kind)["status"] == "True")


def evicted(item: Object) -> bool:
    """Return whether a Workload is to give its quota back."""
    return is_true(item, "Evicted")


def shrunk(item: Object, full: int) -> bool:
    """Return whether an evicted Workload has a lower count, and no slice has replaced it."""
    return evicted(item) and has_admission(item) and item["spec"]["podSets"][0]["count"] < full


def has_admission(item: Object) -> bool:
    return bool(item.get("status", {}).get("admission"))


def admitted_count(item: Object) -> int:
    """Return the number of pods that the Workload may have: of its spec and its admission, the smaller one."""
    assignments = {
        assignment["name"]: assignment["count"]
        for assignment in item.get("status", {}).get("admission", {}).get("podSetAssignments", ())
    }
    return sum(min(pod_set["count"], assignments.get(pod_set["name"], 0)) for pod_set in item["spec"]["podSets"])


class Client:
    """Requests as the cluster's administrator, with any method and content type, and watches."""

    def __init__(self, server: str, tls: ssl.SSLContext, token: str = "") -> None:
        self.address = server.removeprefix("https://")
        self.tls = tls
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}

    @classmethod
    def of_local(cls, cluster: LocalCluster) -> Client:
        pki = cluster.record.directory / "pki"
        tls = ssl.create_default_context(cafile=str(pki / "ca.crt"))
        tls.load_cert_chain(pki / "kubeconfig.crt", pki / "kubeconfig.key")
        return cls(cluster.record.endpoints.server, tls)

    @classmethod
    def of_token(cls, kubeconfig: Path) -> Client:
        """Read a kubeconfig whose only user has a token, and whose CA is a file."""
        read = yaml.safe_load(kubeconfig.read_text())
        cluster, user = read["clusters"][0]["cluster"], read["users"][0]["user"]
        tls = ssl.create_default_context(cafile=cluster["certificate-authority"])
        return cls(cluster["server"], tls, user["token"])

    def call(self, method: str, path: str, body: Object | None = None) -> Object:
        """Send one request. A PATCH is a merge patch.

        Raises:
            ControlPlaneError: When the API server refuses the request.
        """
        connection = self._connection()
        try:
            content = "application/merge-patch+json" if method == "PATCH" else "application/json"
            data = None if body is None else json.dumps(body)
            connection.request(method, path, data, {"Content-Type": content, **self._headers})
            response = connection.getresponse()
            text = response.read().decode()
        finally:
            connection.close()
        if response.status >= 300:
            raise ControlPlaneError(response.status, text)
        decoded: Object = json.loads(text)
        return decoded

    def _connection(self) -> http.client.HTTPSConnection:
        return http.client.HTTPSConnection(self.address, context=self.tls, timeout=30)

    @contextmanager
    def watching(self, path: str, event: Callable[[Object], None]) -> Iterator[None]:
        """Call `event` with each watch event, in a thread, until the block ends."""
        connection = self._connection()
        connection.timeout = None
        query = "&" if "?" in path else "?"
        connection.request("GET", f"{path}{query}watch=1&allowWatchBookmarks=false", headers=self._headers)
        response = connection.getresponse()
        stopped = threading.Event()

        def read() -> None:
            with suppress(OSError, ValueError, AttributeError, http.client.HTTPException):  # closed at the end
                while not stopped.is_set() and (line := response.readline()):
                    event(json.loads(line))

        thread = threading.Thread(target=read, daemon=True)
        thread.start()
        try:
            yield
        finally:
            stopped.set()
            with suppress(OSError):
                if connection.sock:
                    connection.sock.shutdown(2)
            thread.join(10)
            connection.close()


@dataclass
class Trace:
    """Time series of what watches showed, oldest first."""

    begun: float = field(default_factory=time.monotonic)
    entries: list[tuple[float, str, Object]] = field(default_factory=list)

    def add(self, kind: str, item: Object) -> None:
        self.entries.append((time.monotonic() - self.begun, kind, item))

    def of(self, kind: str) -> list[tuple[float, Object]]:
        return [(seconds, item) for seconds, name, item in self.entries if name == kind]
