"""Cache of Kueue's objects in the version last received from the API server: Workloads, flavors and priority classes.

Workloads that do not belong to TrainingJobs are stored too, because a job may be preempted for one of them.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import TypeVar

from concertina import backoff
from concertina.controller.cache.job import CachedJob
from concertina.controller.cache.timers import Later
from concertina.kube.manifests.workload import conflict
from concertina.kube.parse.workloads import PriorityClassView
from concertina.kube.resources import Raw
from concertina.plan.kueue import FlavorView, QuotaView, WorkloadView
from concertina.plan.quota import workloads as job_workloads

KUEUE, KUBERNETES = "kueue.x-k8s.io", "scheduling.k8s.io"
"""API groups of the two kinds of priority classes: Kueue's WorkloadPriorityClass and Kubernetes' PriorityClass."""
FIRST_SECONDS, LONGEST_SECONDS = 0.2, 10.0
"""Shortest and longest delay in seconds before a refused write is tried again."""


class Service(enum.Enum):
    """Availability of Kueue's API, as far as the operator knows."""

    ABSENT = enum.auto()
    """The API server does not serve Kueue's API, so no queue limits any job."""
    UNREADABLE = enum.auto()
    """Kueue's API is served, but the operator may not read Workloads. Jobs with a queue must wait."""
    READY = enum.auto()


