"""A model of Kueue, and of the API server between it and the operator, for tests of interleavings.

Everything runs in one event loop and virtual time. Each request takes a random number of turns before and after it
takes effect, and each watch delivers its events late. So the operator decides on views that are out of date, and its
writes meet those of Kueue. A seed is the same run every time.

The model follows the rules of Kueue 0.19: order by priority and creation, one flavor, preemption of Workloads with a
lower priority within a ClusterQueue, slices that ask for the difference, and quota that is counted until it is given
back.
"""

from __future__ import annotations

import asyncio
import copy
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

from concertina.api.pod_names import pod_name
from concertina.api.status import rfc3339, unix_seconds
from concertina.controller import workload_writes, writes
from concertina.controller.cache.cluster_cache import ClusterCache
from concertina.controller.cache.job import CachedJob
from concertina.controller.cache.queues import Service
from concertina.controller.status_patches import PreconditionFailed
from concertina.controller.workload_writes import WorkloadWriter
from concertina.controller.writes import ObjectWriter, WriteQueue
from concertina.kube.errors import AlreadyExists, ApiError, Conflict, NotFound
from concertina.kube.manifests.names import JOB_UID
from concertina.kube.manifests.workload import FINALIZER, REPLACEMENT_FOR
from concertina.kube.parse.views import pod_view
from concertina.kube.parse.workloads import flavor_view, workload_view
from concertina.kube.resources import PODS, WORKLOADS, Raw, Resource, version_of
from concertina.plan.actions import Action, CreatePod, DeletePod, PodQuota
from concertina.plan.facts.lending import Lending
from concertina.plan.kueue import PodSet
from concertina.plan.quota.lending import lend

T0 = 1_800_000_000.0
TURN = 0.1
"""Virtual seconds of a turn."""
NAMESPACE = "team"
FLAVOR = "gpu"
GPU = "nvidia.com/gpu"


