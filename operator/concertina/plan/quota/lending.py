"""Decide how many pods a job with a Kueue queue may have in this planning pass, and what to write to its Workloads.

These rules hold at every moment (decision "A job never has more pods than its quota"):

  - The job has no pods before one of its Workloads is admitted. It never has more pods than its quota in Kueue allows.
  - While a Workload is evicted, the operator creates no pods for the job.
  - The operator returns quota only after the pods that used it are gone. To check this, it lists the pods before it
    returns the quota.

A job first requests quota for all its replicas. While Kueue refuses, the job repeatedly requests less, down to its
minimum. If the job holds less than it wants, one pending slice (a second Workload that would replace the first one)
requests more. The slice preempts no other Workload.
"""

from __future__ import annotations

from dataclasses import replace

from concertina.amounts import amount
from concertina.api.status import ENDED, ConditionType, unix_seconds
from concertina.plan.actions import (
    Action,
    CreateWorkload,
    DropWorkload,
    EditWorkload,
    FinishWorkload,
    ReportPodsReady,
    ShrinkWorkload,
    WorkloadKey,
)
from concertina.plan.facts.lending import NO_QUEUE, NOTHING, Lending, Size
from concertina.plan.kueue import LOWEST_PRIORITY, ConditionName, FinishReason, QuotaView, WorkloadView
from concertina.plan.observed import JobObservation
from concertina.plan.quota import messages, preemption, request, workloads
from concertina.plan.quota.context import QuotaContext
from concertina.plan.quota.workloads import granted_size, key

TRAINING = "Training"
WALK_SECONDS = 2.0
"""Seconds after which the operator lowers the request of a Workload that Kueue refuses.

Until then, quota may become free.
"""
GROW_SECONDS = 10.0
"""Seconds after a preemption before the job requests more quota again, so that Kueue admits the preemptor first."""
REPLACED_SECONDS = 5.0
"""Seconds for Kueue to finish a Workload that a slice has replaced. After that, the operator finishes the Workload."""


def lend(observed: JobObservation, now: float) -> Lending:
    """Return how much quota of its Kueue queue the job may use. A job without a queue has no limit."""
    quota, spec = observed.quota, observed.job.spec
    if quota is None:
        return NO_QUEUE
    if observed.job.deleting:
        return Lending(queue=quota.queue, writes=() if quota.writing else _dropped(observed, quota))
    if spec is None:
        return Lending(queue=quota.queue)
    ctx = QuotaContext(observed, spec, quota, now)
    lending = _lending(ctx)
    writes = _one_each((*_cleanup(ctx), *lending.writes))
    writable = () if quota.writing else writes
    return replace(lending, queue=quota.queue, writes=writable)


def _lending(ctx: QuotaContext) -> Lending:
    status = ctx.observed.job.status
    if any(status.is_true(kind) for kind in ENDED):
        return Lending(size=None, writes=_finished(ctx))
    holder = ctx.workloads.holder
    if ctx.quota.trouble and holder is None:
        # Running pods may have quota that the operator can't see.
        size = None if ctx.holding else NOTHING
        return Lending(size=size, reason="QueueUnavailable", message=ctx.quota.trouble, stalled=True)
    if _asks_for_nothing(ctx):
        return Lending(size=NOTHING if ctx.spec.suspend else None, writes=_deactivated(ctx))
    if holder is None:
        return _waiting(ctx)
    if holder.evicted:
        return preemption.evicted(ctx, holder)
    if _is_outdated(ctx, holder):
        message = "The resources of its pods have changed, so the job gives its quota back and asks again"
        return Lending(size=NOTHING, reason="RequestChanged", message=message, writes=_deactivated(ctx))
    if not holder.active:
        return _reactivated(ctx, holder)
    if not holder.admitted:
        return _checked(ctx, holder)
    return _admitted(ctx, holder)


def _asks_for_nothing(ctx: QuotaContext) -> bool:
    """Return whether the job needs no Kueue quota now: it is suspended, or can't start for another reason."""
    return ctx.spec.suspend or ctx.observed.uri_holder is not None or not ctx.wanted.replicas


def _is_outdated(ctx: QuotaContext, workload: WorkloadView) -> bool:
    return workload.request_hash != ctx.quota.request_hash


# --- no quota yet


