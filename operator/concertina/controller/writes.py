"""Background writes of pods and other objects, for which no planning pass waits.

A job can therefore recover although the API server is slow or refuses its pods (decision "Pods are created and deleted
in the background"). `WriteQueue` limits the writes in two ways. First, at most SLOTS writes of all jobs run at a time,
and the jobs take turns. Second, for each job, the number of pods that are being created is limited. This limit (the
job's window) grows while the API server accepts the pods. `ObjectWriter` performs a single write.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field

from concertina import metrics
from concertina.agents import authority
from concertina.api.pod_names import pod_name, rendezvous_name
from concertina.controller import evaluation_jobs
from concertina.controller.cache.cluster_cache import ClusterCache
from concertina.controller.cache.job import CachedJob
from concertina.controller.master_keys import MasterKeys
from concertina.controller.status_patches import PreconditionFailed
from concertina.controller.workload_writes import WORKLOAD_WRITES, WorkloadWriter
from concertina.kube.client import Client
from concertina.kube.errors import AlreadyExists, Conflict, Forbidden, Invalid, NamespaceEnds, NotFound, WebhookFailed
from concertina.kube.manifests.agent_container import PodSettings
from concertina.kube.manifests.pod import END_POD, pod_manifest, rendezvous_manifest, secret_manifest
from concertina.kube.manifests.pod_group import minimum_patch, pod_group_manifest, resource
from concertina.kube.parse.refusals import refusal
from concertina.kube.resources import PODS, SECRETS, TRAINING_JOBS, Raw
from concertina.plan.actions import (
    Action,
    ApplyPodGroup,
    CreateEvaluationJob,
    CreatePod,
    CreateRendezvous,
    CreateSecret,
    DeleteEvaluationJob,
    DeleteJob,
    DeletePod,
    DeletePodGroup,
    EndPod,
    Send,
)
from concertina.plan.observed import JobView, PodGroup, Refusal
from concertina.plan.quota.workloads import holding, lendable
from concertina.turns import FairLimiter
from concertina_protocol.log import log_event

SLOTS, A_TURN = 16, 16
"""Largest number of writes at a time for all jobs, and number of writes of one job in one turn.

If each turn wrote only one pod, and a thousand jobs started together, all of them would begin to train at the end.
"""
SMALLEST, FIRST, LARGEST = 1, 16, 64
"""Sizes of a job's window: after a refusal, at first, and at most.

It limits how many pods of the job are created at a time. The window grows by one with each successful creation, so that
a resource quota does not refuse a thousand pods at once. Kubernetes' Job controller begins slowly for the same reason.
"""
SECRET_SECONDS = 60.0
"""Seconds after the creation of a job's Secret before the operator creates the Secret again with the next pods.

The operator may not read Secrets, so it can't check whether the Secret still exists. The expected response is 409
(already exists).
"""
GROUP_SECONDS = 60.0
"""Seconds after the last write of a job's pod group before the operator writes the group again with the next pods.

