"""Writes to Kueue's Workloads.

Each write names the resourceVersion of the Workload for which it was planned, and fails if the Workload has changed.
Before the operator returns quota to Kueue, it lists the job's pods to check that enough of them are gone, because the
cache may not contain the newest pods yet (decision "A job never has more pods than its quota").
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import get_args

from concertina.api.status import rfc3339
from concertina.controller.cache.cluster_cache import ClusterCache
from concertina.controller.cache.job import CachedJob
from concertina.controller.status_patches import PreconditionFailed
from concertina.kube.client import Client
from concertina.kube.errors import AlreadyExists, Invalid, NotFound, WebhookFailed
from concertina.kube.manifests import workload as manifest
from concertina.kube.manifests.names import JOB_UID
from concertina.kube.parse.views import pod_view
from concertina.kube.resources import PODS, TRAINING_JOBS, WORKLOADS, Raw
from concertina.plan.actions import (
    CreateWorkload,
    DropWorkload,
    EditWorkload,
    FinishWorkload,
    ReleaseWorkload,
    ReportPodsReady,
    ShrinkWorkload,
    WorkloadKey,
    WorkloadWrite,
)
from concertina.plan.kueue import EvictionReason, Request, WorkloadView
from concertina_protocol.log import log_event

WORKLOAD_WRITES: tuple[type, ...] = get_args(WorkloadWrite)
REQUEUED = (EvictionReason.PREEMPTED, EvictionReason.NODE_FAILURES)
"""Reasons for an eviction after which Kueue queues the Workload again without a delay."""
LONGEST_MESSAGE = 32768
"""Maximum length of a condition's message in characters."""


