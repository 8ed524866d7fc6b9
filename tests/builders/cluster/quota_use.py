"""Check that no unit of quota is used twice: pods and Kueue's reservations, in the order of the API server's writes."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

from builders.cluster.queues import API_VERSION, CPU, Client, has_admission, is_true
from concertina_protocol.quantities import parse_quantity

Object = dict[str, Any]
JOB_LABEL = "concertina.dev/job"
ENDED = ("Succeeded", "Failed")


@dataclass
class QuotaUse:
    """Watch events of pods and Workloads in all namespaces, and what they say about a resource.

    All resource versions of one etcd are in the order of its writes, across kinds.
    """

    client: Client
    resource: str = CPU
    events: list[tuple[int, Object]] = field(default_factory=list)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Collect events until the block ends."""
        lock = threading.Lock()

        def add(event: Object) -> None:
            with lock:
                self.events.append((int(event["object"]["metadata"]["resourceVersion"]), event))

        with (
            self.client.watching("/api/v1/pods", add),
            self.client.watching(f"/apis/{API_VERSION}/workloads", add),
        ):
            yield

    def breaches(self, namespaces: Sequence[str], quota: Decimal) -> list[str]:
        """Return a sentence for each time at which pods used more than their reservation, or reservations the quota.

        Args:
            namespaces: All whose jobs use the quota.
            quota: Sum of the nominal quotas of all queues that lend to each other.
        """
        live: dict[str, tuple[str, Decimal]] = {}
        reserved: dict[str, tuple[str, Decimal]] = {}
        messages = []
        for version, event in sorted(self.events, key=lambda entry: entry[0]):
            item = event["object"]
            if item["metadata"]["namespace"] not in namespaces:
                continue
            if item["kind"] == "Pod":
                _put(live, event, _pod(item, self.resource))
            else:
                _put(reserved, event, _reservation(item, self.resource))
            messages += [f"version {version}: {text}" for text in _compare(live, reserved, quota)]
        return messages

    def most(self) -> Mapping[str, Decimal]:
        """Return the most that the live pods of each job requested at one time."""
        live: dict[str, tuple[str, Decimal]] = {}
        most: dict[str, Decimal] = defaultdict(Decimal)
        for _, event in sorted(self.events, key=lambda entry: entry[0]):
            if event["object"]["kind"] == "Pod":
                _put(live, event, _pod(event["object"], self.resource))
                for job, amount in _sums(live).items():
                    most[job] = max(most[job], amount)
        return most


def _put(entries: dict[str, tuple[str, Decimal]], event: Object, entry: tuple[str, Decimal] | None) -> None:
    uid = event["object"]["metadata"]["uid"]
    if event["type"] == "DELETED" or entry is None:
        entries.pop(uid, None)
    else:
        entries[uid] = entry


def _pod(pod: Object, resource: str) -> tuple[str, Decimal] | None:
    """Return the job of a pod and what the pod requests, or None when the pod is of no job or has ended."""
    metadata = pod["metadata"]
    name = metadata.get("labels", {}).get(JOB_LABEL)
    if not name or pod["status"].get("phase") in ENDED:
        return None
    return f"{metadata['namespace']}/{name}", _requests(pod["spec"], resource)


def _reservation(workload: Object, resource: str) -> tuple[str, Decimal] | None:
    """Return the job of a Workload and what Kueue counts for it, or None when it holds no quota.

    Kueue stops counting a Workload as soon as it is inactive, although its admission stands.
    """
    if not has_admission(workload) or is_true(workload, "Finished") or not workload["spec"].get("active", True):
        return None
    counts = {pod_set["name"]: pod_set["count"] for pod_set in workload["spec"]["podSets"]}
    reclaimable = {entry["name"]: entry["count"] for entry in workload["status"].get("reclaimablePods", ())}
    requests = {
        pod_set["name"]: _requests(pod_set["template"]["spec"], resource) for pod_set in workload["spec"]["podSets"]
    }
    amount = Decimal(0)
    for assignment in workload["status"]["admission"]["podSetAssignments"]:
        name = assignment["name"]
        wanted = max(counts[name] - reclaimable.get(name, 0), 0)
        amount += min(assignment["count"], wanted) * requests[name]
    metadata = workload["metadata"]
    owner = next(iter(metadata.get("ownerReferences", ())), {"name": metadata["name"]})["name"]
    return f"{metadata['namespace']}/{owner}", amount


def _requests(spec: Object, resource: str) -> Decimal:
    """Return the sum over containers, with init containers that keep running."""
    containers = spec["containers"] + [
        container for container in spec.get("initContainers", ()) if container.get("restartPolicy") == "Always"
    ]
    resources = [container.get("resources", {}) for container in containers]
    amounts = [
        entry.get("requests", {}).get(resource, entry.get("limits", {}).get(resource, "0")) for entry in resources
    ]
    return sum((parse_quantity(amount) for amount in amounts), Decimal(0))


def _sums(entries: Mapping[str, tuple[str, Decimal]]) -> Mapping[str, Decimal]:
    sums: dict[str, Decimal] = defaultdict(Decimal)
    for job, amount in entries.values():
        sums[job] += amount
    return sums


def _compare(
    live: Mapping[str, tuple[str, Decimal]], reserved: Mapping[str, tuple[str, Decimal]], quota: Decimal
) -> list[str]:
    # Between the admission of a slice and the end of the one it replaces, Kueue counts only the larger one.
    largest: dict[str, Decimal] = defaultdict(Decimal)
    for job, amount in reserved.values():
        largest[job] = max(largest[job], amount)
    messages = [
        f"the pods of {job} request {amount}, and {largest[job]} is reserved for them"
        for job, amount in _sums(live).items()
        if amount > largest[job]
    ]
    if (total := sum(largest.values(), Decimal(0))) > quota:
        messages.append(f"{total} is reserved, and the quota is {quota}: {dict(largest)}")
    return messages
