"""Kueue's objects in the form in which plan() reads them. Data only.

A Workload requests quota for a number of pods from a queue. It is pending until a ClusterQueue reserves the quota. It
is admitted when the quota is reserved and all admission checks are ready. A slice is a Workload that replaces another
Workload of the same job and has a different number of pods.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

from concertina.api.spec import JobSpec, Launcher

LOWEST_PRIORITY = -(2**31)
"""Priority of a pending slice (a replacement Workload) that requests more pods. It preempts no other Workload."""


class PodSet(enum.StrEnum):
    """Names of the sets into which a Kueue Workload divides a job's pods. Each set has its own count."""

    TRAINER = "trainer"
    SPARES = "spares"
    """Pods of standby replicas."""
    RENDEZVOUS = "rendezvous"
    """The pod that serves torchrun's TCPStore, with `launcher: Torchrun`."""


Counts = Mapping[PodSet, int]
"""Number of pods by set."""
Request = tuple[tuple[PodSet, int], ...]
"""Number of pods for each pod set, as tuples in the order of a Workload's pod sets. Actions contain this form."""


def wanted_sets(spec: JobSpec) -> tuple[PodSet, ...]:
    """Return the pod sets that the job's Workload lists.

    Optional sets are listed only if the spec asks for pods of that set.
    """
    spares = (PodSet.SPARES,) if spec.standby_replicas else ()
    rendezvous = (PodSet.RENDEZVOUS,) if spec.launcher is Launcher.TORCHRUN else ()
    return (PodSet.TRAINER, *spares, *rendezvous)


class ConditionName(enum.StrEnum):
    QUOTA_RESERVED = "QuotaReserved"
    ADMITTED = "Admitted"
    EVICTED = "Evicted"
    FINISHED = "Finished"
    PODS_READY = "PodsReady"


class EvictionReason(enum.StrEnum):
    """Reasons in Kueue's Evicted condition that the operator distinguishes."""

    PREEMPTED = "Preempted"
    NODE_FAILURES = "NodeFailures"


class FinishReason(enum.StrEnum):
    """Reasons that the operator writes to Kueue's Finished condition."""

    SUCCEEDED = "Succeeded"
    FAILED = "Failed"
    SLICE_REPLACED = "WorkloadSliceReplaced"
    FAILED_TO_START = "FailedToStart"
    """The resource flavor or an admission check contradicts the pod template."""


@dataclass(frozen=True)
class WorkloadCondition:
    true: bool
    reason: str = ""
    message: str = ""
    since: str = ""
    """Time of the last transition, as text in Kueue's format."""
    generation: int = 0
    """Generation of the Workload to which the condition applies."""


ABSENT = WorkloadCondition(true=False)


@dataclass(frozen=True)
class PodChanges:
    """Fields that Kueue's admission of a pod set adds to each pod of that set."""

    labels: Mapping[str, str] = field(default_factory=dict)
    annotations: Mapping[str, str] = field(default_factory=dict)
    node_selector: Mapping[str, str] = field(default_factory=dict)
    tolerations: tuple[Mapping[str, Any], ...] = ()
    scheduling_gates: tuple[str, ...] = ()


@dataclass(frozen=True)
class Assignment:
    """Quota that a ClusterQueue has reserved for one pod set."""

    count: int
    flavors: Mapping[str, str] = field(default_factory=dict)
    """Name of the assigned ResourceFlavor, by resource."""
    usage: Mapping[str, Decimal] = field(default_factory=dict)
    """Reserved amount of each resource, for all pods of the set together."""
    topology: bool = False
    """True if Kueue has also chosen the topology domains of the pods."""

    def per_pod(self, resource: str) -> Decimal:
        return self.usage.get(resource, Decimal(0)) / self.count if self.count else Decimal(0)


