"""Cache of jobs, pods and nodes, which watches of the API server keep up to date.

For each planning pass, the cache returns the observation of one job.
"""

from __future__ import annotations

import dataclasses
import logging
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping

from concertina.agents.hearing import AgentConnectivityMonitor
from concertina.api import pod_names
from concertina.api.spec import template_outdated
from concertina.controller.cache.capacity_queue import CapacityQueue
from concertina.controller.cache.job import CachedJob
from concertina.controller.cache.queues import QueueCache
from concertina.controller.cache.timers import Later, at_once
from concertina.controller.cache.uri_index import UriIndex
from concertina.kube.parse.views import OwnedPod, job_view, other_manager
from concertina.kube.resources import Raw, version_of
from concertina.plan.lifecycle.admission import by_quota
from concertina.plan.observed import (
    AgentView,
    CreateRefusal,
    GangApi,
    JobObservation,
    NodeView,
    PodPhase,
    PodView,
    Refusal,
)

log = logging.getLogger(__name__)
PROGRESS_SECONDS = 1.5
"""Shortest interval in seconds between two writes of a job's status that only update progress.

An agent's report and a planning pass take time too. In total, the status is at most two seconds behind the script.
"""
WAITING_WORDS_SECONDS = 5.0
"""Shortest interval in seconds between two status writes that change no condition, before a job's first round.

Such a write only updates how many of the pods run. Most jobs train before such a write is due.
"""
WRITES_PER_SECOND = 20.0
"""Number of status writes per second, over all jobs, that only update progress."""
WORDS_PER_SECOND = 7.0
"""Number of status writes per second, over all jobs, that only change the message that says what a job waits for."""
WAITING_GAP_SECONDS = 0.2
"""Shortest interval in seconds between two planning passes of a job before its first round.

The job's pods start within a second or two, and each causes five events and a report. The operator can't decide
anything before the last of these events.
"""
DECIDING, LONGEST_GAP_SECONDS = 0.25, 1.0
"""Largest share of the time that the decisions of one job may use, and the longest pause in seconds between its passes.

The agents of a thousand replicas answer at almost the same time. A planning pass after each answer would delay the
other answers (decision "A pause after each pass of a job").
"""

REMEMBERED = 4096
"""Number of deleted jobs whose uid the cache remembers, so that it ignores late events about them.

For jobs that were deleted before these, late events can no longer arrive.
"""