def _waiting(ctx: QuotaContext) -> Lending:
    """Return the result for a job whose Workload Kueue has not admitted: no quota, and the reason.

    The result can also contain writes that create the Workload or change what it requests.
    """
    queue = ctx.quota.queue
    if failed := ctx.workloads.failed_to_start(ctx.observed.job.generation):
        condition = failed.condition(ConditionName.FINISHED)
        return Lending(size=NOTHING, reason="AdmissionConflict", message=condition.message, stalled=True)
    if not ctx.workloads.pending:
        if any(workload.reserved for workload in ctx.workloads.leaving):
            message = "Its Workload was deleted: the job gives its quota back and asks again"
            return Lending(size=NOTHING, reason="WorkloadDeleted", message=message)
        message = ctx.quota.refusal or f"Asks the queue {queue} for {amount(ctx.wanted.replicas, 'replica')}"
        return Lending(size=NOTHING, reason="Queued", message=message, writes=(_first(ctx),), recheck=5.0)
    first, *others = ctx.workloads.pending
    dropped = workloads.drops(others)
    edit, recheck = _adjusted(ctx, first)
    asked = request.asked(first)
    message = f"Waits in the queue {queue} for {amount(asked.replicas, 'replica')}: {messages.why_waiting(first)}"
    return Lending(size=NOTHING, reason="Queued", message=message, writes=(*dropped, *edit), recheck=recheck)


def _first(ctx: QuotaContext) -> CreateWorkload:
    return CreateWorkload(
        ctx.workloads.next_number,
        request.request(ctx.spec, ctx.wanted),
        ctx.quota.priority,
        elastic=ctx.spec.elastic is not None,
    )


def _adjusted(ctx: QuotaContext, first: WorkloadView) -> tuple[tuple[Action, ...], float | None]:
    """Return the edit of a pending Workload that makes it request what the job wants now.

    The result also contains the seconds until the next check, or None if no check is needed.
    """
    if _is_outdated(ctx, first):
        pods = request.request(ctx.spec, ctx.wanted)
        activated = True if first.paused else None
        edit = EditWorkload(key(first), pods, template=True, priority=ctx.quota.priority, active=activated)
        return (edit,), None
    young = ctx.now - first.created < WALK_SECONDS
    refused = request.is_refused(first)
    size = request.walked(request.asked(first), request.valid(ctx.spec), refused and not young) or ctx.wanted
    pods = preemption.counts(first, size)
    edit = EditWorkload(
        key(first),
        request=pods if dict(pods) != dict(first.counts) else None,
        priority=ctx.quota.priority if first.priority != ctx.quota.priority else None,
        queue=ctx.quota.queue if first.queue != ctx.quota.queue else None,
        active=True if first.paused else None,
    )
    if edit != EditWorkload(key(first)):
        return (edit,), None
    if first.condition(ConditionName.PODS_READY).true:
        return (ReportPodsReady(key(first), ready=False),), None
    return (), WALK_SECONDS if refused and young else None


def _checked(ctx: QuotaContext, holder: WorkloadView) -> Lending:
    """Return how much quota the job may use while Kueue's admission checks are pending.

    The operator creates no pods in this time. If the Workload replaces another one (a slice), the job keeps the pods
    that it already has.
    """
    message = f"Quota is reserved in the queue {ctx.quota.queue}: {messages.why_waiting(holder)}"
    size = _usable(ctx, granted_size(holder)) if holder.replaces and ctx.holding else NOTHING
    return Lending(size=size, reason="AdmissionChecksPending", message=message, writes=_replaced(ctx, holder))


# --- quota is admitted