@dataclass
class WorkloadWriter:
    """Performs writes to Kueue's Workloads."""

    client: Client
    cache: ClusterCache
    assume: Callable[[Raw], None]
    """Function that stores a Workload returned by a write in the cache, so that plans use this version.
    """

    async def write(self, job: CachedJob, action: WorkloadWrite) -> bool:
        """Perform the write. Return False if the API server refused it, and record the refusal in the cache.

        Raises:
            PreconditionFailed: When the observation is outdated, or too many pods still use the quota.
        """
        job.writing_quota = True
        try:
            await self._write(job, action)
        except (Invalid, WebhookFailed) as error:
            log_event("workload refused", **job.named(), write=type(action).__name__, message=error.message)
            self.cache.queues.refused(job, error.message)
            return False
        except NotFound as error:
            raise PreconditionFailed(f"the Workload is gone: {error.message}") from error
        finally:
            job.writing_quota = False
        self.cache.queues.accepted(job)
        return True

    async def _write(self, job: CachedJob, action: WorkloadWrite) -> None:
        match action:
            case CreateWorkload():
                await self._create(job, action)
            case EditWorkload():
                await self._edit(job, action)
            case ShrinkWorkload():
                await self._shrink(job, action)
            case ReleaseWorkload():
                await self._release(job, action.key)
            case FinishWorkload():
                await self._finish(job, action)
            case DropWorkload():
                await self._drop(job, action)
            case ReportPodsReady():
                await self._pods_ready(job, action)

    async def _create(self, job: CachedJob, create: CreateWorkload) -> None:
        view, queue = job.view, self.cache.queues.view(job)
        if view.spec is None or queue is None:
            raise PreconditionFailed("the job of the Workload has no queue anymore")
        body = manifest.workload_manifest(view, view.spec, create, queue.queue, self.cache.queues.class_ref(job))
        try:
            stored = await self.client.create(WORKLOADS, view.namespace, body)
        except AlreadyExists as error:
            # The answer to an earlier create was lost, or the cache does not have the Workload yet.
            stored = await self.client.get(WORKLOADS, view.namespace, body["metadata"]["name"])
            if not any(owner["uid"] == view.uid for owner in _owners(stored)):
                raise PreconditionFailed(f"another object has this name: {error.message}") from error
        self._done(job, "workload created", stored, pods=dict(create.request), priority=create.priority)

    async def _edit(self, job: CachedJob, edit: EditWorkload) -> None:
        live = await self._live(job, edit.key)
        spec: Raw = {}
        metadata: Raw = {"resourceVersion": edit.key.version}
        if edit.request is not None:
            spec["podSets"] = self._pod_sets(job, live, edit)
            if edit.template and job.view.spec is not None:
                metadata["annotations"] = {manifest.REQUEST_HASH: manifest.request_hash(job.view.spec)}
        if edit.priority is not None:
            spec["priority"] = edit.priority
            if not live["status"].get("admission"):
                ref = self.cache.queues.class_ref(job)
                spec["priorityClassRef"] = ref if edit.priority == self._priority(job) else None
        if edit.queue is not None:
            spec["queueName"] = edit.queue
        if edit.active is not None:
            if not edit.active and live["status"].get("admission"):
                await self._no_more_than(job, 0)  # Kueue gives the quota of an inactive Workload to others at once
            spec["active"] = edit.active
            paused = {manifest.PAUSED: None if edit.active else "true"}
            metadata["annotations"] = {**metadata.get("annotations", {}), **paused}
        stored = await self._patch(job, edit.key, {"metadata": metadata, "spec": spec})
        self._done(job, "workload edited", stored, **{name: value for name, value in spec.items() if name != "podSets"})

    def _priority(self, job: CachedJob) -> int | None:
        quota = self.cache.queues.view(job)
        return quota.priority if quota else None

    def _pod_sets(self, job: CachedJob, live: Raw, edit: EditWorkload) -> list[Raw]:
        assert edit.request is not None
        if edit.template and job.view.spec is not None:
            return manifest.pod_sets(job.view.spec, edit.request)
        return _with_counts(live, edit.request)

    async def _shrink(self, job: CachedJob, shrink: ShrinkWorkload) -> None:
        live = await self._live(job, shrink.key)
        await self._no_more_than(job, sum(count for _, count in shrink.request))
        metadata: Raw = {"resourceVersion": shrink.key.version}
        if shrink.eviction:
            now = rfc3339(round(time.time(), 3))
            metadata["annotations"] = {manifest.SHRUNK_FOR: shrink.eviction, manifest.SHRUNK_AT: now}
        body = {"metadata": metadata, "spec": {"podSets": _with_counts(live, shrink.request)}}
        stored = await self._patch(job, shrink.key, body)
        self._done(job, "quota returned", stored, pods=dict(shrink.request))

    async def _release(self, job: CachedJob, key: WorkloadKey) -> None:
        live = await self._live(job, key)
        await self._no_more_than(job, 0)
        conditions = _conditions(live)
        evicted = conditions.get("Evicted", {})
        if evicted.get("status") != "True":
            raise PreconditionFailed("the Workload is not evicted")
        reason, message = str(evicted.get("reason")), str(evicted.get("message", ""))
        requeued = "True" if reason in REQUEUED else "False"
        changed = (
            _condition(live, "Requeued", requeued, reason, message),
            _condition(live, "QuotaReserved", "False", "Pending", message),
            _condition(live, "Admitted", "False", "NoReservation", "The workload has no reservation"),
        )
        status = {"admission": None, "conditions": _merged(conditions, changed)}
        stored = await self._patch_status(job, key, status)
        self._done(job, "quota released", stored, reason=reason)

    async def _finish(self, job: CachedJob, finish: FinishWorkload) -> None:
        live = await self._live(job, finish.key)
        await self._no_more_than(job, finish.pods_left)
        finished = _condition(live, "Finished", "True", finish.reason, finish.message)
        stored = await self._patch_status(job, finish.key, {"conditions": _merged(_conditions(live), (finished,))})
        self._done(job, "workload finished", stored, reason=finish.reason)

    async def _drop(self, job: CachedJob, drop: DropWorkload) -> None:
        live = await self._live(job, drop.key)
        if drop.pods_left is not None:
            await self._no_more_than(job, drop.pods_left)
        if manifest.FINALIZER in (live["metadata"].get("finalizers") or ()):
            live = await self._patch(job, drop.key, _without_finalizer(live))
        self._done(job, "workload dropped", live)
        if drop.delete and "deletionTimestamp" not in live["metadata"]:
            await self.client.delete(WORKLOADS, job.view.namespace, drop.key.name, uid=drop.key.uid)

    async def _pods_ready(self, job: CachedJob, report: ReportPodsReady) -> None:
        live = await self._live(job, report.key)
        conditions = _conditions(live)
        recovered = conditions.get("PodsReady", {}).get("reason") in ("WaitForRecovery", "Recovered")
        if report.ready:
            reason = "Recovered" if recovered else "Started"
            ready = _condition(live, "PodsReady", "True", reason, "The job trains")
        else:
            ready = _condition(live, "PodsReady", "False", "WaitForStart", "The job does not train yet")
        stored = await self._patch_status(job, report.key, {"conditions": _merged(conditions, (ready,))})
        self._done(job, "pods ready reported", stored, ready=report.ready)

    # --- reads and patches -----------------------------------------------------------------------------------------

    async def _live(self, job: CachedJob, key: WorkloadKey) -> Raw:
        """Return the Workload as the API server stores it now.

        Raises:
            PreconditionFailed: When the Workload has changed since the write was planned.
        """
        live = await self.client.get(WORKLOADS, job.view.namespace, key.name)
        if (live["metadata"]["uid"], live["metadata"]["resourceVersion"]) != (key.uid, key.version):
            self.assume(live)
            raise PreconditionFailed(f"the Workload {key.name} has changed")
        live.setdefault("status", {})
        return live

    async def _no_more_than(self, job: CachedJob, most: int) -> None:
        """List the job's pods and check that at most `most` of them use quota.

        Raises:
            PreconditionFailed: When more pods use quota.
        """
        left = await pods_left(self.client, job.view.namespace, job.view.uid)
        if left > most:
            raise PreconditionFailed(f"{left} pods still exist, and quota for {most} remains")

    async def _patch(self, job: CachedJob, key: WorkloadKey, body: Raw) -> Raw:
        return await self.client.patch(WORKLOADS, job.view.namespace, key.name, body)

    async def _patch_status(self, job: CachedJob, key: WorkloadKey, status: Raw) -> Raw:
        body = {"metadata": {"resourceVersion": key.version}, "status": status}
        return await self.client.patch(WORKLOADS, job.view.namespace, key.name, body, subresource="status")

    def _done(self, job: CachedJob, what: str, stored: Raw, **fields: object) -> None:
        log_event(what, **job.named(), workload=stored["metadata"]["name"], **fields)
        self.assume(stored)


