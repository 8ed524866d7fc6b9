"""Preemption of a job that holds quota: it shrinks if that is enough, and is suspended otherwise.

Kueue marks the Workload as evicted and waits. The job gives quota back in this order, and nothing is lent twice at any
point of it (decision "A preempted job shrinks"):
  1. the round drains to the members that stay, and the other pods are deleted;
  2. once these pods are gone, the counts of the evicted Workload are lowered. Kueue admits the preemptor;
  3. a slice of the lowered size replaces the evicted Workload, so that the pods that stay are counted without a gap.
If no slice is admitted within REPLACE_SECONDS of its creation, too little was given: the next smaller size is tried.
"""

from __future__ import annotations

import math
from decimal import Decimal

from concertina.amounts import amount
from concertina.api.spec import PreemptionReaction
from concertina.api.status import unix_seconds
from concertina.plan.actions import (
    Action,
    CreateWorkload,
    EditWorkload,
    ReleaseWorkload,
    ShrinkWorkload,
)
from concertina.plan.facts.lending import NOTHING, Lending, Size
from concertina.plan.kueue import ConditionName, EvictionReason, PodSet, Request, WorkloadView
from concertina.plan.quota import messages, request
from concertina.plan.quota.context import QuotaContext
from concertina.plan.quota.workloads import drops, granted_size, key, same_flavors

REPLACE_SECONDS = 5.0
"""Seconds within which the slice that replaces the Workload must be admitted, after it was created.

The time does not begin with the lowering of the counts: the operator may have been restarted in between, and while
Kueue is down no slice can be created.
"""
MESSAGE_SECONDS = 2.0
"""Seconds after a preemption within which Kueue writes into the preemptor's Workload how much quota it lacks."""


def evicted(ctx: QuotaContext, holder: WorkloadView) -> Lending:
    """Return what an evicted job keeps, and the next step of giving back its other quota.

    The job creates no pods meanwhile.
    """
    size = _size_to_keep(ctx, holder)
    why = messages.why_evicted(holder)
    if size is None:
        message = f"The queue {ctx.quota.queue} takes its quota back: {why}"
        return Lending(size=NOTHING, reason="Evicted", message=message, writes=_release(ctx, holder))
    granted = granted_size(holder)
    message = f"The queue {ctx.quota.queue} takes quota back: {why}. {_kept(size, granted, ctx)}"
    writes = _give_back(ctx, holder, size)
    return Lending(size=size, reason="Preempted", message=message, writes=writes, recheck=0.5)


def _kept(size: Size, granted: Size, ctx: QuotaContext) -> str:
    replicas = amount(ctx.wanted.replicas, "replica")
    if size.replicas == granted.replicas:
        return f"The job keeps {size.replicas} of {replicas}"
    return f"The job shrinks to {size.replicas} of {replicas}"


def _size_to_keep(ctx: QuotaContext, holder: WorkloadView) -> Size | None:
    """Return the size that the job keeps; None if it must give up all of it."""
    granted = granted_size(holder)
    if not _may_shrink(ctx, holder):
        return None
    options = request.smaller(ctx.spec, granted)
    if not is_marked(holder):
        return _first_size(ctx, holder, options)
    assert holder.shrunk_at is not None
    asked = [w.created for w in ctx.workloads.pending if w.replaces == holder.name]
    if not asked or ctx.now - max(holder.shrunk_at, *asked) < REPLACE_SECONDS:
        return granted
    return next(iter(options), None)


def _may_shrink(ctx: QuotaContext, holder: WorkloadView) -> bool:
    elastic = ctx.spec.elastic
    return (
        holder.condition(ConditionName.EVICTED).reason == EvictionReason.PREEMPTED
        and holder.active
        and elastic is not None
        and elastic.on_preemption is PreemptionReaction.SHRINK
        and same_flavors(holder)
        and holder.request_hash == ctx.quota.request_hash
    )


def is_marked(holder: WorkloadView) -> bool:
    """Return whether the counts were lowered for the eviction under way."""
    eviction = holder.condition(ConditionName.EVICTED)
    return bool(holder.shrunk_for) and holder.shrunk_for == eviction.since and holder.shrunk_at is not None