class FakeApi:
    """Objects by kind and name, with versions, late answers and late watches."""

    def __init__(self, rng: random.Random, now: Callable[[], float], slow: int) -> None:
        self.rng = rng
        self.now = now
        self.slow = slow
        """Largest number of turns that a request waits before it takes effect, and after that."""
        self.objects: dict[str, dict[str, Raw]] = {PODS.plural: {}, WORKLOADS.plural: {}}
        """Pods and Workloads by kind and name. Jobs are not among them (`Site.jobs`)."""
        self.version = 100
        self.feeds: dict[str, list[tuple[str, Raw]]] = {PODS.plural: [], WORKLOADS.plural: []}
        """Events that the operator's watch has not delivered."""
        self.changed: Callable[[], None] = lambda: None

    async def _late(self) -> None:
        for _ in range(self.rng.randrange(self.slow + 1)):
            await asyncio.sleep(0)

    # --- requests of the operator ----------------------------------------------------------------------------------

    async def create(self, resource: Resource, namespace: str | None, body: Raw, **_: Any) -> Raw:
        await self._late()
        stored = self.put_new(resource.plural, body)
        await self._late()
        return stored

    async def get(self, resource: Resource, namespace: str | None, name: str, subresource: str = "") -> Raw:
        await self._late()
        stored = copy.deepcopy(self._find(resource.plural, name))
        await self._late()
        return stored

    async def list_all(
        self, resource: Resource, namespace: str | None = None, labels: str = ""
    ) -> tuple[list[Raw], str]:
        await self._late()
        label, _, value = labels.partition("=")
        items = [
            copy.deepcopy(obj)
            for obj in self.objects[resource.plural].values()
            if obj["metadata"].get("labels", {}).get(label) == value
        ]
        version = str(self.version)
        await self._late()
        return items, version

    async def patch(
        self, resource: Resource, namespace: str | None, name: str, patch: Raw, subresource: str = "", **_: Any
    ) -> Raw:
        await self._late()
        obj = self._find(resource.plural, name)
        expected = patch.get("metadata", {}).get("resourceVersion")
        if expected is not None and expected != obj["metadata"]["resourceVersion"]:
            raise Conflict(409, "Conflict", "the object has been modified")
        changed = copy.deepcopy(obj)
        if subresource == "status":
            changed["status"] = _merge(changed.get("status", {}), patch["status"])
        else:
            _check_spec(obj, patch)
            changed["metadata"] = _merge(changed["metadata"], patch.get("metadata", {}))
            changed["spec"] = _merge(changed["spec"], patch.get("spec", {}))
        stored = self.replace(resource.plural, changed)
        await self._late()
        return stored

    async def delete(self, resource: Resource, namespace: str | None, name: str, uid: str = "", **_: Any) -> Raw | None:
        await self._late()
        obj = self.objects[resource.plural].get(name)
        if obj is None:
            return None
        if uid and obj["metadata"]["uid"] != uid:
            raise Conflict(409, "Conflict", "another uid")
        stored = self.mark_deleted(resource.plural, name)
        await self._late()
        return stored

    # --- the store -------------------------------------------------------------------------------------------------

    def _find(self, kind: str, name: str) -> Raw:
        if name not in self.objects.get(kind, {}):
            raise NotFound(404, "NotFound", f"{kind} {name} not found")
        return self.objects[kind][name]

    def put_new(self, kind: str, body: Raw) -> Raw:
        name = body["metadata"]["name"]
        if name in self.objects[kind]:
            raise AlreadyExists(409, "AlreadyExists", f"{kind} {name} already exists")
        obj = copy.deepcopy(body)
        obj["metadata"] = {
            **obj["metadata"], "namespace": NAMESPACE, "uid": f"{kind}-{self.version}", "generation": 0,
            "creationTimestamp": rfc3339(self.now()),
        }  # fmt: skip
        obj.setdefault("status", {})
        return self._store(kind, obj, "ADDED")

    def replace(self, kind: str, obj: Raw) -> Raw:
        """Store and return a changed object. If it is being deleted and has no finalizer left, it is removed."""
        metadata = obj["metadata"]
        if "deletionTimestamp" in metadata and not metadata.get("finalizers"):
            return self.remove(kind, metadata["name"])
        return self._store(kind, obj, "MODIFIED")

    def mark_deleted(self, kind: str, name: str) -> Raw:
        obj = copy.deepcopy(self.objects[kind][name])
        obj["metadata"].setdefault("deletionTimestamp", rfc3339(self.now() + 30))
        if kind == WORKLOADS.plural and not obj["metadata"].get("finalizers"):
            return self.remove(kind, name)
        return self._store(kind, obj, "MODIFIED")

    def remove(self, kind: str, name: str) -> Raw:
        obj = self.objects[kind].pop(name)
        self.feeds[kind].append(("DELETED", copy.deepcopy(obj)))
        self.changed()
        return obj

    def _store(self, kind: str, obj: Raw, event: str) -> Raw:
        self.version += 1
        old = self.objects[kind].get(obj["metadata"]["name"])
        generation = obj["metadata"].get("generation", 0) + (old is None or old.get("spec") != obj.get("spec"))
        obj["metadata"] = {**obj["metadata"], "resourceVersion": str(self.version), "generation": generation}
        self.objects[kind][obj["metadata"]["name"]] = obj
        self.feeds[kind].append((event, copy.deepcopy(obj)))
        self.changed()
        return copy.deepcopy(obj)


def _merge(target: Raw, patch: Raw) -> Raw:
    result = dict(target)
    for name, value in patch.items():
        if value is None:
            result.pop(name, None)
        elif isinstance(value, dict) and isinstance(result.get(name), dict):
            result[name] = _merge(result[name], value)
        else:
            result[name] = copy.deepcopy(value)
    return result


