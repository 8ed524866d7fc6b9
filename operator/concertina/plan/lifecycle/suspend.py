"""spec.suspend: the round is drained and saved, then its pods are deleted.

So are the pods of a job whose template was changed and that was resumed before all of its old pods had gone, and those
of a deleted job that another tool's finalizer holds (decision "A deleted job that is held is drained").
"""

from __future__ import annotations

from dataclasses import replace

from concertina.amounts import amount, are, first_of
from concertina.plan.actions import DeletePod, EndPod, Event
from concertina.plan.facts import constants, sizes
from concertina.plan.facts.context import JobContext
from concertina.plan.facts.decision import Decision, Phase, Pods, Reason
from concertina.plan.observed import JobView
from concertina.plan.pods.pod_plan import PodPlan
from concertina.plan.recovery import causes
from concertina.plan.rounds import claims, drains
from concertina_protocol import Report, RestoreSource, State, StorageHealth


def suspend(ctx: JobContext) -> Decision | None:
    """Drain with a checkpoint in storage, then delete the pods. A round that is being made is made first, so that it
    can be drained; where there is none, nothing can be lost."""
    if not ctx.spec.suspend:
        return None
    if not ctx.observed.pods or not ctx.world.members:
        return _suspended(ctx)
    if _is_over(ctx):
        return _suspended(ctx)
    if _goes_on(ctx):
        report = ctx.round.report
        if report is not None and report.state == State.DRAINED and _stopped_unsaved(ctx, report):
            return None  # the next round saves it
        if held_by(ctx.observed.job):
            return _draining(ctx, Phase.DELETING, "Deleting", why_deleting(ctx.observed.job))
        return _draining(ctx, Phase.SUSPENDING, "Suspending", "spec.suspend is set")
    can_go_on = sizes.fitting(len(ctx.replicas.candidates), ctx.spec) > 0
    return None if can_go_on and not _overdue(ctx) else _suspended(ctx)


def replace_outdated(ctx: JobContext) -> Decision | None:
    """What was begun as a suspension is finished: members made of another template than the job has now are drained
    with a checkpoint, then belong to no round and are replaced (decision "A pod says what it was made of")."""
    outdated = sorted(ctx.replicas.outdated.intersection(ctx.round.members))
    if not outdated:
        return None
    why = f"replica {outdated[0]} was made of another template than the job has now"
    if _goes_on(ctx) and not _is_over(ctx):
        return _draining(ctx, Phase.DRAINING, Reason.TEMPLATE_CHANGED, why)
    can_go_on = ctx.keeps_state and sizes.fitting(len(ctx.replicas.candidates), ctx.spec) > 0
    if can_go_on and not _is_over(ctx) and not _overdue(ctx):
        return None  # what only node memory holds is saved by the round that is being made
    world = claims.disbanded(ctx, Reason.TEMPLATE_CHANGED)
    message = f"{why}: new pods take the members' places"
    return Decision(
        Phase.RECOVERING,
        Reason.TEMPLATE_CHANGED,
        message,
        world=world,
        events=(Event("Normal", Reason.TEMPLATE_CHANGED, message),),
        recheck=constants.RETRY,
    )


def _is_over(ctx: JobContext) -> bool:
    """The committed round has been drained and saved, or takes too long to."""
    if not ctx.round.committed:
        return False
    report = ctx.round.report
    if report is not None and report.state == State.DRAINED and _is_saved(ctx, report):
        return True
    return causes.broken(ctx) is None and drains.expired(ctx, _limit(ctx))


def _is_saved(ctx: JobContext, report: Report) -> bool:
    """Whether this end is one after which nothing more will be saved. One that began for another reason (growing, say)
    was not saved; the coordinator is asked for that then, and what it says just after may be from before it was."""
    if not ctx.saves_durably:
        return True
    latest = report.storage.latest if report.storage else None
    step = report.progress.step if report.progress else 0
    if latest is not None and latest.uid == ctx.observed.job.uid and latest.step >= max(step, _in_memory(ctx)):
        return True
    return not _stopped_unsaved(ctx, report) and drains.saved_as_asked(ctx, constants.RETRY)


