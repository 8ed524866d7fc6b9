"""The Kueue Workloads of one job, sorted by their purpose."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from concertina.plan.actions import DropWorkload, WorkloadKey
from concertina.plan.facts.cached import cached
from concertina.plan.facts.lending import Size
from concertina.plan.kueue import (
    Assignment,
    ConditionName,
    FinishReason,
    FlavorView,
    PodChanges,
    PodSet,
    QuotaView,
    WorkloadView,
)
from concertina.plan.observed import PodView
from concertina.plan.quota import request

PODSET_LABEL = "kueue.x-k8s.io/podset"
LOCAL_QUEUE_LABEL = "kueue.x-k8s.io/local-queue-name"
CLUSTER_QUEUE_LABEL = "kueue.x-k8s.io/cluster-queue-name"
WORKLOAD_ANNOTATION = "kueue.x-k8s.io/workload"
SLICE_ANNOTATION = "kueue.x-k8s.io/workload-slice-name"
UNCONSTRAINED_ANNOTATION = "kueue.x-k8s.io/podset-unconstrained-topology"
TOPOLOGY_GATE = "kueue.x-k8s.io/topology"
LONGEST_LABEL = 63


@dataclass(frozen=True)
class JobWorkloads:
    quota: QuotaView

    @cached
    def open(self) -> tuple[WorkloadView, ...]:
        """Workloads that are neither finished nor being deleted, the oldest first."""
        live = (w for w in self.quota.workloads if not w.finished and not w.deleting)
        return tuple(sorted(live, key=lambda w: (w.number, w.created, w.name)))

    @cached
    def leaving(self) -> tuple[WorkloadView, ...]:
        """Workloads of the job that are being deleted."""
        return tuple(w for w in self.quota.workloads if w.deleting)

    @cached
    def finished(self) -> tuple[WorkloadView, ...]:
        return tuple(w for w in self.quota.workloads if w.finished and not w.deleting)

    @cached
    def holders(self) -> tuple[WorkloadView, ...]:
        """Workloads with reserved quota. There are two only while a newer Workload replaces an older one."""
        return tuple(w for w in self.open if w.reserved)

    @property
    def holder(self) -> WorkloadView | None:
        """Workload whose quota determines how many pods the job may have; None if no Workload has quota."""
        return self.holders[-1] if self.holders else None

    @cached
    def pending(self) -> tuple[WorkloadView, ...]:
        return tuple(w for w in self.open if not w.reserved)

    @property
    def next_number(self) -> int:
        return 1 + max((w.number for w in self.quota.workloads), default=0)

    def failed_to_start(self, generation: int) -> WorkloadView | None:
        """Return the Workload whose admission adds fields that contradict the job's pod template, or None.

        A Workload that is older than the last change of the job's spec is ignored.
        """
        for workload in self.finished:
            reason = workload.condition(ConditionName.FINISHED).reason
            if reason == FinishReason.FAILED_TO_START and workload.job_generation == generation:
                return workload
        return None


def key(workload: WorkloadView) -> WorkloadKey:
    return WorkloadKey(workload.name, workload.uid, workload.version)


def drops(workloads: Iterable[WorkloadView]) -> tuple[DropWorkload, ...]:
    """Return the actions that delete the pending Workloads. These have no quota, so they can be deleted at once."""
    return tuple(DropWorkload(key(workload), pods_left=None) for workload in workloads)


def granted_size(workload: WorkloadView) -> Size:
    return request.size_of(workload.granted)


def lendable(workloads: Iterable[WorkloadView]) -> tuple[str, int]:
    """Return the name of the Workload whose quota new pods use, and its total number of pods; ("", 0) if there is none.

    The plan contains this result. Before the operator creates a pod, it computes the result again, and creates the pod
    only if the result is the same.
    """
    holder = newest(workloads)
    return (holder.name, sum(holder.granted.values())) if holder is not None and holder.admitted else ("", 0)


def newest(workloads: Iterable[WorkloadView]) -> WorkloadView | None:
    """Return the newest of the given Workloads that has reserved quota; None if none has."""
    holders = (w for w in workloads if not w.finished and not w.deleting and w.reserved)
    return max(holders, key=lambda w: (w.number, w.created, w.name), default=None)


# --- pods


def holding(pods: Iterable[PodView]) -> int:
    """Return how many pods use quota: all of the given pods, except those whose containers have all ended."""
    return sum(not pod.released for pod in pods)


def room(workload: WorkloadView, pods: Iterable[PodView]) -> Mapping[PodSet, int]:
    """Return how many more pods of each pod set may be created with the Workload's quota.

    The total over all pod sets is limited too. If the count of one set is lowered, pods of that set use quota until
    they end, and pods of another set must not use this quota.
    """
    using = [pod for pod in pods if not pod.released]
    left = max(0, sum(workload.granted.values()) - len(using))
    result: dict[PodSet, int] = {}
    for pod_set, count in workload.granted.items():
        own = sum((pod.pod_set or _set_of(pod)) == pod_set for pod in using)
        result[pod_set] = min(left, max(0, count - own))
    return result


def _set_of(pod: PodView) -> PodSet:
    """Return the pod set to which a pod belongs. A pod without a label for its set is older than the job's queue."""
    return PodSet.RENDEZVOUS if pod.index is None else PodSet.TRAINER