def _check_spec(obj: Raw, patch: Raw) -> None:
    """Apply the webhook's rules: under quota, pod sets change by lower counts only."""
    new = patch.get("spec", {})
    if obj.get("status", {}).get("admission") is None or obj["kind"] != "Workload":
        return
    if "podSets" in new:
        for before, after in zip(obj["spec"]["podSets"], new["podSets"], strict=True):
            assert after["count"] <= before["count"], "the count of an admitted Workload may only fall"
            assert {**after, "count": 0} == {**before, "count": 0}, "pod sets are immutable under quota"
    assert "priorityClassRef" not in new or new["priorityClassRef"] == obj["spec"].get("priorityClassRef")
    assert "queueName" not in new, "the queue is immutable under quota"


# --- Kueue


class FakeKueue:
    """Kueue's scheduler and Workload controller for one ClusterQueue."""

    def __init__(self, api: FakeApi, quota: int) -> None:
        self.api = api
        self.quota = quota

    @property
    def workloads(self) -> list[Raw]:
        return list(self.api.objects[WORKLOADS.plural].values())

    def step(self) -> None:
        """Take one thing that Kueue's controllers may do now."""
        options = [*self._finishes(), *self._evictions(), *self._readmissions()]
        head = self._schedule
        choices = [*options, head, head]
        self.api.rng.choice(choices)()

    # what the controllers do

    def _finishes(self) -> Iterator[Callable[[], None]]:
        """Finish Workloads whose replacement has quota."""
        for new in self.workloads:
            old_name = _replaces(new)
            old = self.api.objects[WORKLOADS.plural].get(old_name) if old_name else None
            if old is not None and _reserved(new) and _reserved(old):
                yield lambda old=old: self._set(old, Finished=("True", "WorkloadSliceReplaced", "replaced"))

    def _evictions(self) -> Iterator[Callable[[], None]]:
        for workload in self.workloads:
            if _reserved(workload) and workload["spec"].get("active") is False and not _true(workload, "Evicted"):
                yield lambda workload=workload: self._set(workload, Evicted=("True", "Deactivated", "deactivated"))

    def _readmissions(self) -> Iterator[Callable[[], None]]:
        for workload in self.workloads:
            requeued = _condition(workload, "Requeued")
            waits = not _reserved(workload) and workload["spec"].get("active") is not False
            if waits and requeued.get("status") == "False":
                yield lambda workload=workload: self._set(workload, Requeued=("True", "Reactivated", ""))

    def _schedule(self) -> None:
        """Consider the pending Workloads by priority: admit, preempt for, or refuse each of them."""
        pending = [
            workload
            for workload in self.workloads
            if not _reserved(workload) and not _true(workload, "Finished")
            and workload["spec"].get("active") is not False
            and _condition(workload, "Requeued").get("status") != "False"
            and "deletionTimestamp" not in workload["metadata"]
        ]  # fmt: skip
        pending.sort(
            key=lambda w: (-w["spec"].get("priority", 0), w["metadata"]["creationTimestamp"], w["metadata"]["uid"])
        )
        for workload in pending:
            if self._consider(workload):
                return

    def _consider(self, workload: Raw) -> bool:
        """Return whether the Workload was admitted, or waits for others to be preempted."""
        old = self.api.objects[WORKLOADS.plural].get(_replaces(workload))
        asked = _asked(workload) - (_granted(old) if old is not None and _reserved(old) else 0)
        lacking = asked - (self.quota - self.used())
        if lacking <= 0:
            self._admit(workload)
            return True
        message = (
            f"couldn't assign flavors to pod set trainer: insufficient unused quota for {GPU} in flavor {FLAVOR}, "
        )
        message += f"{lacking} more needed"
        victims = self._victims(workload, old, lacking) if _asked(workload) <= self.quota else []
        for victim in victims:
            if not _true(victim, "Evicted"):
                why = f"Preempted to accommodate a workload (UID: {workload['metadata']['uid']}, JobUID: j) due to "
                why += "prioritization in the ClusterQueue; preemptor path: /q; preemptee path: /q"
                self._set(victim, Evicted=("True", "Preempted", why), Preempted=("True", "InClusterQueue", why))
        if victims:
            message += f". Pending the preemption of {len(victims)} workload(s)"
        self._set(workload, QuotaReserved=("False", "Pending", message))
        return bool(victims)

    def _victims(self, workload: Raw, own: Raw | None, lacking: int) -> list[Raw]:
        """Return the fewest Workloads of lower priority that together hold what is lacking."""
        candidates = [
            other
            for other in self.workloads
            if _reserved(other) and other is not own
            and other["spec"].get("priority", 0) < workload["spec"].get("priority", 0)
        ]  # fmt: skip
        candidates.sort(key=lambda w: (not _true(w, "Evicted"), w["spec"].get("priority", 0), -unix(w)))
        victims: list[Raw] = []
        for candidate in candidates:
            if lacking <= 0:
                break
            victims.append(candidate)
            lacking -= _granted(candidate)
        return victims if lacking <= 0 else []

    def _admit(self, workload: Raw) -> None:
        assignments = [
            {
                "name": pod_set["name"], "count": pod_set["count"], "flavors": {GPU: FLAVOR},
                "resourceUsage": {GPU: str(pod_set["count"])},
            }
            for pod_set in workload["spec"]["podSets"]
        ]  # fmt: skip
        self._set(
            workload,
            admission={"clusterQueue": "q", "podSetAssignments": assignments},
            QuotaReserved=("True", "QuotaReserved", ""),
            Admitted=("True", "Admitted", ""),
            Evicted=("False", "QuotaReserved", ""),
            Preempted=("False", "QuotaReserved", ""),
        )

    def _set(self, workload: Raw, admission: Raw | None = None, **conditions: tuple[str, str, str]) -> None:
        """Write conditions as Kueue does: on top of whatever is stored now."""
        current = self.api.objects[WORKLOADS.plural].get(workload["metadata"]["name"])
        if current is None:
            return
        changed = copy.deepcopy(current)
        by_type = {condition["type"]: condition for condition in changed["status"].get("conditions", ())}
        for kind, (status, reason, message) in conditions.items():
            last = by_type.get(kind, {})
            since = last["lastTransitionTime"] if last.get("status") == status else rfc3339(self.api.now())
            by_type[kind] = {
                "type": kind, "status": status, "reason": reason, "message": message, "lastTransitionTime": since,
                "observedGeneration": changed["metadata"]["generation"],
            }  # fmt: skip
        status = {**changed["status"], "conditions": list(by_type.values())}
        if admission is not None:
            status["admission"] = admission
        if status != current["status"]:
            self.api.replace(WORKLOADS.plural, {**changed, "status": status})

    def used(self) -> int:
        """Return how many pods quota is counted for. A Workload and its replacement are counted once.

        Kueue stops counting a Workload as soon as it is inactive, before the condition Evicted.
        """
        reserved = {w["metadata"]["name"]: w for w in self.workloads if _reserved(w) and _active(w)}
        replaced = {_replaces(w) for w in reserved.values()}
        return sum(
            max(_granted(w), _granted(reserved[old]) if (old := _replaces(w)) in reserved else 0)
            for name, w in reserved.items()
            if name not in replaced
        )


