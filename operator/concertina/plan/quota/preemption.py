"""Preemption of a job that has Kueue quota: the job shrinks if that frees enough quota, and is suspended otherwise.

To preempt a job, Kueue marks its Workload as evicted and waits. The operator then takes the following steps, in which
no unit of quota is ever used by two jobs (decision "A preempted job shrinks"):

  1. The round drains, the remaining members continue, and the operator deletes the other pods.
  2. Once these pods no longer exist, the operator lowers the pod counts of the evicted Workload. Kueue can then admit
     the preemptor.
  3. The operator creates a slice (a new Workload that replaces the evicted one) with the lower counts, so that Kueue
     counts the remaining pods at all times.

If Kueue does not admit the slice within REPLACE_SECONDS after its creation, the job has not freed enough quota. It then
shrinks to the next smaller size.

In a drain, all ranks stop after the same step. A round is a period in which a fixed set of replicas trains.
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
"""Seconds after its creation within which Kueue must admit a slice in place of the evicted Workload.

The time does not begin when the pod counts are lowered, because the operator can't create a slice while Kueue is down.
The operator may also have been restarted since then.
"""
MESSAGE_SECONDS = 2.0
"""Seconds after an eviction within which Kueue should write how much quota the preemptor lacks.

Kueue writes this amount into a message of the preemptor's Workload.
"""


def evicted(ctx: QuotaContext, holder: WorkloadView) -> Lending:
    """Return how many replicas a preempted job keeps, and the next write that returns the rest of its quota.

    The operator creates no pods for the job during a preemption.
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
    """Return the number of replicas that the preempted job keeps; None if it must return all its quota."""
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
    """Return whether the operator has already lowered the Workload's pod counts for the present eviction."""
    eviction = holder.condition(ConditionName.EVICTED)
    return bool(holder.shrunk_for) and holder.shrunk_for == eviction.since and holder.shrunk_at is not None


def _first_size(ctx: QuotaContext, holder: WorkloadView, options: tuple[Size, ...]) -> Size | None:
    """Return the largest size at which the job frees enough quota for the preemptor.

    Kueue's message in the preemptor's Workload says how much quota the preemptor lacks. Without that message, the
    function uses the preemptor's whole request. If the operator can't see the preemptor's Workload, the job shrinks by
    one size at a time.
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
    """Return how many of the job's pods must end to free the quota that the preemptor (another Workload) lacks.

    If Kueue has not said how much quota that is, the function uses the preemptor's whole request.
    """
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
    """Return the number of pods in each pod set of the Workload for a job of the given size."""
    by_set = {PodSet.TRAINER: size.replicas, PodSet.SPARES: size.spares}
    return tuple((pod_set, by_set.get(pod_set, 1)) for pod_set in PodSet if pod_set in workload.counts)


def pod_count(pod_counts: Request) -> int:
    return sum(count for _, count in pod_counts)


# --- writes


def _give_back(ctx: QuotaContext, holder: WorkloadView, size: Size) -> tuple[Action, ...]:
    """Return the next write to Kueue's objects that brings the preempted job to the smaller `size`."""
    wanted = counts(holder, size)
    slices = [w for w in ctx.workloads.pending if w.replaces == holder.name]
    strangers = [w for w in ctx.workloads.pending if w.replaces != holder.name]
    if not is_marked(holder):
        # No pending slice that lets the job grow may be admitted while the job shrinks.
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
    """Return the write that lowers the pod counts of the evicted Workload to `wanted`.

    The result is empty while the job has more pods than `wanted`.
    """
    if ctx.holding > pod_count(wanted):
        return ()
    return (ShrinkWorkload(key(holder), wanted, holder.condition(ConditionName.EVICTED).since),)


def _waits_for_message(ctx: QuotaContext, holder: WorkloadView) -> bool:
    """Return whether Kueue has not yet written how much quota the preemptor lacks, but may still write it."""
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
    """Return the writes that return all of the job's quota to Kueue, once no pod uses it.

    Pending slices (Workloads that would replace the present one) are deleted first. Otherwise each would request quota
    of its own after the present Workload is gone.
    """
    if ctx.workloads.pending:
        return drops(ctx.workloads.pending)
    return () if ctx.holding else released(holder)


def released(holder: WorkloadView) -> tuple[Action, ...]:
    return (ReleaseWorkload(key(holder)),)
