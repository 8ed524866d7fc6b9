"""Outcome of `concertina.plan.quota`: how many pods a job may have in this pass. Data only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from concertina.api.spec import JobSpec
from concertina.plan.actions import Action
from concertina.plan.facts import sizes
from concertina.plan.kueue import PodChanges, PodSet


@dataclass(frozen=True)
class Size:
    """Replicas that a job may have."""

    replicas: int
    """Replicas in the round."""
    spares: int = 0
    """Standby replicas."""

    @property
    def total(self) -> int:
        return self.replicas + self.spares


NOTHING = Size(0)


@dataclass(frozen=True)
class Lending:
    """Quota that the job may use in this pass. The default: no queue limits the job."""

    queue: str = ""
    """Name of the LocalQueue; empty if no queue limits the job."""
    size: Size | None = None
    """Replicas that the job may have; None if no queue limits the job, or if it has ended."""
    room: Mapping[PodSet, int] = field(default_factory=dict)
    """Number of pods that may be created now, by pod set."""
    lender: tuple[str, int] = ("", 0)
    """Name of the Workload that lends the pods, and its total number of pods. A pod is created only while both hold."""
    changes: Mapping[PodSet, PodChanges] = field(default_factory=dict)
    """Changes to the pods of each set."""
    cluster_queue: str = ""
    reason: str = ""
    """Reason why the job has fewer replicas than it asks for, in CamelCase; empty if it has all."""
    message: str = ""
    """The same as a sentence."""
    stalled: bool = False
    """Whether a person must act before the job gets quota."""
    writes: tuple[Action, ...] = ()
    recheck: float | None = None
    """Seconds until time alone changes the lending."""

    @property
    def limits(self) -> bool:
        """Return whether a queue limits the job."""
        return self.size is not None

    @property
    def stops(self) -> bool:
        """Return whether the job may have no replicas."""
        return self.size is not None and not self.size.replicas


NO_QUEUE = Lending()


def spec_within(spec: JobSpec, lending: Lending) -> JobSpec:
    """Return the spec with no more replicas than the job may have.

    A job that may have none is suspended, so that its round is drained and saved like that of any suspended job.
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
