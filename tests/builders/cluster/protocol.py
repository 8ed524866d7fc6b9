"""Client that plays an external controller's side of Kueue's protocol, and a record of Kueue's answers.

`Player` writes what an operator of TrainingJobs would write, without pods. `Recorder` notes each write, and each later
state of the Workloads that the API server shows.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

from builders.cluster.queues import KUEUE, Client, admitted_count, condition, has_admission, is_true
from builders.until import GIVE_UP, until

Object = dict[str, Any]
UID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
WITH_MESSAGE = ("QuotaReserved", "Evicted")
"""Conditions whose messages the operator shows to users."""
TIME = "2026-01-01T00:00:00Z"
POLL = 0.005  # seconds
QUIET = 1.3
"""Seconds without a change, within which Kueue has retried what it could not admit: it retries each second."""


def state(item: Object) -> Object:
    """Return what Kueue has decided about a Workload, without times and generated names."""
    admission = item.get("status", {}).get("admission")
    assignments = admission["podSetAssignments"] if admission else ()
    conditions = item.get("status", {}).get("conditions") or ()
    return {
        "workload": item["metadata"]["name"],
        "counts": {pod_set["name"]: pod_set["count"] for pod_set in item["spec"]["podSets"]},
        "active": item["spec"].get("active", True),
        "admission": {
            assignment["name"]: {"count": assignment["count"], "flavors": assignment.get("flavors", {})}
            for assignment in assignments
        },
        "conditions": {
            entry["type"]: {
                "status": entry["status"],
                "reason": entry["reason"],
                **({"message": UID.sub("UID", entry.get("message", ""))} if entry["type"] in WITH_MESSAGE else {}),
            }
            for entry in sorted(conditions, key=lambda entry: entry["type"])
        },
    }


def usage(queue: Object, field: str = "flavorsReservation") -> dict[str, str]:
    """Return the reserved or used amounts of a ClusterQueue, as flavor/resource."""
    flavors = queue.get("status", {}).get(field) or ()
    return {
        f"{flavor['name']}/{resource['name']}": str(resource["total"])
        for flavor in flavors
        for resource in flavor["resources"]
    }


def _without_times(item: Object) -> Object:
    """Drop what differs in each run: resource versions, and times of conditions."""
    return {
        key: TIME if key == "lastTransitionTime" else value for key, value in item.items() if key != "resourceVersion"
    }


class Recorder:
    """Writes of a player and the states that follow them, in the order in which they were seen."""

    def __init__(self) -> None:
        self.begun = time.monotonic()
        self.entries: list[Object] = []
        self._last: dict[str, Object] = {}
        self._lock = threading.Lock()

    def write(self, method: str, name: str, subresource: str, body: Object | None) -> None:
        repeatable = json.loads(UID.sub("UID", json.dumps(body)), object_hook=_without_times)
        self._add({"write": {"method": method, "workload": name, "subresource": subresource, "body": repeatable}})

    def workload(self, event: Object) -> None:
        """Note the state of a Workload in a watch event, unless it is the last one."""
        name = event["object"]["metadata"]["name"]
        if event["type"] == "DELETED":
            self._add({"deleted": name})
        else:
            self._note(f"workload {name}", {"state": state(event["object"])})

    def queue(self, event: Object) -> None:
        """Note the usage of a ClusterQueue in a watch event, unless it is the last one."""
        name = event["object"]["metadata"]["name"]
        reserved = usage(event["object"])
        self._note(f"queue {name}", {"usage": {"queue": name, "reserved": reserved}})

    def _note(self, key: str, entry: Object) -> None:
        if self._last.get(key) != entry:
            self._last[key] = entry
            self._add(entry)

    def _add(self, entry: Object) -> None:
        with self._lock:
            self.entries.append({"seconds": round(time.monotonic() - self.begun, 3), **entry})

    def settle(self) -> None:
        """Wait until nothing has changed for QUIET seconds."""
        until(lambda: time.monotonic() - self.begun - self.entries[-1]["seconds"] > QUIET, "Kueue to come to rest")

    def steps(self) -> list[Object]:
        """Return each write with the states after it, until the next write, and with the last usage of each queue."""
        steps: list[Object] = []
        for entry in self.entries:
            if "write" in entry:
                steps.append({"write": entry["write"], "answers": [], "usage": {}})
            elif not steps:
                continue
            elif "usage" in entry:
                steps[-1]["usage"][entry["usage"]["queue"]] = entry["usage"]["reserved"]
            else:
                seconds = round(entry["seconds"] - self._written(entry), 3)
                steps[-1]["answers"].append(
                    {"seconds": seconds} | entry.get("state", {"deleted": entry.get("deleted")})
                )
        return steps

    def _written(self, entry: Object) -> float:
        """Return the time of the last write before an entry."""
        before = self.entries[: self.entries.index(entry)]
        return float(next(earlier["seconds"] for earlier in reversed(before) if "write" in earlier))


class Player:
    """Writes of an external controller to Workloads of one namespace."""

    def __init__(self, client: Client, namespace: str, recorder: Recorder) -> None:
        self.client, self.namespace, self.recorder = client, namespace, recorder
        self.path = f"{KUEUE}/namespaces/{namespace}/workloads"

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record the Workloads of the namespace and all ClusterQueues while the block runs."""
        with (
            self.client.watching(self.path, self.recorder.workload),
            self.client.watching(f"{KUEUE}/clusterqueues", self.recorder.queue),
        ):
            yield

    def settle(self) -> None:
        self.recorder.settle()

    def get(self, name: str) -> Object:
        return self.client.call("GET", f"{self.path}/{name}")

    def create(self, body: Object) -> Object:
        return self._write("POST", body["metadata"]["name"], "", body)

    def patch(self, name: str, body: Object, subresource: str = "") -> Object:
        return self._write("PATCH", name, subresource, body)

    def _write(self, method: str, name: str, subresource: str, body: Object | None) -> Object:
        self.recorder.write(method, name, subresource, body)
        path = self.path if method == "POST" else f"{self.path}/{name}" + (f"/{subresource}" if subresource else "")
        return self.client.call(method, path, body)

    def resize(self, name: str, count: int) -> Object:
        """Write the count of the only pod set. A merge patch replaces the whole list."""
        pod_set = self.get(name)["spec"]["podSets"][0]
        return self.patch(name, {"spec": {"podSets": [{**pod_set, "count": count}]}})

    def release(self, name: str) -> Object:
        """Return the quota of an evicted Workload, as Kueue's own integrations do once the pods are gone."""
        item = self.get(name)
        evicted = condition(item, "Evicted")
        requeued = "True" if evicted["reason"] in ("Preempted", "NodeFailures") else "False"
        changed = {
            "Requeued": (requeued, evicted["reason"], evicted["message"]),
            "QuotaReserved": ("False", "Pending", evicted["message"]),
            "Admitted": ("False", "NoReservation", "The workload has no reservation"),
        }
        return self._set_conditions(item, changed, {"admission": None})

    def finish(self, name: str, reason: str = "Succeeded") -> Object:
        return self._set_conditions(self.get(name), {"Finished": ("True", reason, "The job finished")})

    def ready(self, name: str) -> Object:
        return self._set_conditions(self.get(name), {"PodsReady": ("True", "Started", "All pods are ready")})

    def _set_conditions(
        self, item: Object, changed: dict[str, tuple[str, str, str]], status: Object | None = None
    ) -> Object:
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        conditions = [entry for entry in item["status"].get("conditions", ()) if entry["type"] not in changed]
        conditions += [
            {"type": kind, "status": value, "reason": reason, "message": message, "lastTransitionTime": now}
            for kind, (value, reason, message) in changed.items()
        ]
        version = item["metadata"]["resourceVersion"]
        body = {"metadata": {"resourceVersion": version}, "status": {**(status or {}), "conditions": conditions}}
        return self.patch(item["metadata"]["name"], body, "status")

    def remove(self, name: str) -> None:
        """Delete a Workload, and remove the finalizer that holds its quota."""
        self.patch(name, {"metadata": {"finalizers": None}})
        self._write("DELETE", name, "", None)

    def wait(self, name: str, holds: Callable[[Object], bool], what: str) -> Object:
        """Return the Workload as soon as a condition holds for it."""

        def look() -> Object | None:
            item = self.get(name)
            return item if holds(item) else None

        awaited = until(look, f"{name}: {what}", lambda: state(self.get(name)), limit=GIVE_UP, pause=POLL)
        assert awaited
        return awaited

    def wait_admitted(self, name: str, count: int) -> Object:
        def admitted(item: Object) -> bool:
            return is_true(item, "Admitted") and not is_true(item, "Evicted") and admitted_count(item) == count

        return self.wait(name, admitted, f"admission of {count}")

    def wait_pending(self, name: str) -> Object:
        def pending(item: Object) -> bool:
            decided = any(entry["type"] == "QuotaReserved" for entry in item.get("status", {}).get("conditions", ()))
            return decided and not has_admission(item)

        return self.wait(name, pending, "no admission")

    def wait_evicted(self, name: str) -> Object:
        return self.wait(name, lambda item: is_true(item, "Evicted"), "eviction")

    def wait_finished(self, name: str) -> Object:
        return self.wait(name, lambda item: is_true(item, "Finished"), "end")