def same_flavors(workload: WorkloadView) -> bool:
    """Return whether standby replicas have the same flavors as other replicas, so that they can replace each other."""
    assignments = workload.admission or {}
    sets = [assignments[name].flavors for name in (PodSet.TRAINER, PodSet.SPARES) if name in assignments]
    return all(flavors == sets[0] for flavors in sets)


# --- fields that an admission adds to pods


def changes(workload: WorkloadView, flavors: Mapping[str, FlavorView]) -> Mapping[PodSet, PodChanges]:
    """Return the fields that resource flavors and admission checks add to the pods of each set."""
    assignments = workload.admission or {}
    return {
        pod_set: merged(
            _of_queue(workload, pod_set, assignments[pod_set]),
            *_of_flavors(assignments[pod_set], flavors),
            *workload.check_changes.get(pod_set, ()),
        )
        for pod_set in PodSet
        if pod_set in assignments
    }


def missing_flavors(workload: WorkloadView, quota: QuotaView) -> tuple[str, ...]:
    """Return the resource flavors that Kueue assigned to the Workload but that the operator does not know.

    Without a flavor's node labels, pods could run on the wrong nodes.
    """
    assignments = (workload.admission or {}).values()
    names = {flavor for assignment in assignments for flavor in assignment.flavors.values()}
    return tuple(sorted(names - quota.flavors.keys()))


def merged(*parts: PodChanges) -> PodChanges:
    tolerations: list[Mapping[str, object]] = []
    for part in parts:
        tolerations += [toleration for toleration in part.tolerations if toleration not in tolerations]
    return PodChanges(
        labels={name: value for part in parts for name, value in part.labels.items()},
        annotations={name: value for part in parts for name, value in part.annotations.items()},
        node_selector={name: value for part in parts for name, value in part.node_selector.items()},
        tolerations=tuple(tolerations),
        scheduling_gates=tuple(dict.fromkeys(gate for part in parts for gate in part.scheduling_gates)),
    )


def _of_flavors(assignment: Assignment, flavors: Mapping[str, FlavorView]) -> list[PodChanges]:
    known = (flavors[name] for name in dict.fromkeys(assignment.flavors.values()) if name in flavors)
    return [PodChanges(node_selector=flavor.node_labels, tolerations=flavor.tolerations) for flavor in known]


def _of_queue(workload: WorkloadView, pod_set: PodSet, assignment: Assignment) -> PodChanges:
    """Return the labels and annotations by which Kueue recognizes the pods of a pod set."""
    queues = {LOCAL_QUEUE_LABEL: workload.queue, CLUSTER_QUEUE_LABEL: workload.cluster_queue}
    labels = {PODSET_LABEL: str(pod_set)} | {
        label: name for label, name in queues.items() if name and len(name) <= LONGEST_LABEL
    }
    annotations: dict[str, str] = {}
    gates: tuple[str, ...] = ()
    if assignment.topology:
        annotations = {WORKLOAD_ANNOTATION: workload.name, UNCONSTRAINED_ANNOTATION: "true"}
        gates = (TOPOLOGY_GATE,)
    if workload.elastic:
        annotations[SLICE_ANNOTATION] = workload.slice_name or workload.name
    return PodChanges(labels=labels, annotations=annotations, scheduling_gates=gates)