def _admitted(ctx: QuotaContext, holder: WorkloadView) -> Lending:
    granted = granted_size(holder)
    if unknown := workloads.missing_flavors(holder, ctx.quota):
        message = f"Waits for the ResourceFlavor {', '.join(unknown)}, which do not exist or can't be read"
        return Lending(size=_usable(ctx, granted), reason="FlavorUnknown", message=message, recheck=5.0)
    changes = workloads.changes(holder, ctx.quota.flavors)
    if conflict := ctx.quota.conflict:
        finish = FinishWorkload(key(holder), FinishReason.FAILED_TO_START, conflict)
        writes: tuple[Action, ...] = () if ctx.holding else (finish,)
        return Lending(size=NOTHING, reason="AdmissionConflict", message=conflict, stalled=True, writes=writes)
    size = _usable(ctx, granted)
    resized, recheck, message = _resized(ctx, holder, granted)
    writes = (*_replaced(ctx, holder), *resized, *_kept_up(ctx, holder))
    lacking = size.replicas < ctx.wanted.replicas
    if lacking:
        message = f"Has quota for {size.replicas} of {amount(ctx.wanted.replicas, 'replica')}" + (
            f", and waits for more: {message}" if message else ""
        )
    return Lending(
        size=size,
        room={} if ctx.quota.writing else workloads.room(holder, ctx.observed.pods),
        lender=workloads.lendable(ctx.quota.workloads),
        changes=changes,
        cluster_queue=holder.cluster_queue,
        reason="QuotaLimited" if lacking else "",
        message=message if lacking else "",
        writes=writes,
        recheck=recheck,
    )


def _usable(ctx: QuotaContext, granted: Size) -> Size:
    """Return the largest size in whole blocks that the quota `granted` allows, up to the size that the job wants."""
    replicas = min(granted.replicas, ctx.wanted.replicas)
    return Size(replicas - replicas % ctx.spec.replica_step, min(granted.spares, ctx.wanted.spares))


def _resized(ctx: QuotaContext, holder: WorkloadView, granted: Size) -> tuple[tuple[Action, ...], float | None, str]:
    """Return the writes that adjust the quota to what the job wants.

    The result also contains the seconds until the next check, and why the job has less quota than it wants.
    """
    wanted = ctx.wanted
    smaller = Size(min(granted.replicas, wanted.replicas), min(granted.spares, wanted.spares))
    pending = ctx.workloads.pending
    if smaller != granted:
        pods = preemption.counts(holder, smaller)
        gone = ctx.holding <= preemption.pod_count(pods)
        return (*workloads.drops(pending), *([ShrinkWorkload(key(holder), pods)] if gone else [])), None, ""
    options = request.larger(ctx.spec, granted)
    if not options:
        return workloads.drops(pending), None, ""
    slices = [w for w in pending if w.replaces == holder.name and not _is_outdated(ctx, w)]
    dropped = workloads.drops(w for w in pending if w not in slices[-1:])
    if not slices:
        wait = 0.0 if holder.shrunk_at is None else holder.shrunk_at + GROW_SECONDS - ctx.now
        if wait > 0:
            return dropped, wait, "it has just given way to another workload"
        return (*dropped, _growth(ctx, holder, options[0])), None, ctx.quota.refusal
    growing = slices[-1]
    size = request.walked(request.asked(growing), options, request.is_refused(growing)) or options[-1]
    pods = preemption.counts(growing, size)
    edit = EditWorkload(
        key(growing),
        request=pods if dict(pods) != dict(growing.counts) else None,
        priority=LOWEST_PRIORITY if growing.priority != LOWEST_PRIORITY else None,
    )
    edits = () if edit == EditWorkload(key(growing)) else (edit,)
    return (*dropped, *edits), None, messages.why_waiting(growing)


def _growth(ctx: QuotaContext, holder: WorkloadView, size: Size) -> CreateWorkload:
    """Return the creation of a slice (a Workload that replaces the present one) that requests more pods.

    The slice has the lowest priority, so that the job grows only into unused quota.
    """
    return CreateWorkload(
        ctx.workloads.next_number,
        preemption.counts(holder, size),
        LOWEST_PRIORITY,
        by_class=False,
        elastic=True,
        replaces=holder.name,
        slice_name=holder.slice_name or holder.name,
    )


def _kept_up(ctx: QuotaContext, holder: WorkloadView) -> tuple[Action, ...]:
    """Return the writes that update the priority or the PodsReady condition of an admitted Workload."""
    if holder.priority != ctx.quota.priority:
        return (EditWorkload(key(holder), priority=ctx.quota.priority),)
    status = ctx.observed.job.status
    trains = status.phase == TRAINING and status.is_true(ConditionType.RUNNING)
    if trains and not holder.condition(ConditionName.PODS_READY).true:
        return (ReportPodsReady(key(holder), ready=True),)
    return ()