def unix(workload: Raw) -> float:
    return unix_seconds(workload["metadata"]["creationTimestamp"])


def _condition(workload: Raw, kind: str) -> Raw:
    conditions = workload["status"].get("conditions", ())
    return next((condition for condition in conditions if condition["type"] == kind), {})


def _true(workload: Raw, kind: str) -> bool:
    return _condition(workload, kind).get("status") == "True"


def _reserved(workload: Raw) -> bool:
    return workload["status"].get("admission") is not None and not _true(workload, "Finished")


def _active(workload: Raw) -> bool:
    return workload["spec"].get("active") is not False


def _replaces(workload: Raw) -> str:
    return str(workload["metadata"].get("annotations", {}).get(REPLACEMENT_FOR, "/")).partition("/")[2]


def _asked(workload: Raw) -> int:
    return sum(pod_set["count"] for pod_set in workload["spec"]["podSets"])


def _granted(workload: Raw) -> int:
    counts = {pod_set["name"]: pod_set["count"] for pod_set in workload["spec"]["podSets"]}
    assignments = workload["status"]["admission"]["podSetAssignments"]
    return sum(min(assignment["count"], counts[assignment["name"]]) for assignment in assignments)


# --- the operator


class Writer(ObjectWriter):
    """Writer of pods that need no Secret and no agent."""

    async def _create_pod(self, job: CachedJob, create: Any) -> bool:
        assert isinstance(create.quota, PodQuota)
        name = pod_name(job.view.name, create.index, create.attempt)
        labels = {JOB_UID: job.view.uid, **create.quota.changes.labels}
        owner = {"kind": "TrainingJob", "name": job.view.name, "uid": job.view.uid, "controller": True}
        body = {
            "kind": "Pod", "metadata": {"name": name, "labels": labels, "ownerReferences": [owner]}, "spec": {},
        }  # fmt: skip
        try:
            stored = await self.client.create(PODS, NAMESPACE, body)
        except AlreadyExists as error:
            raise PreconditionFailed("the pod is there") from error
        self.assume(stored)
        return True


