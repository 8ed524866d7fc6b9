"""Objects of Kueue as plan() reads them. Data only.

A Workload asks a queue for the quota of a number of pods. It is pending until a ClusterQueue reserves the quota, and
admitted once all admission checks are ready too. A slice is a Workload that replaces another one of the same job with
another number of pods.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

from concertina.api.spec import JobSpec, Launcher

LOWEST_PRIORITY = -(2**31)
"""Priority of a pending growth slice, which therefore preempts no other Workload."""


class PodSet(enum.StrEnum):
    """Sets of a job's pods, each with a count of its own in a Workload."""

    TRAINER = "trainer"
    SPARES = "spares"
    """Standby replicas."""
    RENDEZVOUS = "rendezvous"
    """The pod that serves torchrun's store, with `launcher: Torchrun`."""


Counts = Mapping[PodSet, int]
"""Number of pods by set."""
Request = tuple[tuple[PodSet, int], ...]
"""Number of pods by set, in the order of a Workload's pod sets, as part of an action."""


def wanted_sets(spec: JobSpec) -> tuple[PodSet, ...]:
    """Return the pod sets that the job asks for. A set without pods is asked for only if the job wants some in it."""
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
    """Reasons of the condition Evicted to which the operator reacts in a special way."""

    PREEMPTED = "Preempted"
    NODE_FAILURES = "NodeFailures"


class FinishReason(enum.StrEnum):
    """Reasons of the condition Finished."""

    SUCCEEDED = "Succeeded"
    FAILED = "Failed"
    SLICE_REPLACED = "WorkloadSliceReplaced"
    FAILED_TO_START = "FailedToStart"
    """The flavor or an admission check contradicts the template of the pods."""


@dataclass(frozen=True)
class WorkloadCondition:
    true: bool
    reason: str = ""
    message: str = ""
    since: str = ""
    """Time of the last transition, as Kueue wrote it."""
    generation: int = 0
    """Generation of the Workload that the condition is about."""


ABSENT = WorkloadCondition(true=False)


@dataclass(frozen=True)
class PodChanges:
    """Fields that the admission of a pod set adds to each of its pods."""

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
    """Name of the ResourceFlavor by resource."""
    usage: Mapping[str, Decimal] = field(default_factory=dict)
    """Amount by resource, for all pods of the set together."""
    topology: bool = False
    """Whether Kueue has also chosen the topology domains of the pods."""

    def per_pod(self, resource: str) -> Decimal:
        return self.usage.get(resource, Decimal(0)) / self.count if self.count else Decimal(0)


@dataclass(frozen=True)
class WorkloadView:
    name: str
    uid: str
    namespace: str
    version: str
    """The resourceVersion, which guards each write."""
    generation: int
    created: float
    """Creation time in Unix seconds."""
    job_uid: str
    """Uid of the TrainingJob that controls the Workload; empty for Workloads of other kinds of objects."""
    queue: str
    number: int = 0
    """Number of the Workload among those of its job; 0 if another program created it."""
    job_generation: int = 0
    """Generation of the job when the operator created the Workload."""
    counts: Mapping[str, int] = field(default_factory=dict)
    """Number of pods asked for, by pod set."""
    requests: Mapping[str, Decimal] = field(default_factory=dict)
    """Amounts asked for by resource, for all pods together."""
    request_hash: str = ""
    """Hash of the pod sets without their counts (`QuotaView.request_hash`) when the operator wrote them."""
    priority: int = 0
    active: bool = True
    paused: bool = False
    """Whether the operator itself deactivated the Workload, and may activate it again."""
    elastic: bool = False
    replaces: str = ""
    """Name of the Workload that this slice replaces."""
    slice_name: str = ""
    """Name of the first Workload of the series of slices."""
    deleting: bool = False
    has_finalizer: bool = False
    """Whether Kueue's finalizer keeps the Workload until the operator has removed it."""
    cluster_queue: str = ""
    admission: Mapping[str, Assignment] | None = None
    """Quota that is reserved, by pod set; None without a reservation."""
    conditions: Mapping[str, WorkloadCondition] = field(default_factory=dict)
    check_changes: Mapping[str, tuple[PodChanges, ...]] = field(default_factory=dict)
    """Changes that admission checks make to the pods, by pod set."""
    check_messages: tuple[str, ...] = ()
    """Messages of admission checks that are not ready."""
    shortfalls: Mapping[tuple[str, str], Decimal] = field(default_factory=dict)
    """Amounts that the Workload lacks according to its condition QuotaReserved, by resource and flavor."""
    victims: int | None = None
    """Number of Workloads that are being preempted for this Workload; None if its message names no number."""
    preemptor_uid: str = ""
    """Uid of the Workload for which this Workload was preempted."""
    shrunk_for: str = ""
    """Transition time of the eviction for which the operator has lowered the counts."""
    shrunk_at: float | None = None
    """When the operator last lowered the counts for an eviction, in Unix seconds."""

    def condition(self, name: ConditionName) -> WorkloadCondition:
        return self.conditions.get(name, ABSENT)

    @property
    def finished(self) -> bool:
        return self.condition(ConditionName.FINISHED).true

    @property
    def reserved(self) -> bool:
        """Return whether quota is counted for the Workload."""
        return self.admission is not None and not self.finished

    @property
    def evicted(self) -> bool:
        """Return whether the quota is to be given back. The condition stays until the next admission."""
        return self.reserved and self.condition(ConditionName.EVICTED).true

    @property
    def admitted(self) -> bool:
        """Return whether pods may be created."""
        return self.reserved and not self.evicted and self.condition(ConditionName.ADMITTED).true and self.active

    @property
    def granted(self) -> Counts:
        """Number of pods by set for which Kueue counts quota: as admitted, or fewer where the count fell since."""
        assignments = self.admission or {}
        return {
            pod_set: min(assignments[pod_set].count, self.counts.get(pod_set, 0))
            for pod_set in PodSet
            if pod_set in assignments
        }


@dataclass(frozen=True)
class FlavorView:
    """A ResourceFlavor: kind of nodes whose quota is counted apart."""

    name: str
    node_labels: Mapping[str, str] = field(default_factory=dict)
    tolerations: tuple[Mapping[str, Any], ...] = ()


@dataclass(frozen=True)
class QuotaView:
    """Queue of a job, and its Workloads."""

    queue: str
    """Name of the LocalQueue."""
    workloads: tuple[WorkloadView, ...] = ()
    flavors: Mapping[str, FlavorView] = field(default_factory=dict)
    priority: int = 0
    """Priority of the job's Workloads: of the class that the job names, or of the template's priority class."""
    request_hash: str = ""
    """Hash of the pod sets that the job asks for, without their counts."""
    preemptor: WorkloadView | None = None
    """Workload for which the job is preempted; None if there is none, or if the operator does not see it."""
    writing: bool = False
    """Whether a write to a Workload of the job is under way (its outcome is not known yet) or was just refused."""
    refusal: str = ""
    """Message of the API server that refused the last write to a Workload."""
    conflict: str = ""
    """Reason why the pods of the admitted Workload can't be made: the admission contradicts the template."""
    trouble: str = ""
    """Reason why the job can't ask for quota until a person acts."""
