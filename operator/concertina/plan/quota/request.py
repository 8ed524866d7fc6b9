"""Sizes that a job asks its queue for: all of its replicas first, then smaller ones while the queue refuses."""

from __future__ import annotations

from collections.abc import Iterable

from concertina.api.spec import JobSpec
from concertina.plan.facts import sizes
from concertina.plan.facts.lending import Size
from concertina.plan.kueue import ConditionName, Counts, PodSet, Request, WorkloadView, wanted_sets

SHORT_OF_QUOTA = "insufficient"
"""Word in Kueue's messages ("insufficient unused quota for cpu ...") about a refusal that a smaller request may
avoid."""
AWAITS_PREEMPTION = "Pending the preemption"
"""Words in Kueue's message about a request that fits once other Workloads have been preempted for it."""


def full(spec: JobSpec) -> Size:
    """Return the size that the job wants."""
    return Size(sizes.most(spec), spec.standby_replicas)


def valid(spec: JobSpec) -> tuple[Size, ...]:
    """Return all sizes that the job can run at, the largest first. Standby replicas are given up before others."""
    largest = full(spec)
    least, step = sizes.least(spec), spec.replica_step
    steps = range(largest.replicas, least - 1, -step)
    return tuple(dict.fromkeys((largest, *(Size(replicas) for replicas in steps))))


def smaller(spec: JobSpec, than: Size) -> tuple[Size, ...]:
    """Return the valid sizes with fewer pods, and with no more of either kind, the largest first."""
    return tuple(
        size
        for size in valid(spec)
        if size.total < than.total and size.replicas <= than.replicas and size.spares <= than.spares
    )


def larger(spec: JobSpec, than: Size) -> tuple[Size, ...]:
    """Return the valid sizes with more pods, and with no fewer of either kind, the largest first."""
    largest = full(spec)
    steps = range(largest.replicas, than.replicas, -spec.replica_step)
    options = (largest, *(Size(replicas, than.spares) for replicas in steps))
    return tuple(
        dict.fromkeys(
            size
            for size in options
            if size.total > than.total and size.replicas >= than.replicas and size.spares >= than.spares
        )
    )


def request(spec: JobSpec, size: Size) -> Request:
    """Return the number of pods by set."""
    counts = {PodSet.TRAINER: size.replicas, PodSet.SPARES: size.spares, PodSet.RENDEZVOUS: 1}
    return tuple((pod_set, counts[pod_set]) for pod_set in wanted_sets(spec))


def size_of(counts: Counts) -> Size:
    return Size(counts.get(PodSet.TRAINER, 0), counts.get(PodSet.SPARES, 0))


def asked(workload: WorkloadView) -> Size:
    """Return the size that a Workload asks for."""
    return Size(workload.counts.get(PodSet.TRAINER, 0), workload.counts.get(PodSet.SPARES, 0))


def is_refused(workload: WorkloadView) -> bool:
    """Return whether Kueue has found too little quota for the pending Workload as it is now.

    The condition names the generation that Kueue looked at, so an answer to an earlier request does not count. A
    Workload for which others are being preempted is not refused.
    """
    condition = workload.condition(ConditionName.QUOTA_RESERVED)
    return (
        not condition.true
        and condition.generation >= workload.generation
        and SHORT_OF_QUOTA in condition.message
        and AWAITS_PREEMPTION not in condition.message
    )


def walked(current: Size, options: Iterable[Size], refused: bool) -> Size | None:
    """Return the size to ask for next: the current one, or the next smaller option if that is refused.

    The smallest option stays. None if there are no options.
    """
    ordered = tuple(options)
    if current not in ordered:
        fitting = [size for size in ordered if size.replicas <= current.replicas and size.spares <= current.spares]
        return next(iter(fitting), ordered[0] if ordered else None)
    place = ordered.index(current)
    return ordered[min(place + refused, len(ordered) - 1)]