Somebody may have deleted the pod group. The pods would then wait without any message.
"""
metrics.begin_at_zero(metrics.CREATE_REJECTIONS, [kind.name.lower() for kind in Refusal])


@dataclass
class _Window:
    """Background writes of one job, and the limit on how many of its pods are created at a time."""

    wanted: Mapping[Hashable, Action] = field(default_factory=dict)
    """Writes that the last planning pass planned, by a key that identifies each write."""
    under_way: dict[Hashable, asyncio.Task[None]] = field(default_factory=dict)
    """Tasks of the writes in progress, including those that wait for their turn."""
    size: int = FIRST
    full: bool = False
    """True if the last planning pass planned more pods than the window allows."""
    held_back: bool = False
    """True if planned writes wait for other writes of the job, because pods and Workloads must not be written together.
    """


class WriteQueue:
    """Queue of the background writes of all jobs.

    Args:
        write: Function that performs an action and returns whether the API server accepted it.
        failed: Function to call with the error if `write` raises one.
        changed: Function to call with a job's uid when the job must be planned again, because a write that had to wait
            can start now, or because a write was omitted.
        may_act: Function that returns False while another operator may be the leader. Writes are then omitted.
    """

    def __init__(
        self,
        write: Callable[[CachedJob, Action], Awaitable[bool]],
        failed: Callable[[CachedJob, Action, Exception], Awaitable[None]],
        changed: Callable[[str], None],
        may_act: Callable[[], bool],
    ) -> None:
        self._write = write
        self._failed = failed
        self._changed = changed
        self._may_act = may_act
        self._turns = FairLimiter(SLOTS, A_TURN)
        self._windows: dict[str, _Window] = {}

    def start(self, job: CachedJob, actions: Iterable[Action]) -> None:
        """Start the writes that a planning pass has planned, up to the job's limit on pods that are being created.

        Writes that are already in progress are not started again. Writes that exceed the limit are planned again by a
        later pass. A write that waits for its turn is dropped if the next pass does not plan it again (decision "Queued
        pod writes follow the latest pass"). Pods that have been created since the observation are left out.
        """
        window = self._windows.setdefault(job.view.uid, _Window())
        window.wanted = {_identity(action): action for action in actions}
        existing_names = {pod.name for pod in job.pods.values()}
        free_slots, window.full, window.held_back = window.size - _creates(window), False, False
        for key, action in window.wanted.items():
            creates = isinstance(action, CreatePod | CreateRendezvous)
            if key not in window.under_way and _excludes(window, action):
                window.held_back = True
                continue
            if creates and free_slots <= 0:
                window.full = True
                continue
            if key not in window.under_way and _name(job, action) not in existing_names:
                window.under_way[key] = asyncio.create_task(self._do(job, window, key, action))
                free_slots -= creates
        self._drop_idle(job.view.uid, window)

    def forget(self, uid: str) -> None:
        """Remove a deleted job. Its writes in progress continue to their end, and its waiting writes are dropped."""
        if window := self._windows.pop(uid, None):
            window.wanted = {}

    def close(self) -> None:
        """Cancel all background writes that are in progress or waiting."""
        for window in self._windows.values():
            for task in window.under_way.values():
                task.cancel()

    async def _do(self, job: CachedJob, window: _Window, key: Hashable, action: Action) -> None:
        creates = isinstance(action, CreatePod | CreateRendezvous)
        error: Exception | None = None
        accepted: bool | None = None
        try:
            async with self._turns.turn(job.lane, job.view.uid):
                if not self._may_act():
                    self._changed(job.view.uid)
                elif key in window.wanted:
                    action = window.wanted[key]
                    accepted = await self._write(job, action)
        except Exception as failure:
            error, accepted = failure, False
        finally:
            del window.under_way[key]
        if creates and accepted is not None:
            window.size = min(window.size + 1, LARGEST) if accepted else SMALLEST
        if (creates and window.full) or (window.held_back and not _excludes_others(window)):
            self._changed(job.view.uid)
        if error is not None:
            await self._failed(job, action, error)
        self._drop_idle(job.view.uid, window)

    def _drop_idle(self, uid: str, window: _Window) -> None:
        """Remove a job's entry from the queue if no write of the job is in progress or waiting, to save memory."""
        if not window.under_way and window.size >= FIRST and self._windows.get(uid) is window:
            del self._windows[uid]


def _excludes(window: _Window, action: Action) -> bool:
    """Return whether the action must wait until other writes of the job have ended.

    Before the operator returns quota to Kueue, it counts the job's pods. No pod may be created between this count and
    the end of the write that returns the quota.
    """
    if isinstance(action, CreatePod | CreateRendezvous):
        return any(isinstance(key, WORKLOAD_WRITES) for key in window.under_way)
    return isinstance(action, WORKLOAD_WRITES) and _creates(window) > 0


def _excludes_others(window: _Window) -> bool:
    """Return whether a write of the job is in progress that excludes all other writes of the job."""
    kinds = (CreatePod, CreateRendezvous, *WORKLOAD_WRITES)
    return any(isinstance(key, kinds) for key in window.under_way)


def _creates(window: _Window) -> int:
    return sum(isinstance(key, CreatePod | CreateRendezvous) for key in window.under_way)


def _name(job: CachedJob, action: Action) -> str:
    """Return the name of the pod that the action creates; empty if it creates no pod."""
    match action:
        case CreateRendezvous():
            return rendezvous_name(job.view.name, action.round)
        case CreatePod():
            return pod_name(job.view.name, action.index, action.attempt)
        case _:
            return ""


def _identity(action: Action) -> Hashable:
    """Return a key that is equal for two actions that need to be performed only once.

    For example, a pod is created once, even if a later plan lists other nodes to avoid.
    """
    if isinstance(action, CreatePod):
        return CreatePod(action.index, action.attempt)
    if isinstance(action, CreateRendezvous):
        return CreateRendezvous(action.round)
    if isinstance(action, DeletePod):
        return DeletePod(action.name, action.uid, "", action.force)
    return action


@dataclass
class ObjectWriter:
    """Writer of pods, pod groups, Secrets, Jobs and Workloads. Each call performs one write."""

    client: Client
    """Client that tries each write only once. A later planning pass plans a failed write again."""
    cache: ClusterCache
    pod_settings: PodSettings
    keys: MasterKeys
    assume: Callable[[Raw], None]
    """Function that stores a pod returned by a write in the cache, so that plans use this version."""
    workloads: WorkloadWriter | None = None
    """Writer for Kueue's Workloads; None without Kueue."""

    async def write(self, job: CachedJob, action: Action) -> bool:
        """Perform the action. Return False if the API server refused it, and record the refusal in the cache.

        Raises:
            TypeError: When the action is of an unknown kind.
            PreconditionFailed: When the observation is outdated, or the job's Secret was refused.
        """
        match action:
            case CreateSecret():
                await self._create_secret(job)
            case ApplyPodGroup():
                await self._apply_pod_group(job, action.group)
            case DeletePodGroup():
                await self._delete_pod_group(job, action)
            case CreatePod() | CreateRendezvous():
                return await self._create_within_quota(job, action)
            case DeletePod():
                await self._delete_pod(job, action)
            case EndPod():
                await self._end_pod(job, action)
            case CreateEvaluationJob():
                await evaluation_jobs.create(self.client, job, action)
                self.cache.evaluation_job_seen(job.view.uid)
            case DeleteEvaluationJob():
                await evaluation_jobs.delete(self.client, job, action)
            case DeleteJob():
                namespace, name, uid = job.view.namespace, job.view.name, job.view.uid
                await self.client.delete(TRAINING_JOBS, namespace, name, uid=uid, propagation="Background")
                log_event("job deleted", **job.named())
            case Send():
                raise TypeError(f"no code performs this action of the plan: {action!r}")
            case _:
                if self.workloads is None:
                    raise TypeError(f"no code performs this action of the plan: {action!r}")
                return await self.workloads.write(job, action)
        return True

    async def _create_within_quota(self, job: CachedJob, create: CreatePod | CreateRendezvous) -> bool:
        """Create a pod.

        For a job with a Kueue queue, check first that its Workload is admitted and has quota for the pod.

        Raises:
            PreconditionFailed: When there is no quota left for the pod.
        """
        name = _name(job, create)
        if create.quota is None:
            if self.cache.queues.has_queue(job):
                raise PreconditionFailed(f"pod {name} was planned before the job had a queue")
        else:
            lender = lendable(self.cache.queues.of_job(job.view.uid))
            used = holding(job.pods.values()) + len(job.creating - {pod.name for pod in job.pods.values()})
            if lender != create.quota.lender or used >= lender[1]:
                raise PreconditionFailed(f"the job no longer has quota for pod {name}")
        job.creating.add(name)
        try:
            return await self._create_pod(job, create)
        finally:
            job.creating.discard(name)

    async def _create_secret(self, job: CachedJob) -> None:
        """Create the job's Secret, unless it was created recently.

        Raises:
            TypeError: When the job's master key is not known.
            PreconditionFailed: When the API server refuses the Secret.
        """
        async with job.secret:
            if job.secret_made_at is not None and time.monotonic() <= job.secret_made_at + SECRET_SECONDS:
                return
            key = self.keys.of(job.view.status.master_key)
            if key is None:
                raise TypeError("the Secret can't be made: the master key of the job is not known")
            data = await asyncio.to_thread(_identity_of_agents, key, job.view)
            try:
                await self.client.create(SECRETS, job.view.namespace, secret_manifest(job.view, data))
            except AlreadyExists:
                pass  # an earlier pass created it, because its name contains the job's uid
            except (Conflict, Forbidden, Invalid, WebhookFailed) as error:
                self._refused(job, error, "Secret")
                job.secret_made_at = None
                raise PreconditionFailed(f"the Secret was refused: {error.message}") from error
            job.secret_made_at = time.monotonic()

    async def _apply_pod_group(self, job: CachedJob, group: PodGroup) -> None:
        """Create the job's pod group or update its minimum number of pods, unless that was done recently.

        Raises:
            PreconditionFailed: When an earlier group with the same name is still being deleted, or when the API server
                refuses the group.
        """
        async with job.pod_group_lock:
            is_recent = job.pod_group_made_at is not None and time.monotonic() <= job.pod_group_made_at + GROUP_SECONDS
            if job.pod_group == group and is_recent:
                return
            try:
                await self._write_pod_group(job.view, group)
            except (Conflict, Forbidden, Invalid, WebhookFailed) as error:
                self._refused(job, error, group.name)
                raise PreconditionFailed(f"the API server refused the pod group: {error.message}") from error
            if job.pod_group != group:
                log_event("pod group written", **job.named(), pod_group=group.name, min_count=group.min_count)
            job.pod_group, job.pod_group_made_at, job.pod_group_deleted = group, time.monotonic(), False

    async def _write_pod_group(self, view: JobView, group: PodGroup) -> None:
        """Create the pod group. If it already exists, update its minimum number of pods.

        Raises:
            PreconditionFailed: When the spec is invalid, or an earlier group with the same name is still being deleted.
        """
        if view.spec is None:
            raise PreconditionFailed("the pod group can't be made: the spec of the job can't be read anymore")
        kind, manifest = resource(group.api), pod_group_manifest(view, view.spec, group)
        try:
            await self.client.create(kind, view.namespace, manifest, strict=True)
            return
        except AlreadyExists:
            stored = await self.client.get(kind, view.namespace, group.name)
        if "deletionTimestamp" in stored["metadata"]:
            raise PreconditionFailed(f"pod group {group.name} is being deleted")
        patch = minimum_patch(group)
        if not _contains(stored, patch):
            await self.client.patch(kind, view.namespace, group.name, patch)

    async def _delete_pod_group(self, job: CachedJob, delete: DeletePodGroup) -> None:
        async with job.pod_group_lock:
            await self.client.delete(resource(delete.api), job.view.namespace, delete.name)
            job.pod_group, job.pod_group_deleted = None, True
        log_event("pod group deleted", **job.named(), pod_group=delete.name)

    async def _create_pod(self, job: CachedJob, create: CreatePod | CreateRendezvous) -> bool:
        """Create a pod. Return False if the API server refuses it.

        Raises:
            PreconditionFailed: When the spec is invalid, or when a pod with this name existed and has already been
                deleted.
        """
        view = job.view
        if view.spec is None:
            raise PreconditionFailed("the pod can't be made: the spec of the job can't be read anymore")
        if isinstance(create, CreateRendezvous):
            manifest = rendezvous_manifest(view, view.spec, create)
        else:
            if not create.rendezvous:
                await self._create_secret(job)
            if create.pod_group is not None and create.pod_group.name:
                await self._apply_pod_group(job, create.pod_group)
            manifest = pod_manifest(view, view.spec, create, self.pod_settings)
        name = manifest["metadata"]["name"]
        try:
            stored = await self.client.create(PODS, view.namespace, manifest, strict=True)
        except AlreadyExists:
            # The pod belongs to this job if an earlier response was lost or the cache is outdated.
            try:
                stored = await self.client.get(PODS, view.namespace, name)
            except NotFound as error:
                raise PreconditionFailed(f"pod {name} existed and was deleted") from error
            owners: Iterable[Raw] = stored["metadata"].get("ownerReferences") or ()
            if not any(owner["uid"] == view.uid for owner in owners):
                # The pod may belong to any owner, so it is not deleted (decision "Pod names that are taken are
                # skipped").
                log_event("name taken", **job.named(), pod=name)
                self.cache.name_taken(view.uid, name)
                return True
        except (Conflict, Forbidden, Invalid, WebhookFailed) as error:
            self._refused(job, error, name)
            return False
        self.cache.created(view.uid)
        log_event("pod created", **job.named(), pod=name)
        self.assume(stored)
        return True

    def _refused(self, job: CachedJob, error: Conflict | Forbidden | Invalid | WebhookFailed, object_name: str) -> None:
        kind = refusal(error)
        metrics.CREATE_REJECTIONS.labels(kind.name.lower()).inc()
        ends = isinstance(error, NamespaceEnds)
        self.cache.create_refused(job.view.uid, kind, error.message, namespace_ends=ends)
        log_event("create refused", **job.named(), pod=object_name, kind=kind.name, message=error.message)

    async def _delete_pod(self, job: CachedJob, delete: DeletePod) -> None:
        grace = 0 if delete.force else None
        try:
            deleting_pod = await self.client.delete(PODS, job.view.namespace, delete.name, uid=delete.uid, grace=grace)
        except Conflict:
            return  # another pod has that name now
        log_event("pod deleted", **job.named(), pod=delete.name, reason=delete.reason, force=delete.force)
        if deleting_pod is not None and not delete.force:
            self.assume(deleting_pod)

    async def _end_pod(self, job: CachedJob, end: EndPod) -> None:
        """Stop a pod's containers without deleting the pod, so that its log stays readable.

        Decision "Pods of a failed job are stopped, not deleted" gives the reason.
        """
        patch: list[Raw] = [
            {"op": "test", "path": "/metadata/uid", "value": end.uid},
            *({"op": "add", "path": f"/spec/{field}", "value": value} for field, value in END_POD.items()),
        ]
        try:
            stored = await self.client.patch(PODS, job.view.namespace, end.name, patch)
        except (NotFound, Forbidden, Invalid) as error:  # if the pod does not end, it is deleted later
            log_event("end refused", **job.named(), pod=end.name, message=error.message)
            return
        log_event("pod ended", **job.named(), pod=end.name, reason=end.reason)
        self.assume(stored)


def _contains(stored: Raw, patch: Raw) -> bool:
    """Return whether the object `stored` already has all values of a merge patch."""
    return all(
        _contains(stored.get(key) or {}, value) if isinstance(value, dict) else stored.get(key) == value
        for key, value in patch.items()
    )


def _identity_of_agents(master_key: bytes, view: JobView) -> dict[str, str]:
    return authority.of_job(master_key, view.uid, view.created).secret_data()