def _replaced(ctx: QuotaContext, holder: WorkloadView) -> tuple[Action, ...]:
    """Return writes that finish the Workloads that a newer Workload (a slice) has replaced.

    Kueue finishes such Workloads itself, so the operator writes only after REPLACED_SECONDS.
    """
    since = holder.condition(ConditionName.QUOTA_RESERVED).since
    if not since or ctx.now - unix_seconds(since) < REPLACED_SECONDS:
        return ()
    pods_left = sum(holder.granted.values())
    return tuple(
        FinishWorkload(key(old), FinishReason.SLICE_REPLACED, f"Replaced by {holder.name}", pods_left)
        for old in ctx.workloads.holders[:-1]
    )


# --- quota that is not needed


def _deactivated(ctx: QuotaContext) -> tuple[Action, ...]:
    """Return the writes that deactivate the Workload of a job that needs no quota.

    A deactivated Workload keeps its place in the queue. Kueue gives the Workload's quota to other Workloads at once,
    even before Kueue sets the Evicted condition. The operator therefore deactivates the Workload only after the job's
    pods no longer exist.
    """
    slices = ctx.workloads.pending if ctx.workloads.holders else ctx.workloads.pending[1:]
    writes: list[Action] = [*workloads.drops(slices)]
    for workload in ctx.workloads.open:
        if workload in slices:
            continue
        if workload.evicted and not ctx.holding and not slices:
            writes += preemption.released(workload)
        elif workload.active and not (workload.reserved and ctx.holding):
            writes.append(EditWorkload(key(workload), active=False))
    return tuple(writes)


def _reactivated(ctx: QuotaContext, holder: WorkloadView) -> Lending:
    """Return the result for a job whose Workload is inactive but not yet evicted by Kueue: no quota.

    A user or another program has deactivated the Workload. The job returns its quota and requests quota again.
    """
    message = f"Its Workload {holder.name} is deactivated: the job gives its quota back and asks again"
    return Lending(size=NOTHING, reason="Deactivated", message=message, recheck=1.0)


def _finished(ctx: QuotaContext) -> tuple[Action, ...]:
    """Return writes that finish all Workloads of a job that has ended, once no pod uses quota."""
    status = ctx.observed.job.status
    condition = next(filter(None, map(status.true_condition, ENDED)))
    complete = status.is_true(ConditionType.COMPLETE)
    reason = FinishReason.SUCCEEDED if complete else FinishReason.FAILED
    return tuple(
        FinishWorkload(key(workload), reason, condition.message)
        for workload in ctx.workloads.open
        if not (workload.reserved and ctx.holding)
    )


def _dropped(observed: JobObservation, quota: QuotaView) -> tuple[Action, ...]:
    """Return deletions of the Workloads of a job that is being deleted, once no pod uses quota."""
    holding = workloads.holding(observed.pods)
    return tuple(
        DropWorkload(key(workload), pods_left=0 if workload.reserved else None)
        for workload in quota.workloads
        if not (workload.reserved and holding)
    )


def _cleanup(ctx: QuotaContext) -> tuple[Action, ...]:
    """Return the removals of Workloads that are no longer needed.

    These are finished Workloads, and Workloads that another client has deleted.
    """
    drops = [
        DropWorkload(key(workload), pods_left=None, delete=replaced)
        for workload in ctx.workloads.finished
        if (replaced := workload.condition(ConditionName.FINISHED).reason == FinishReason.SLICE_REPLACED)
        or workload.has_finalizer
    ]
    holder = ctx.workloads.holder
    left = sum(holder.granted.values()) if holder else 0
    for workload in ctx.workloads.leaving:
        if not workload.reserved:
            drops.append(DropWorkload(key(workload), pods_left=None))
        elif ctx.holding <= left:
            drops.append(DropWorkload(key(workload), pods_left=left))
    return tuple(drops)


def _one_each(writes: tuple[Action, ...]) -> tuple[Action, ...]:
    """Return only the first write to each Workload.

    That write changes the Workload's resourceVersion, so the API server would refuse any later write to the same
    Workload.
    """
    first: dict[str, Action] = {}
    for write in writes:
        target = getattr(write, "key", None)
        name = target.name if isinstance(target, WorkloadKey) else ""
        first.setdefault(name, write)
    return tuple(first.values())