def _first_size(ctx: QuotaContext, holder: WorkloadView, options: tuple[Size, ...]) -> Size | None:
    """Return the largest size that leaves the preemptor enough, as far as that is known.

    Kueue's message in the preemptor's Workload says how much quota the preemptor lacks. Without the message, the
    preemptor's whole request is the upper bound. Without the Workload, the job gives up one step at a time.
    """
    granted, preemptor = granted_size(holder), ctx.quota.preemptor
    if preemptor is None:
        return next(iter(options), None)
    if preemptor.reserved or preemptor.finished or _waits_for_message(ctx, holder):
        return granted
    needed = _pods_needed(holder, preemptor)
    enough = next((size for size in options if granted.total - size.total >= needed), None)
    if enough is not None:
        return enough
    alone = preemptor.victims == 1
    return None if alone or not options else options[-1]


def _pods_needed(holder: WorkloadView, preemptor: WorkloadView) -> int:
    """Return how many pods of the job use as much quota as the preemptor lacks, or else as it requests in total."""
    assignment = (holder.admission or {}).get(PodSet.TRAINER)
    if assignment is None:
        return 1
    lacking: dict[str, Decimal] = {}
    for (resource, flavor), missing in preemptor.shortfalls.items():
        if assignment.flavors.get(resource) == flavor:
            lacking[resource] = max(missing, lacking.get(resource, Decimal(0)))
    if not lacking or preemptor.victims is None:
        lacking = dict(preemptor.requests)
    pods = [
        math.ceil(missing / amount) for name, missing in lacking.items() if (amount := assignment.per_pod(name)) > 0
    ]
    return max(pods, default=1)


def counts(workload: WorkloadView, size: Size) -> Request:
    """Return the counts of a size in the pod sets that the Workload has."""
    by_set = {PodSet.TRAINER: size.replicas, PodSet.SPARES: size.spares}
    return tuple((pod_set, by_set.get(pod_set, 1)) for pod_set in PodSet if pod_set in workload.counts)


def pod_count(pod_counts: Request) -> int:
    return sum(count for _, count in pod_counts)


# --- writes


def _give_back(ctx: QuotaContext, holder: WorkloadView, size: Size) -> tuple[Action, ...]:
    """Return the next write on the way to a smaller size."""
    wanted = counts(holder, size)
    slices = [w for w in ctx.workloads.pending if w.replaces == holder.name]
    strangers = [w for w in ctx.workloads.pending if w.replaces != holder.name]
    if not is_marked(holder):
        # A pending slice that would grow the job must not be admitted while the job shrinks.
        if slices or strangers:
            return drops((*slices, *strangers))
        return () if _waits_for_message(ctx, holder) else _lowered(ctx, holder, wanted)
    if size != granted_size(holder):
        return _lowered(ctx, holder, wanted)
    if not slices:
        return (*drops(strangers), _replacement(ctx, holder, wanted))
    *earlier, replacement = slices
    dropped = drops((*earlier, *strangers))
    if replacement.counts != dict(wanted) or replacement.priority != ctx.quota.priority:
        return (*dropped, EditWorkload(key(replacement), wanted, priority=ctx.quota.priority))
    return dropped


def _lowered(ctx: QuotaContext, holder: WorkloadView, wanted: Request) -> tuple[Action, ...]:
    """Lower the pod counts of the evicted Workload, if the job holds no more pods than the new counts."""
    if ctx.holding > pod_count(wanted):
        return ()
    return (ShrinkWorkload(key(holder), wanted, holder.condition(ConditionName.EVICTED).since),)


def _waits_for_message(ctx: QuotaContext, holder: WorkloadView) -> bool:
    """Return whether Kueue has still to say how much the preemptor lacks."""
    preemptor = ctx.quota.preemptor
    if preemptor is None or preemptor.reserved or preemptor.finished or preemptor.victims is not None:
        return False
    since = holder.condition(ConditionName.EVICTED).since
    return ctx.now - (unix_seconds(since) if since else 0.0) < MESSAGE_SECONDS


def _replacement(ctx: QuotaContext, holder: WorkloadView, wanted: Request) -> CreateWorkload:
    return CreateWorkload(
        ctx.workloads.next_number,
        wanted,
        ctx.quota.priority,
        elastic=True,
        replaces=holder.name,
        slice_name=holder.slice_name or holder.name,
        shrunk_at=holder.shrunk_at,
    )


def _release(ctx: QuotaContext, holder: WorkloadView) -> tuple[Action, ...]:
    """Give all quota back once no pod uses it.

    Pending slices are deleted first: without the Workload that they replace they would ask for quota of their own.
    """
    if ctx.workloads.pending:
        return drops(ctx.workloads.pending)
    return () if ctx.holding else released(holder)


def released(holder: WorkloadView) -> tuple[Action, ...]:
    return (ReleaseWorkload(key(holder)),)