@dataclass(frozen=True)
class WorkloadView:
    name: str
    uid: str
    namespace: str
    version: str
    """The Workload's resourceVersion. A write fails if this version has changed."""
    generation: int
    created: float
    """Creation time in Unix seconds."""
    job_uid: str
    """Uid of the TrainingJob that controls the Workload; empty for Workloads of other kinds of objects."""
    queue: str
    number: int = 0
    """Number of the Workload among the Workloads of its job; 0 if the operator did not create the Workload."""
    job_generation: int = 0
    """Generation of the job when the operator created the Workload."""
    counts: Mapping[str, int] = field(default_factory=dict)
    """Number of pods for which the Workload requests quota, by pod set."""
    requests: Mapping[str, Decimal] = field(default_factory=dict)
    """Amount of each resource that the Workload requests, for all pods together."""
    request_hash: str = ""
    """Hash of the pod sets, without their pod counts, at the time when the operator wrote the Workload.

    If the hash differs from `QuotaView.request_hash`, the Workload is outdated.
    """
    priority: int = 0
    active: bool = True
    paused: bool = False
    """True if the operator has deactivated the Workload and may activate it again."""
    elastic: bool = False
    replaces: str = ""
    """Name of the Workload that this slice replaces."""
    slice_name: str = ""
    """Name of the first Workload in this Workload's series of slices."""
    deleting: bool = False
    has_finalizer: bool = False
    """True if Kueue's finalizer prevents the deletion of the Workload until the operator removes it."""
    cluster_queue: str = ""
    admission: Mapping[str, Assignment] | None = None
    """Reserved quota by pod set; None if no quota is reserved."""
    conditions: Mapping[str, WorkloadCondition] = field(default_factory=dict)
    check_changes: Mapping[str, tuple[PodChanges, ...]] = field(default_factory=dict)
    """Changes that admission checks make to the pods, by pod set."""
    check_messages: tuple[str, ...] = ()
    """Messages of admission checks that are not ready."""
    shortfalls: Mapping[tuple[str, str], Decimal] = field(default_factory=dict)
    """Missing amounts of quota, by resource and flavor, from the Workload's condition QuotaReserved.
    """
    victims: int | None = None
    """Number of Workloads that Kueue is preempting to make room for this Workload; None if Kueue names no number."""
    preemptor_uid: str = ""
    """Uid of the Workload for which Kueue preempted this Workload."""
    shrunk_for: str = ""
    """Transition time of the last eviction because of which the operator lowered the Workload's pod counts."""
    shrunk_at: float | None = None
    """Unix time at which the operator last lowered the Workload's pod counts because of an eviction."""

    def condition(self, name: ConditionName) -> WorkloadCondition:
        return self.conditions.get(name, ABSENT)

    @property
    def finished(self) -> bool:
        return self.condition(ConditionName.FINISHED).true

    @property
    def reserved(self) -> bool:
        """Return whether Kueue counts reserved quota for the Workload."""
        return self.admission is not None and not self.finished

    @property
    def evicted(self) -> bool:
        """Return whether the job must return the quota of this Workload.

        Kueue keeps the Evicted condition until the next admission.
        """
        return self.reserved and self.condition(ConditionName.EVICTED).true

    @property
    def admitted(self) -> bool:
        """Return whether the job may create pods with this Workload's quota."""
        return self.reserved and not self.evicted and self.condition(ConditionName.ADMITTED).true and self.active

    @property
    def granted(self) -> Counts:
        """Number of pods in each pod set for which Kueue counts quota.

        This is the number at the admission, or the Workload's current count if it is lower.
        """
        assignments = self.admission or {}
        return {
            pod_set: min(assignments[pod_set].count, self.counts.get(pod_set, 0))
            for pod_set in PodSet
            if pod_set in assignments
        }


@dataclass(frozen=True)
class FlavorView:
    """ResourceFlavor of Kueue: a kind of nodes, which has its own quota."""

    name: str
    node_labels: Mapping[str, str] = field(default_factory=dict)
    tolerations: tuple[Mapping[str, Any], ...] = ()


@dataclass(frozen=True)
class QuotaView:
    """The Kueue queue of a job, with the job's Workloads (its requests for quota)."""

    queue: str
    """Name of the LocalQueue."""
    workloads: tuple[WorkloadView, ...] = ()
    flavors: Mapping[str, FlavorView] = field(default_factory=dict)
    priority: int = 0
    """Priority of the job's Workloads, from the priority class of the job or of its pod template."""
    request_hash: str = ""
    """Hash of the pod sets that the job asks for, without their counts."""
    preemptor: WorkloadView | None = None
    """Workload for which Kueue preempts the job; None if there is none, or if the operator can't see it."""
    writing: bool = False
    """True if a write to a Workload of the job is in progress or was just refused."""
    refusal: str = ""
    """Message with which the API server refused the last write to a Workload; empty if the write was accepted."""
    conflict: str = ""
    """Sentence on how the admission contradicts the pod template; empty if it does not. No pods are created then.
    """
    trouble: str = ""
    """Reason why the job can't request quota until a person acts; empty if it can."""
