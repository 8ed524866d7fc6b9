"""TrainingJobs in queues of Kueue: their queues and Workloads, and conditions to wait for."""

from __future__ import annotations

import json
from collections.abc import Mapping
from decimal import Decimal
from pathlib import Path
from typing import Any

from builders.cluster.operator_process import ENDLESS, Jobs, endless, paced
from builders.cluster.protocol import state
from builders.cluster.queues import (
    CPU,
    KUEUE,
    Client,
    admitted_count,
    cluster_queue,
    has_admission,
    is_true,
    local_queue,
    priority_class,
    resource_flavor,
)
from builders.programs import STAND_IN
from builders.until import until
from concertina.local.control_plane.api import ControlPlaneError

Object = dict[str, Any]
UNIT = "10m"
"""Processor time that each pod requests: quotas are counted in units, and the tests' nodes have room for many."""
QUEUE_LABEL, PRIORITY_LABEL = "kueue.x-k8s.io/queue-name", "kueue.x-k8s.io/priority-class"
HIGH = "high"
ELASTIC = {"minReplicas": 1, "scaleUp": {"stabilizationWindowSeconds": 0}}


class QueuedJobs:
    """Jobs of one namespace, with ClusterQueues of the test's own. All of them use one flavor."""

    def __init__(self, jobs: Jobs, client: Client, data: Path) -> None:
        self.jobs, self.client, self.data = jobs, client, data
        self.namespace = jobs.namespace
        self.flavor = f"{self.namespace}-flavor"
        self.quota = Decimal(0)
        self._created: list[str] = []

    def create_flavor(self, labels: Mapping[str, str] | None = None, **toleration: str) -> None:
        self._create("resourceflavors", resource_flavor(self.flavor, labels, [toleration] if toleration else ()))

    def create_queue(self, name: str, units: int, **spec: Any) -> str:
        """Create a LocalQueue and its ClusterQueue with a quota of this number of pods; return the latter's name."""
        shared = f"{self.namespace}-{name}"
        self.quota += units * Decimal("0.01")
        self._create("clusterqueues", cluster_queue(shared, self.flavor, f"{units * 10}m", **spec))
        path = f"{KUEUE}/namespaces/{self.namespace}/localqueues"
        self.client.call("POST", path, local_queue(self.namespace, name, shared))
        return shared

    def create_priority(self, value: int = 1000) -> None:
        self._create("workloadpriorityclasses", priority_class(self.priority, value))

    @property
    def priority(self) -> str:
        return f"{self.namespace}-{HIGH}"

    def _create(self, kind: str, body: Object) -> None:
        self.client.call("POST", f"{KUEUE}/{kind}", body)
        self._created.append(f"{KUEUE}/{kind}/{body['metadata']['name']}")

    def set_quota(self, queue: str, units: int) -> None:
        groups = cluster_queue(queue, self.flavor, f"{units * 10}m")["spec"]["resourceGroups"]
        self.client.call("PATCH", f"{KUEUE}/clusterqueues/{queue}", {"spec": {"resourceGroups": groups}})

    def create(
        self, name: str, queue: str, replicas: int, priority: str = "", steps: int = ENDLESS, **spec: Any
    ) -> Object:
        """Create a job that trains without torch, until its test is over unless `steps` says less."""
        container = {**paced(PYTHONPATH=STAND_IN), "resources": {"requests": {CPU: UNIT}}}
        named = {QUEUE_LABEL: queue, PRIORITY_LABEL: priority}
        labels = {label: name for label, name in named.items() if name}
        pod = {"containers": [container], "terminationGracePeriodSeconds": 30}
        trainer = endless(self.data, globalBatchSize=12, steps=steps)
        return self.jobs.create(name, replicas=replicas, pod=pod, labels=labels, trainer=trainer, **spec)

    def workloads(self, job: str = "") -> list[Object]:
        """Return the Workloads of a job, oldest first, or of all jobs."""
        items = self.client.call("GET", f"{KUEUE}/namespaces/{self.namespace}/workloads")["items"]
        return [
            item
            for item in sorted(items, key=lambda item: item["metadata"]["creationTimestamp"])
            if job in ("", *(owner["name"] for owner in item["metadata"].get("ownerReferences", ())))
        ]

    def current(self, job: str) -> Object:
        """Return the newest Workload of a job that is not finished, or an empty object."""
        running = [item for item in self.workloads(job) if not is_true(item, "Finished")]
        admitted = [item for item in running if has_admission(item)]
        return (admitted or running or [{}])[-1]

    def lent(self, job: str) -> int:
        """Return for how many pods a job has quota."""
        return max((admitted_count(item) for item in self.workloads(job) if _counts(item)), default=0)

    def wait_lent(self, job: str, count: int) -> None:
        until(lambda: self.lent(job) == count, f"quota of {job} for {count}", lambda: self.describe(job))

    def wait_evicted(self, job: str) -> None:
        def evicted() -> bool:
            return any(is_true(item, "Evicted") for item in self.workloads(job) if not is_true(item, "Finished"))

        until(evicted, f"the eviction of {job}", lambda: self.describe(job), pause=0.02)

    def wait_trains(self, job: str, replicas: int, past: int = 0) -> Object:
        """Return the job once it has done a step with this number of replicas, in a round higher than `past`."""
        step = self.jobs.wait_training(job, replicas, past)["status"].get("progress", {}).get("step", 0)
        return self.jobs.wait(job, lambda item: item["status"].get("progress", {}).get("step", 0) > step)

    def describe(self, job: str) -> str:
        states = [json.dumps(state(item)) for item in self.workloads(job)]
        return "\n".join([self.jobs.describe(job), *states])

    def wait_no_workloads(self, job: str = "") -> None:
        what = f"the end of the Workloads of {job or 'all jobs'}"
        until(lambda: not self.workloads(job), what, lambda: self.workloads(job))

    def remove_all(self) -> None:
        """Delete the jobs, wait for the end of their Workloads, and delete the queues.

        Raises:
            ControlPlaneError: When the API server refuses to delete an object that exists.
        """
        for job in self.client.call("GET", self.jobs.path)["items"]:
            self.jobs.delete(job["metadata"]["name"])
        self.wait_no_workloads()
        for path in reversed(self._created):
            try:
                self.client.call("DELETE", path)
            except ControlPlaneError as error:
                if error.status != 404:
                    raise


def _counts(item: Object) -> bool:
    return has_admission(item) and not is_true(item, "Finished")