class QueueCache:
    """Cache of Kueue's objects. It calls `changed(uid)` for each job that a change of these objects concerns."""

    def __init__(self, jobs: Mapping[str, CachedJob], changed: Callable[[str], None], later: Later) -> None:
        self._jobs = jobs
        self._changed = changed
        self._later = later
        self._service = Service.ABSENT
        self._workloads: dict[str, WorkloadView] = {}
        """All Workloads, keyed by uid."""
        self._of_job: dict[str, dict[str, WorkloadView]] = {}
        """Workloads of each job: by the job's uid, then by the Workload's uid."""
        self._victims: dict[str, set[str]] = {}
        """Uids of the preempted Workloads, by the uid of the Workload for which they were preempted."""
        self._flavors: dict[str, FlavorView] = {}
        self._workload_classes: dict[str, PriorityClassView] = {}
        self._pod_classes: dict[str, PriorityClassView] = {}

    @property
    def served(self) -> bool:
        """Return whether the operator knows that the API server serves Kueue's API."""
        return self._service is not Service.ABSENT

    # --- events of the API server ----------------------------------------------------------------------------------

    def set_service(self, service: Service) -> None:
        """Store whether Kueue's API is available. If it is no longer served, remove its objects from the cache."""
        if service is self._service:
            return
        self._service = service
        self._all_changed()
        if service is Service.ABSENT:
            self._workloads.clear()
            self._of_job.clear()
            self._victims.clear()
            self._flavors.clear()
            self._workload_classes.clear()
            self._pod_classes.clear()
            for job in self._jobs.values():
                self.accepted(job)

    def on_workload(self, old: WorkloadView | None, new: WorkloadView | None) -> None:
        """Process a change of a Workload. `old` is None for a new Workload, and `new` is None for a deleted one."""
        for view in (old, new):
            if view is None:
                continue
            mine = self._of_job.setdefault(view.job_uid, {}) if view.job_uid else {}
            if view is new:
                self._workloads[view.uid] = mine[view.uid] = view
            elif new is None or new.uid != view.uid or new.job_uid != view.job_uid:
                self._workloads.pop(view.uid, None)
                mine.pop(view.uid, None)
            if view.job_uid and not mine:
                del self._of_job[view.job_uid]
        self._index_victim(old, new)
        uids = {view.job_uid for view in (old, new) if view is not None}
        victims = {victim for view in (old, new) if view is not None for victim in self._victims.get(view.uid, ())}
        uids |= {self._workloads[victim].job_uid for victim in victims if victim in self._workloads}
        for uid in uids & self._jobs.keys():
            self._changed(uid)

    def _index_victim(self, old: WorkloadView | None, new: WorkloadView | None) -> None:
        """Record for which other Workload (the preemptor) Kueue has preempted this Workload.

        A later change of the preemptor then also counts as a change for the preempted job.
        """
        if old is not None and old.preemptor_uid and old.uid in self._victims.get(old.preemptor_uid, ()):
            self._victims[old.preemptor_uid].discard(old.uid)
            if not self._victims[old.preemptor_uid]:
                del self._victims[old.preemptor_uid]
        if new is not None and new.preemptor_uid:
            self._victims.setdefault(new.preemptor_uid, set()).add(new.uid)

    def on_flavor(self, old: FlavorView | None, new: FlavorView | None) -> None:
        _replace(self._flavors, old, new)
        self._all_changed()

    def on_workload_class(self, old: PriorityClassView | None, new: PriorityClassView | None) -> None:
        _replace(self._workload_classes, old, new)
        self._all_changed()

    def on_pod_class(self, old: PriorityClassView | None, new: PriorityClassView | None) -> None:
        _replace(self._pod_classes, old, new)
        self._all_changed()

    def _all_changed(self) -> None:
        """Call `changed` for every job that has, or may have had, a Kueue queue."""
        for uid, job in self._jobs.items():
            if job.view.queue or uid in self._of_job or job.view.status.queue is not None:
                self._changed(uid)

    # --- results of writes -----------------------------------------------------------------------------------------

    def refused(self, job: CachedJob, message: str) -> None:
        """Record that the API server refused a write to a Workload of the job, and pause such writes.

        While Kueue restarts, its webhooks do not answer, and every write is refused at once.
        """
        job.quota_refusal = message[:1000]
        job.quota_paused = True
        pause = backoff.seconds(job.quota_refusals, FIRST_SECONDS, LONGEST_SECONDS)
        job.quota_refusals += 1
        self._later(pause, functools.partial(self._resume, job))
        self._changed(job.view.uid)

    def accepted(self, job: CachedJob) -> None:
        """Record that the API server accepted a write to a Workload of the job. Earlier refusals no longer count."""
        job.quota_refusal, job.quota_refusals = "", 0

    def _resume(self, job: CachedJob) -> None:
        job.quota_paused = False
        self._changed(job.view.uid)

    # --- observation -----------------------------------------------------------------------------------------------

    def has_queue(self, job: CachedJob) -> bool:
        """Return whether a Kueue queue decides when the job starts."""
        return bool(self._queue_of(job))

    def view(self, job: CachedJob) -> QuotaView | None:
        """Return the state of the job's Kueue queue and of its Workloads; None if the job has no queue."""
        queue, view = self._queue_of(job), job.view
        if not queue:
            return None
        workloads = tuple(self._of_job.get(view.uid, {}).values())
        priority, trouble = self._priority(job)
        holder = job_workloads.newest(workloads)
        if trouble and holder is not None:
            priority = holder.priority
        return QuotaView(
            queue=queue,
            workloads=workloads,
            flavors=self._flavors,
            priority=priority,
            request_hash=view.request_hash,
            preemptor=self._preemptor(workloads),
            writing=job.writing_quota or job.quota_paused,
            refusal=job.quota_refusal,
            conflict=self._conflict(job, workloads),
            trouble=trouble or self._trouble(job),
        )

    def of_job(self, uid: str) -> tuple[WorkloadView, ...]:
        """Return the Workloads in the cache that belong to the job."""
        return tuple(self._of_job.get(uid, {}).values())

    def orphans(self) -> Iterator[WorkloadView]:
        """Iterate over the Workloads of TrainingJobs that are being deleted and whose job is not in the cache."""
        for uid, workloads in self._of_job.items():
            if uid not in self._jobs:
                yield from (view for view in workloads.values() if view.deleting and view.has_finalizer)

    def class_ref(self, job: CachedJob) -> Raw | None:
        """Return the reference to the job's priority class for a Workload; None if the job has no priority class."""
        if job.view.priority_class:
            return {"group": KUEUE, "kind": "WorkloadPriorityClass", "name": job.view.priority_class}
        pod_class = self._pod_class(job)
        return {"group": KUBERNETES, "kind": "PriorityClass", "name": pod_class.name} if pod_class else None

    def _queue_of(self, job: CachedJob) -> str:
        """Return the name of a job's Kueue LocalQueue; empty if the job has none.

        If the job has Workloads, the result is the queue of these Workloads, even after the job's queue label is
        removed. Otherwise a user could bypass the quota by removing the label.
        """
        if self._service is Service.ABSENT:
            return ""
        if job.view.queue:
            return job.view.queue
        workloads = self._of_job.get(job.view.uid)
        return next((view.queue for view in workloads.values()), "") if workloads else ""

    def _priority(self, job: CachedJob) -> tuple[int, str]:
        """Return the priority of the job's Workloads, and the reason if the priority is not known."""
        if name := job.view.priority_class:
            workload_class = self._workload_classes.get(name)
            if workload_class is None:
                return 0, f"The WorkloadPriorityClass {name}, which the job's label names, does not exist"
            return workload_class.value, ""
        pod_class = self._pod_class(job)
        return (pod_class.value if pod_class else 0), ""

    def _pod_class(self, job: CachedJob) -> PriorityClassView | None:
        """Return the PriorityClass of the job's pods: the one named by the template, or the cluster's default."""
        spec = job.view.spec
        name = str((spec.template.spec.model_extra or {}).get("priorityClassName") or "") if spec else ""
        if name:
            return self._pod_classes.get(name)
        return next((view for view in self._pod_classes.values() if view.is_default), None)

    def _trouble(self, job: CachedJob) -> str:
        if job.view.prebuilt_workload:
            return (
                "The label kueue.x-k8s.io/prebuilt-workload-name is not supported: remove it, and the operator "
                "creates the Workload itself"
            )
        if self._service is Service.UNREADABLE:
            return "The operator may not read Workloads of Kueue: its roles must allow it (docs/queues.md)"
        return ""

    def _preemptor(self, workloads: tuple[WorkloadView, ...]) -> WorkloadView | None:
        uids = [view.preemptor_uid for view in workloads if view.evicted and view.preemptor_uid]
        return self._workloads.get(uids[-1]) if uids else None

    def _conflict(self, job: CachedJob, workloads: tuple[WorkloadView, ...]) -> str:
        spec, holder = job.view.spec, job_workloads.newest(workloads)
        if spec is None or holder is None or not holder.admitted:
            return ""
        compared = job.view.generation, job_workloads.changes(holder, self._flavors)
        if job.conflict is None or job.conflict[0] != compared:
            job.conflict = compared, conflict(spec, compared[1])
        return job.conflict[1]


Named = TypeVar("Named", FlavorView, PriorityClassView)


def _replace(views: dict[str, Named], old: Named | None, new: Named | None) -> None:
    if new is not None:
        views[new.name] = new
    elif old is not None:
        views.pop(old.name, None)
