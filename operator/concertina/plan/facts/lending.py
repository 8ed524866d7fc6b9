"""Result of `concertina.plan.quota`: the number of pods that a job's Kueue queue allows in this planning pass."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from concertina.api.spec import JobSpec
from concertina.plan.actions import Action
from concertina.plan.facts import sizes
from concertina.plan.kueue import PodChanges, PodSet


@dataclass(frozen=True)
class Size:
    """Number of replicas and of standby replicas that a job's Kueue queue allows."""

    replicas: int
    """Number of replicas in the round."""
    spares: int = 0
    """Number of standby replicas."""

    @property
    def total(self) -> int:
        return self.replicas + self.spares


NOTHING = Size(0)


@dataclass(frozen=True)
class Lending:
    """Kueue quota that a job may use in this planning pass. The default value means that no queue limits the job."""

    queue: str = ""
    """Name of the LocalQueue; empty if no queue limits the job."""
    size: Size | None = None
    """Number of replicas that the job may have; None if no queue limits the job, or if the job has ended."""
    room: Mapping[PodSet, int] = field(default_factory=dict)
    """Number of further pods that may be created now, by pod set."""
    lender: tuple[str, int] = ("", 0)
    """Name of the Workload whose quota the pods use, and the Workload's total number of pods.

    The operator creates a pod only while both values are unchanged.
    """
    changes: Mapping[PodSet, PodChanges] = field(default_factory=dict)
    """Changes that Kueue's admission makes to the pods, by pod set."""
    cluster_queue: str = ""
    reason: str = ""
    """Reason why the job has fewer replicas than it requests, in CamelCase; empty if the job has all of them."""
    message: str = ""
    """Reason why the job has fewer replicas than it requests, as a sentence."""
    stalled: bool = False
    """True if a person must act before the job gets quota."""
    writes: tuple[Action, ...] = ()
    recheck: float | None = None
    """Seconds after which the quota may change even without an event; None if only an event can change it."""

    @property
    def limits(self) -> bool:
        """Return whether a Kueue queue limits the number of the job's replicas."""
        return self.size is not None

    @property
    def stops(self) -> bool:
        """Return whether the Kueue queue allows the job no replicas."""
        return self.size is not None and not self.size.replicas


NO_QUEUE = Lending()


def spec_within(spec: JobSpec, lending: Lending) -> JobSpec:
    """Return the spec with `replicas` and `standbyReplicas` lowered to what the job's queue allows.

    If the queue allows no replicas, the returned spec has `suspend: true`. The operator then stops the job as it stops
    any suspended job: after the current step, with its state saved.
    """
    size = lending.size
    if size is None or spec.suspend:
        return spec
    if lending.stops:
        return spec.model_copy(update={"suspend": True})
    if size.replicas >= sizes.most(spec) and size.spares == spec.standby_replicas:
        return spec
    elastic = spec.elastic and spec.elastic.model_copy(update={"standby_replicas": size.spares})
    return spec.model_copy(update={"replicas": size.replicas, "elastic": elastic})