class Site:
    """An API server, Kueue, an operator with some jobs, and jobs of other people that only take quota."""

    def __init__(self, seed: int, quota: int = 8, slow: int = 4) -> None:
        self.rng = random.Random(seed)
        self.time = T0
        self.api = FakeApi(self.rng, lambda: self.time, slow)
        self.kueue = FakeKueue(self.api, quota)
        self.jobs: dict[str, Raw] = {}
        self.numbers: dict[str, int] = {}
        """Number of the next pod of each job: no name is used twice."""
        self.most_pods = 0
        self.lendings: dict[str, Lending] = {}
        self.passes = 0
        self._tasks: set[asyncio.Future[None]] = set()
        """Passes under way."""
        self._start_operator()

    def _start_operator(self) -> None:
        self.seen: dict[str, dict[str, tuple[int, Any]]] = {kind: {} for kind in self.api.objects}
        self.gone: set[str] = set()
        self.cache = ClusterCache(lambda uid: None, lambda uid: {}, later=lambda seconds, act: None)
        self.cache.queues.set_service(Service.READY)
        self.cache.queues.on_flavor(None, flavor_view({"metadata": {"name": FLAVOR}, "spec": {}}))
        workloads = WorkloadWriter(self.api, self.cache, lambda obj: self.take(WORKLOADS.plural, obj))  # type: ignore[arg-type]
        writer = Writer(
            self.api, self.cache, None, None, lambda obj: self.take(PODS.plural, obj), workloads  # type: ignore[arg-type]
        )  # fmt: skip
        self.writes = WriteQueue(writer.write, self._failed, lambda uid: None, lambda: True)
        for obj in self.jobs.values():
            self.cache.on_job(copy.deepcopy(obj))

    async def _failed(self, job: CachedJob, action: Action, error: Exception) -> None:
        if not isinstance(error, PreconditionFailed | ApiError):
            raise error

    async def restart_operator(self) -> None:
        """End the operator, with what it has sent on its way, and start another one that lists all objects."""
        self.writes.close()
        await asyncio.sleep(0)
        for feed in self.api.feeds.values():
            feed.clear()
        self._start_operator()
        for kind, objects in self.api.objects.items():
            for obj in objects.values():
                self.take(kind, copy.deepcopy(obj))

    def take(self, kind: str, obj: Raw) -> None:
        """Take an object as a reflector does: never an older version, and none that is gone."""
        metadata = obj["metadata"]
        parse = workload_view if kind == WORKLOADS.plural else pod_view
        old_version, old = self.seen[kind].get(metadata["name"], (0, None))
        if metadata["uid"] in self.gone or version_of(obj) <= old_version:
            return
        view = parse(obj)
        self.seen[kind][metadata["name"]] = version_of(obj), view
        (self.cache.queues.on_workload if kind == WORKLOADS.plural else self.cache.on_pod)(old, view)

    def deliver(self, kind: str) -> None:
        """Deliver the next event of a watch."""
        event, obj = self.api.feeds[kind].pop(0)
        if event != "DELETED":
            self.take(kind, obj)
            return
        self.gone.add(obj["metadata"]["uid"])
        _, old = self.seen[kind].pop(obj["metadata"]["name"], (0, None))
        if old is not None:
            (self.cache.queues.on_workload if kind == WORKLOADS.plural else self.cache.on_pod)(old, None)

    # --- jobs ------------------------------------------------------------------------------------------------------

    def add_job(self, name: str, replicas: int = 4, least: int | None = 1, **elastic: Any) -> str:
        uid = f"uid-{name}"
        container = {"name": "trainer", "image": "x", "command": ["x"], "resources": {"limits": {GPU: "1"}}}
        spec: Raw = {"replicas": replicas, "template": {"spec": {"containers": [container]}}}
        if least is not None:
            spec["elastic"] = {"minReplicas": least, **elastic}
        metadata = {
            "name": name, "namespace": NAMESPACE, "uid": uid, "generation": 1, "resourceVersion": "1",
            "creationTimestamp": rfc3339(T0), "labels": {"kueue.x-k8s.io/queue-name": "team"},
        }  # fmt: skip
        self.jobs[uid] = {"metadata": metadata, "spec": spec, "status": {}}
        self.cache.on_job(copy.deepcopy(self.jobs[uid]))
        return uid

    def change_job(self, uid: str, **spec: Any) -> None:
        job = copy.deepcopy(self.jobs[uid])
        job["spec"].update(spec)
        job["metadata"]["generation"] += 1
        job["metadata"]["resourceVersion"] = str(int(job["metadata"]["resourceVersion"]) + 1)
        self.jobs[uid] = job
        self.cache.on_job(copy.deepcopy(job))

    def change_status(self, uid: str, **status: Any) -> None:
        job = copy.deepcopy(self.jobs[uid])
        job["status"].update(status)
        job["metadata"]["resourceVersion"] = str(int(job["metadata"]["resourceVersion"]) + 1)
        self.jobs[uid] = job
        self.cache.on_job(copy.deepcopy(job))

    def forget_pod(self, pod: Raw) -> None:
        """Make the operator's cache forget a pod that exists."""
        self.cache.on_pod(pod_view(pod), None)

    def end_pod(self, name: str) -> None:
        """Let the containers of a pod end well."""
        pod = copy.deepcopy(self.api.objects[PODS.plural][name])
        self.api.replace(PODS.plural, {**pod, "status": {"phase": "Succeeded"}})

    def finished(self, uid: str) -> list[str]:
        """Return the reasons for which Workloads of a job are finished."""
        conditions = (_condition(w, "Finished") for w in self.kueue.workloads if "ownerReferences" in w["metadata"])
        return [condition["reason"] for condition in conditions if condition.get("status") == "True"]

    def add_stranger(self, name: str, pods: int, priority: int) -> None:
        """Add a Workload of another program, whose pods run while it is admitted."""
        container = {"name": "main", "resources": {"requests": {GPU: "1"}}}
        pod_sets = [{"name": "main", "count": pods, "template": {"spec": {"containers": [container]}}}]
        spec = {"queueName": "team", "priority": priority, "active": True, "podSets": pod_sets}
        self.api.put_new(WORKLOADS.plural, {"kind": "Workload", "metadata": {"name": name}, "spec": spec})

    def remove_stranger(self, name: str) -> None:
        if name in self.api.objects[WORKLOADS.plural]:
            self.api.remove(WORKLOADS.plural, name)

    def pods_of(self, uid: str) -> list[Raw]:
        return [pod for pod in self.api.objects[PODS.plural].values() if pod["metadata"]["labels"][JOB_UID] == uid]

    @property
    def pods(self) -> int:
        """Number of pods in the cluster: those of jobs, and those of admitted strangers."""
        strangers = [w for w in self.kueue.workloads if FINALIZER not in (w["metadata"].get("finalizers") or ())]
        running = sum(_granted(w) for w in strangers if _reserved(w) and "ownerReferences" not in w["metadata"])
        return running + len(self.api.objects[PODS.plural])

    # --- a turn ----------------------------------------------------------------------------------------------------

    async def turns(self, count: int, check: Callable[[], None] = lambda: None) -> None:
        for _ in range(count):
            self.time += TURN
            self._act()
            check()
            await asyncio.sleep(0)
            check()

    def _act(self) -> None:
        choice = self.rng.random()
        for kind, feed in self.api.feeds.items():
            if feed and self.rng.random() < 0.5:
                self.deliver(kind)
        if choice < 0.35:
            self.kueue.step()
        elif choice < 0.5:
            self._kubelet()
        elif choice < 0.58:
            self._evict_strangers()
        for uid in self.jobs:
            if self.rng.random() < 0.5:
                task = asyncio.ensure_future(self._pass(uid))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    def _kubelet(self) -> None:
        """Let one pod that is being deleted end."""
        ending = [name for name, pod in self.api.objects[PODS.plural].items() if "deletionTimestamp" in pod["metadata"]]
        if ending:
            self.api.remove(PODS.plural, self.rng.choice(ending))

    def _evict_strangers(self) -> None:
        """Let a stranger that was preempted give its quota back."""
        for workload in self.kueue.workloads:
            if "ownerReferences" not in workload["metadata"] and _reserved(workload) and _true(workload, "Evicted"):
                self.api.remove(WORKLOADS.plural, workload["metadata"]["name"])
                return

    async def _pass(self, uid: str) -> None:
        """Make one pass over a job. Between its decision and its writes lies a write of the status."""
        observed = self.cache.observe(uid)
        job = self.cache.job(uid)
        if observed is None or job is None:
            return
        self.passes += 1
        writes_queue = self.writes
        lending = lend(observed, self.time)
        self.lendings[uid] = lending
        actions = [*self._pods(uid, lending, observed.pods), *lending.writes]
        for _ in range(self.rng.randrange(3)):
            await asyncio.sleep(0)
        if writes_queue is self.writes and self.cache.job(uid) is job:
            self.writes.start(job, actions)

    def _pods(self, uid: str, lending: Lending, pods: tuple[Any, ...]) -> Iterator[Action]:
        """Yield what the operator does about pods: those beyond the size go, and missing ones come."""
        if lending.size is None:
            return
        size = lending.size.total
        staying = [pod for pod in pods if not pod.deleting]
        for pod in staying[size:]:
            yield DeletePod(pod.name, pod.uid, "is too many")
        missing = max(0, size - len(staying))
        taken = {pod.index for pod in pods}
        index = self.numbers.setdefault(uid, 0)
        for pod_set, room in lending.room.items():
            for _ in range(min(room, missing)):
                while index in taken:
                    index += 1
                changes = lending.changes[PodSet(pod_set)]
                yield CreatePod(index, 0, quota=PodQuota(lending.lender, PodSet(pod_set), changes))
                index += 1
                missing -= 1
        if taken:
            self.numbers[uid] = max(self.numbers[uid], max(taken) + 1)


@contextmanager
def virtual_time(site: Site) -> Iterator[None]:
    """Make the writers read the site's clock."""
    clock = SimpleNamespace(time=lambda: site.time, monotonic=lambda: site.time)
    with mock.patch.object(workload_writes, "time", clock), mock.patch.object(writes, "time", clock):
        yield
