"""Sizes for which a job requests quota: all of its replicas first, then fewer while Kueue refuses."""

from __future__ import annotations

from collections.abc import Iterable

from concertina.api.spec import JobSpec
from concertina.plan.facts import sizes
from concertina.plan.facts.lending import Size
from concertina.plan.kueue import ConditionName, Counts, PodSet, Request, WorkloadView, wanted_sets

SHORT_OF_QUOTA = "insufficient"
"""Word in Kueue's message ("insufficient unused quota for cpu ...") that means that a smaller request might succeed."""
AWAITS_PREEMPTION = "Pending the preemption"
"""Words in Kueue's message that mean that the request will succeed once Kueue has preempted other Workloads."""


def full(spec: JobSpec) -> Size:
    """Return the numbers of replicas and standby replicas that the spec requests."""
    return Size(sizes.most(spec), spec.standby_replicas)


def valid(spec: JobSpec) -> tuple[Size, ...]:
    """Return all sizes at which the job can run, the largest first.

    The first smaller size has no standby replicas. Each further size has fewer replicas.
    """
    largest = full(spec)
    least, step = sizes.least(spec), spec.replica_step
    steps = range(largest.replicas, least - 1, -step)
    return tuple(dict.fromkeys((largest, *(Size(replicas) for replicas in steps))))


def smaller(spec: JobSpec, than: Size) -> tuple[Size, ...]:
    """Return the valid sizes with fewer pods than the size `than`, largest first.

    Sizes with more replicas or more standby replicas than `than` are left out.
    """
    return tuple(
        size
        for size in valid(spec)
        if size.total < than.total and size.replicas <= than.replicas and size.spares <= than.spares
    )


def larger(spec: JobSpec, than: Size) -> tuple[Size, ...]:
    """Return the valid sizes with more pods than the size `than`, largest first.

    Sizes with fewer replicas or fewer standby replicas than `than` are left out.
    """
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
    """Return the number of pods that a Workload requests for a size, keyed by pod set."""
    counts = {PodSet.TRAINER: size.replicas, PodSet.SPARES: size.spares, PodSet.RENDEZVOUS: 1}
    return tuple((pod_set, counts[pod_set]) for pod_set in wanted_sets(spec))


def size_of(counts: Counts) -> Size:
    return Size(counts.get(PodSet.TRAINER, 0), counts.get(PodSet.SPARES, 0))


def asked(workload: WorkloadView) -> Size:
    """Return the number of replicas and standby replicas for which a Workload requests quota."""
    return Size(workload.counts.get(PodSet.TRAINER, 0), workload.counts.get(PodSet.SPARES, 0))


def is_refused(workload: WorkloadView) -> bool:
    """Return whether Kueue has refused the present request of a pending Workload for lack of quota.

    A condition for an earlier request is ignored: Kueue's condition names the generation of the Workload to which it
    applies. A Workload for which Kueue is preempting other Workloads does not count as refused.
    """
    condition = workload.condition(ConditionName.QUOTA_RESERVED)
    return (
        not condition.true
        and condition.generation >= workload.generation
        and SHORT_OF_QUOTA in condition.message
        and AWAITS_PREEMPTION not in condition.message
    )


def walked(current: Size, options: Iterable[Size], refused: bool) -> Size | None:
    """Return the size to request next; None if `options` is empty.

    This is the current size, or the next smaller size if Kueue refused the current one. If Kueue refuses the smallest
    size, the job continues to request it.
    """
    ordered = tuple(options)
    if current not in ordered:
        fitting = [size for size in ordered if size.replicas <= current.replicas and size.spares <= current.spares]
        return next(iter(fitting), ordered[0] if ordered else None)
    place = ordered.index(current)
    return ordered[min(place + refused, len(ordered) - 1)]