class ClusterCache:
    """Cache of jobs, pods and nodes. It calls `changed(uid)` for each job that must be planned again after a change."""

    def __init__(
        self,
        changed: Callable[[str], None],
        agents: Callable[[str], Mapping[str, AgentView]],
        master_keys: tuple[str, ...] = (),
        hearing: AgentConnectivityMonitor | None = None,
        nodes_watched: bool = True,
        serves: Callable[[str], bool] = lambda namespace: True,
        later: Later = at_once,
        changed_a_little: Callable[[str], None] | None = None,
    ) -> None:
        """Create an empty cache. Watch events fill it.

        Args:
            changed: Function to call with the uid of each job that must be planned again.
            agents: Function that returns the last known states of a job's agents, keyed by pod name.
            master_keys: Ids of the operator's master keys.
            hearing: Monitor of whether the operator's own network connection to agents works.
            nodes_watched: Whether the operator watches nodes.
            serves: Function that returns whether this operator is responsible for the jobs of a namespace.
            later: Function that schedules a call after a delay.
            changed_a_little: Function to call, instead of `changed`, after a change that does not require a planning
                pass.
        """
        self._changed = changed
        self._changed_a_little = changed_a_little or changed
        self._agents = agents
        self._master_keys = master_keys
        self._hearing = hearing or AgentConnectivityMonitor()
        self._nodes_watched = nodes_watched
        self._template_outdated = ""
        self._gang_apis: frozenset[GangApi] | None = None
        self._serves = serves
        self._jobs: dict[str, CachedJob] = {}
        self._forgotten: OrderedDict[str, None] = OrderedDict()
        """Uids of the jobs that were deleted most recently."""
        self._orphans: dict[tuple[str, str], dict[str, PodView]] = {}
        """Pods whose job is not in the cache, by the job's uid and namespace, and then by the pod's uid."""
        self._pod_names: dict[tuple[str, str], dict[str, str]] = {}
        """Uid of the job that owns each pod name, by namespace and by the job name in the pod's name.
        """
        self._pods_since: dict[str, float] = {}
        """Monotonic time at which each pod was first seen, keyed by the pod's uid."""
        self._started_again: dict[str, float] = {}
        """Monotonic time at which a restart of a pod's container was noticed, keyed by the pod's uid."""
        self._nodes: dict[str, NodeView] = {}
        self._uris = UriIndex(self._jobs, changed)
        self.queues = QueueCache(self._jobs, self._job_changed, later)
        self._capacity = CapacityQueue(
            self._jobs, self._nodes if nodes_watched else None, changed, later, self.queues.has_queue
        )

    def on_server_version(self, version: tuple[int, int]) -> None:
        """Store the API server's Kubernetes version, which can change while the operator runs."""
        if (sentence := template_outdated(version)) != self._template_outdated:
            self._template_outdated = sentence
            for uid in self._jobs:
                self._changed(uid)

    def on_gang_apis(self, served: frozenset[GangApi]) -> None:
        """Store which APIs of gang scheduling the API server serves."""
        if served != self._gang_apis:
            self._gang_apis = served
            for uid, job in self._jobs.items():
                if job.view.spec is not None and job.view.spec.scheduling.gang is not None:
                    self._changed(uid)

    def job(self, uid: str) -> CachedJob | None:
        """Return the cached job with this uid; None if the cache does not contain it."""
        return self._jobs.get(uid)

    def jobs(self) -> Iterator[CachedJob]:
        """Iterate over all jobs in the cache."""
        return iter(self._jobs.values())

    def gap(self, uid: str) -> float:
        """Return the shortest allowed time in seconds between the starts of two planning passes of the job."""
        job = self._jobs.get(uid)
        if job is None:
            return 0.0
        return max(WAITING_GAP_SECONDS if job.waits else 0.0, min(job.decided_in / DECIDING, LONGEST_GAP_SECONDS))

    @property
    def progress_every(self) -> float:
        """Shortest time in seconds between two planning passes of a job whose progress is all that has changed.

        This time grows with the number of jobs.
        """
        return max(PROGRESS_SECONDS, len(self._jobs) / WRITES_PER_SECOND)

    def _words_every(self, job: CachedJob) -> float:
        """Return the shortest time in seconds between two status writes of a job that change only messages."""
        shortest = PROGRESS_SECONDS if job.view.status.rounds else WAITING_WORDS_SECONDS
        return max(shortest, len(self._jobs) / WORDS_PER_SECOND)

    # --- events of the API server ----------------------------------------------------------------------------------

    def on_job(self, obj: Raw, only_numbers: bool = False) -> None:
        """Store a TrainingJob from a watch event or from the response to a write.

        A version that is older than the cached version is ignored. An event about a deleted job is ignored too: the
        watch reports a deletion only once, so the job would stay in the cache forever.

        Args:
            obj: Manifest of the job.
            only_numbers: Whether this operator wrote the status and changed only progress in it (`Plan.only_numbers`).
        """
        uid, version = obj["metadata"]["uid"], version_of(obj)
        if uid in self._forgotten or not self._serves(obj["metadata"]["namespace"]) or other_manager(obj):
            return
        job = self._jobs.get(uid)
        if job is not None and version <= job.version:
            return
        try:
            view = job_view(obj, job.view if job else None)
        except Exception:
            # A malformed object must not end the watch of all jobs.
            log.exception("TrainingJob %(namespace)s/%(name)s can't be read and is ignored", obj["metadata"])
            return
        status: Raw = obj.get("status") or {}
        before = job.view if job else None
        if job is None:
            self._jobs[uid] = CachedJob(view, version, status, self._orphans.pop((uid, view.namespace), {}))
        else:
            if job.namespace_ends:
                view = dataclasses.replace(view, deleting=True)
            if view.generation != job.view.generation:
                job.refused = None  # no pod has been created from the new spec yet
            job.view, job.version, job.status = view, version, status
        if view.status.world.round:
            self._hearing.has_trained(uid, view.namespace)
        self._uris.update(uid)
        if only_numbers and before is not None:
            before = dataclasses.replace(before, status=view.status)
        if view != before:
            self._job_changed(uid)

    def forget_job(self, uid: str) -> None:
        """Remove a deleted job from the cache, and remember its uid so that late events about the job are ignored."""
        self._forgotten[uid] = None
        if len(self._forgotten) > REMEMBERED:
            self._forgotten.popitem(last=False)
        self.release_job(uid)

    def release_job(self, uid: str) -> None:
        """Remove a job that this operator no longer serves. The operator may serve the job again later."""
        self._hearing.forget(uid)
        job = self._jobs.pop(uid, None)
        if job is not None:
            self._uris.update(uid)
            self._capacity.job_changed(uid)
            if job.pods:
                self._orphans[uid, job.view.namespace] = job.pods

    def on_pod(self, old: OwnedPod | None, new: OwnedPod | None) -> None:
        """Process a change of a pod. `old` is None for a new pod, and `new` is None for a deleted one."""
        self._index_name(old, new)
        if new is not None:
            self._pods_since.setdefault(new.view.uid, time.monotonic())
            if old is not None and old.view.uid == new.view.uid and new.view.restarts > old.view.restarts:
                self._started_again[new.view.uid] = time.monotonic()
        if old is not None and (new is None or new.view.uid != old.view.uid):
            self._pods_since.pop(old.view.uid, None)
            self._started_again.pop(old.view.uid, None)
        for pod in (old, new):
            if pod is not None and pod.job_uid:
                job = self._jobs.get(pod.job_uid)
                if job is not None and job.view.namespace != pod.namespace:
                    job = None  # a pod of another namespace with the job's uid does not belong to the job
                orphans = (pod.job_uid, pod.namespace)
                pods = job.pods if job else self._orphans.setdefault(orphans, {})
                if pod is new:
                    pods[pod.view.uid] = pod.view
                elif new is None or (new.view.uid, new.job_uid) != (pod.view.uid, pod.job_uid):
                    pods.pop(pod.view.uid, None)
                if job is not None:
                    self._capacity.job_changed(pod.job_uid)
                    is_little = job.waits and _only_starts(old, new)
                    (self._changed_a_little if is_little else self._changed)(pod.job_uid)
                elif not pods:
                    del self._orphans[orphans]
        if old is not None and new is None:
            # A deleted pod may free resource quota for which another pod was refused.
            for uid, job in self._jobs.items():
                if by_quota(job.refused) and job.view.namespace == old.namespace:
                    job.refused = None
                    self._job_changed(uid)

    def _index_name(self, old: OwnedPod | None, new: OwnedPod | None) -> None:
        pod = new or old
        assert pod is not None
        name = pod_names.parse(pod.view.name)
        if name is None:
            return
        key = pod.namespace, name.job
        if new is not None:
            self._pod_names.setdefault(key, {})[new.view.name] = new.job_uid
        elif names := self._pod_names.get(key):
            names.pop(pod.view.name, None)
            if not names:
                del self._pod_names[key]

    def on_node(self, old: NodeView | None, new: NodeView | None) -> None:
        """Process a change of a node. `old` is None for a new node, and `new` is None for a deleted one."""
        node = new or old
        assert node is not None
        if new is None:
            self._nodes.pop(node.name, None)
        else:
            self._nodes[node.name] = new
        for uid, job in self._jobs.items():
            if any(pod.node == node.name for pod in job.pods.values()):
                self._changed(uid)
        if _room(old) != _room(new):
            self._capacity.room_changed()

    # --- results of passes and writes ------------------------------------------------------------------------------

    def planned(self, uid: str, observed: JobObservation) -> None:
        """Record that the operator has applied the plan that it made from the observation `observed`.

        If a pod in the observation has been deleted since, the job is planned again, because the plan did not consider
        the deletion.
        """
        if job := self._jobs.get(uid):
            job.planned = observed.pods
            if any(pod.uid not in job.pods for pod in observed.pods):
                self._changed(uid)

    def create_refused(self, uid: str, kind: Refusal, sentence: str, namespace_ends: bool = False) -> None:
        """Record that the API server refused to create an object of the job.

        Args:
            uid: Uid of the job.
            kind: Kind of the refusal.
            sentence: Message of the API server.
            namespace_ends: Whether the namespace is being deleted. The job then counts as being deleted too.
        """
        if job := self._jobs.get(uid):
            now, before = time.time(), job.refused
            since = before.since if before and before.kind is kind else now
            job.refused = CreateRefusal(kind, sentence[:1000], since, now)
            if namespace_ends:
                job.namespace_ends, job.view = True, dataclasses.replace(job.view, deleting=True)
            self._job_changed(uid)

    def evaluation_job_seen(self, uid: str) -> None:
        """Record that the API server has accepted or refused a Job of `spec.evaluationJob`."""
        if uid in self._jobs:
            self._changed(uid)

    def name_taken(self, uid: str, name: str) -> None:
        """Record that a pod that is not in the cache has this name, so that the next plan chooses another name.

        A user may have created that pod, or the watch has not reported the pod yet.
        """
        if job := self._jobs.get(uid):
            job.taken.add(name)
            self._changed(uid)

    def created(self, uid: str) -> None:
        """Record that the API server has accepted a pod of the job. An earlier refusal of a pod no longer applies."""
        job = self._jobs.get(uid)
        if job and job.refused:
            job.refused = None
            self._capacity.job_changed(uid)

    def _job_changed(self, uid: str) -> None:
        self._capacity.job_changed(uid)
        self._changed(uid)

    # --- observation -----------------------------------------------------------------------------------------------

    def observe(self, uid: str) -> JobObservation | None:
        """Return the current observation of a job, the input of plan(); None if the job is not in the cache."""
        job = self._jobs.get(uid)
        if job is None:
            return None
        names = self._pod_names.get((job.view.namespace, job.view.name), {})
        now = time.monotonic()
        return JobObservation(
            job=job.view,
            pods=tuple(sorted([*job.pods.values(), *job.ended_unseen()], key=lambda pod: pod.order)),
            nodes=self._nodes,
            agents=self._agents(uid),
            fresh_claim=secrets.token_hex(8),
            seen_for={pod: now - self._pods_since[pod] for pod in job.pods if pod in self._pods_since},
            started_again_for={pod: now - self._started_again[pod] for pod in job.pods if pod in self._started_again},
            counted_for=job.counted_for(now),
            secret_made=job.secret_made_at is not None,
            refused=job.refused,
            taken=frozenset(job.taken).union(name for name, owner in names.items() if owner != uid),
            nodes_watched=self._nodes_watched,
            place=self._capacity.place(uid),
            uri_holder=self._uris.holder(uid),
            uri_sharing=self._uris.sharing(uid),
            master_keys=self._master_keys,
            gang_apis=self._gang_apis,
            pod_group=job.pod_group,
            pod_group_deleted=job.pod_group_deleted,
            template_outdated=self._template_outdated,
            operator_isolated=self._hearing.operator_isolated,
            given_up=job.given_up,
            quota=self.queues.view(job),
            evaluation_jobs=job.evaluation_jobs,
            progress_every=self.progress_every,
            words_every=self._words_every(job),
        )


def _only_starts(old: OwnedPod | None, new: OwnedPod | None) -> bool:
    """Return whether a pod has only been created or assigned to a node, so that its agent can't run yet.

    Before a job's first round, such a change needs no planning pass.
    """
    if new is None or new.view.phase is not PodPhase.PENDING or new.view.waiting or new.view.deleting:
        return False
    if old is None:
        return True
    view = dataclasses.replace(new.view, node=old.view.node, awaited_scheduler=old.view.awaited_scheduler)
    return dataclasses.replace(new, view=view) == old


def _room(node: NodeView | None) -> tuple[object, ...]:
    """Return the fields of a node on which the number of pods that fit on the node depends."""
    return (node.ready, node.cordoned, bool(node.fault), node.allocatable) if node else ()