def settled(step: Object) -> dict[str, Object]:
    """Return the last answer of each Workload in a step, without its time."""
    answers: dict[str, Object] = {}
    for answer in step["answers"]:
        name = answer.get("workload") or answer["deleted"]
        answers[name] = {key: value for key, value in answer.items() if key != "seconds"}
    return answers


def table(entries: Sequence[Object]) -> str:
    """Return a record as text, a line for each entry."""
    lines = []
    for entry in entries:
        seconds = f"{entry['seconds']:7.3f}"
        if "write" in entry:
            write = entry["write"]
            lines.append(f"{seconds}  write  {write['method']} {write['workload']} {write['subresource']}")
        elif "state" in entry:
            seen = entry["state"]
            shown = [f"{kind}={value['status']}/{value['reason']}" for kind, value in seen["conditions"].items()]
            admitted = {name: value["count"] for name, value in seen["admission"].items()}
            counts = f"{seen['counts']} admission={admitted}"
            lines.append(f"{seconds}  state  {seen['workload']} {counts} {' '.join(shown)}")
        elif "usage" in entry:
            lines.append(f"{seconds}  usage  {entry['usage']['queue']} {entry['usage']['reserved']}")
        else:
            lines.append(f"{seconds}  gone   {entry['deleted']}")
    return "\n".join(lines)