async def pods_left(client: Client, namespace: str, job_uid: str) -> int:
    """Return how many of a job's pods use Kueue quota.

    The function lists the pods, because the cache may not contain the newest pods yet.
    """
    pods, _ = await client.list_all(PODS, namespace, labels=f"{JOB_UID}={job_uid}")
    return sum(not pod_view(pod).view.released for pod in pods)


async def drop_orphan(client: Client, workload: WorkloadView) -> bool:
    """Remove Kueue's finalizer from a Workload whose job is gone. Return whether the finalizer was removed.

    The finalizer stays while a pod of the job exists, because Kueue must count the quota of that pod until then.
    """
    live = await client.get(WORKLOADS, workload.namespace, workload.name)
    names = [owner["name"] for owner in _owners(live) if owner["uid"] == workload.job_uid]
    if live["metadata"]["uid"] != workload.uid or not names:
        return False
    try:
        job = await client.get(TRAINING_JOBS, workload.namespace, names[0])
        if job["metadata"]["uid"] == workload.job_uid:
            return False
    except NotFound:
        pass
    if await pods_left(client, workload.namespace, workload.job_uid):
        return False
    await client.patch(WORKLOADS, workload.namespace, workload.name, _without_finalizer(live))
    log_event("orphaned workload dropped", workload=f"{workload.namespace}/{workload.name}", uid=workload.job_uid)
    return True


def _owners(workload: Raw) -> Iterable[Raw]:
    owners: Iterable[Raw] = workload["metadata"].get("ownerReferences") or ()
    return owners


def _without_finalizer(workload: Raw) -> Raw:
    """Return a merge patch that removes Kueue's finalizer."""
    metadata = workload["metadata"]
    left = [name for name in metadata.get("finalizers") or () if name != manifest.FINALIZER]
    return {"metadata": {"resourceVersion": metadata["resourceVersion"], "finalizers": left}}


def _with_counts(workload: Raw, request: Request) -> list[Raw]:
    """Return all pod sets of a Workload, with the pod counts of `request`.

    A merge patch must contain all pod sets, because it replaces the whole list.
    """
    counts = {str(pod_set): count for pod_set, count in request}
    pod_sets: Iterable[Raw] = workload["spec"]["podSets"]
    return [{**pod_set, "count": counts.get(pod_set["name"], pod_set.get("count", 1))} for pod_set in pod_sets]


def _conditions(workload: Raw) -> dict[str, Raw]:
    conditions: Iterable[Raw] = workload["status"].get("conditions") or ()
    return {condition["type"]: condition for condition in conditions}


def _merged(conditions: dict[str, Raw], changed: Iterable[Raw]) -> list[Raw]:
    """Return all conditions of a Workload, with the changed conditions replaced.

    A merge patch must contain all conditions, because it replaces the whole list. A condition whose status does not
    change keeps its transition time.
    """
    result = dict(conditions)
    for condition in changed:
        last = conditions.get(condition["type"])
        if last and last.get("status") == condition["status"]:
            condition = {**condition, "lastTransitionTime": last["lastTransitionTime"]}
        result[condition["type"]] = condition
    return list(result.values())


def _condition(workload: Raw, kind: str, status: str, reason: str, message: str) -> Raw:
    return {
        "type": kind,
        "status": status,
        "reason": reason,
        "message": message[:LONGEST_MESSAGE],
        "lastTransitionTime": rfc3339(int(time.time())),
        "observedGeneration": workload["metadata"].get("generation", 0),
    }