def _stopped_unsaved(ctx: JobContext, report: Report) -> bool:
    """A script was stopped before it had saved what the round went on from, which node memory alone has."""
    made = report.progress.step if report.progress else 0
    return not ctx.spec.bundled and made <= _in_memory(ctx) > 0


def _in_memory(ctx: JobContext) -> int:
    """The step that the round went on from, where that was in node memory; else 0."""
    base = ctx.world.base
    return base.step if base is not None and base.source == RestoreSource.MEMORY else 0


def _goes_on(ctx: JobContext) -> bool:
    return ctx.round.committed and causes.broken(ctx) is None


def _limit(ctx: JobContext) -> float:
    """Seconds for the round to stop."""
    return constants.DRAIN_DURABLE if ctx.saves_durably else constants.DRAIN


def _draining(ctx: JobContext, phase: Phase, reason: str, why: str) -> Decision:
    durable = ctx.saves_durably
    message = f"{why}: the round stops after the same step everywhere" + (" and is saved" if durable else "")
    storage = ctx.round.report.storage if ctx.round.report else None
    if storage and storage.state == StorageHealth.ERROR:
        message += f"; durable storage fails: {storage.message}"
    return Decision(
        phase,
        reason,
        message,
        actions=drains.drain(ctx, why, durable, _limit(ctx)),
        recheck=constants.RETRY,
    )


def _overdue(ctx: JobContext) -> bool:
    at = ctx.round.claim.at if ctx.round.claim else None
    return not ctx.round.committed and at is not None and ctx.elapsed(at) >= 2 * constants.DRAIN


def _suspended(ctx: JobContext) -> Decision:
    pod_count, job = len(ctx.observed.pods), ctx.observed.job
    phase = Phase.SUSPENDING if pod_count else Phase.SUSPENDED
    message = "spec.suspend is set: no pods, the state is kept"
    if pod_count:
        message = f"{amount(pod_count, 'pod')} {are(pod_count)} being deleted"
    if held_by(job):
        phase = Phase.DELETING
        message = f"{why_deleting(job)}: {message if pod_count else 'it has no pods any more'}"
    if away := sorted({pod.node for pod in ctx.observed.pods if not ctx.node(pod).ready}):
        message += f"; {first_of(away, 5)} can't confirm that: what runs there may go on for as long"
    disbanded = claims.disbanded(ctx, "Deleting" if phase is Phase.DELETING else "Suspended")
    return Decision(phase, phase.value, message, world=disbanded, pods=Pods.NONE)


# --- deleted jobs that a finalizer holds

GARBAGE_COLLECTOR = ("foregroundDeletion", "orphan")
"""Finalizers of the garbage collector, which deletes the pods itself, or is to leave them alone."""
ORPHAN = "orphan"
DELETION_REMARK = "the job is being deleted, and a finalizer holds it"


def held_by(job: JobView) -> tuple[str, ...]:
    """The finalizers that keep a deleted job, for however long; empty where the garbage collector does the rest."""
    if not job.deleting or ORPHAN in job.finalizers:
        return ()
    return tuple(name for name in job.finalizers if name not in GARBAGE_COLLECTOR)


def why_deleting(job: JobView) -> str:
    """Say that a job is being deleted, and what holds it."""
    return f"the job is being deleted, and held by the finalizer {first_of(held_by(job), 3)}"


def annotate_deletion(ctx: JobContext, decision: Decision) -> Decision:
    """Add to any other decision about a deleted job that it is being deleted."""
    if not held_by(ctx.observed.job) or decision.phase is Phase.DELETING or DELETION_REMARK in decision.message:
        return decision
    return replace(decision, message=f"{decision.message}; {DELETION_REMARK}")


def without_new_pods(pods: PodPlan) -> PodPlan:
    """Return the plan without creations: nothing replaces the pods of a deleted job."""
    ends = tuple(action for action in pods.actions if isinstance(action, DeletePod | EndPod))
    return replace(pods, actions=ends, events=(), missing=False)
