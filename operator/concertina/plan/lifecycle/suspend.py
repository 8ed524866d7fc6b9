"""Suspension (`spec.suspend`): drain the round, save the round's state, then delete the job's pods.

The operator does the same in two more cases. In the first case, a job was resumed with another pod template while it
still had old pods. In the second case, a job was deleted but still exists, because another tool's finalizer keeps it
(decision "Deleted jobs with a foreign finalizer are drained").

In a drain, all ranks stop after the same step. A round is a period in which a fixed set of replicas trains.
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
    """Drain the round with a durable checkpoint, then delete the pods.

    In a drain, all ranks stop after the same step. If a round is being formed, it is completed first and then drained.
    If there is no round, the pods are deleted at once, because no state can be lost.
    """
    if not ctx.spec.suspend:
        return None
    if not ctx.observed.pods or not ctx.world.members:
        return _suspended(ctx)
    if _is_over(ctx):
        return _suspended(ctx)
    if _goes_on(ctx):
        report = ctx.round.report
        if report is not None and report.state == State.DRAINED and _stopped_unsaved(ctx, report):
            return None  # the next round will save the state
        if held_by(ctx.observed.job):
            return _draining(ctx, Phase.DELETING, "Deleting", why_deleting(ctx.observed.job))
        return _draining(ctx, Phase.SUSPENDING, "Suspending", ctx.why_stopped)
    can_go_on = sizes.fitting(len(ctx.replicas.candidates), ctx.spec) > 0
    return None if can_go_on and not _overdue(ctx) else _suspended(ctx)


def replace_outdated(ctx: JobContext) -> Decision | None:
    """Drain the round if members were created from an outdated pod template, so that their pods can be replaced.

    Such members exist if a job is suspended and then resumed before its pods are gone. The round is drained with a
    checkpoint. The members then belong to no round, and their pods are replaced (decision "Pods carry a hash of their
    spec").

    In a drain, all ranks stop after the same step.
    """
    outdated = sorted(ctx.replicas.outdated.intersection(ctx.round.members))
    if not outdated:
        return None
    why = f"replica {outdated[0]} has an outdated pod template"
    if _goes_on(ctx) and not _is_over(ctx):
        return _draining(ctx, Phase.DRAINING, Reason.TEMPLATE_CHANGED, why)
    can_go_on = ctx.keeps_state and sizes.fitting(len(ctx.replicas.candidates), ctx.spec) > 0
    if can_go_on and not _is_over(ctx) and not _overdue(ctx):
        return None  # the round being formed will save the state that is only in node memory
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
    """Return whether the round has been drained and saved, or whether the time limit for both has passed.

    In a drain, all ranks stop after the same step.
    """
    if not ctx.round.committed:
        return False
    report = ctx.round.report
    if report is not None and report.state == State.DRAINED and _is_saved(ctx, report):
        return True
    return causes.broken(ctx) is None and drains.expired(ctx, _limit(ctx))


def _is_saved(ctx: JobContext, report: Report) -> bool:
    """Return whether a drained round has saved its state, or can no longer save it.

    In a drain, all ranks stop after the same step. A drain for another reason, for example because new replicas join,
    does not save the state to storage. The operator then asks the coordinator (the agent of rank 0) to save the state.
    Reports that arrive soon after this request may still describe the time before it.
    """
    if not ctx.saves_durably:
        return True
    latest = report.storage.latest if report.storage else None
    step = report.progress.step if report.progress else 0
    if latest is not None and latest.uid == ctx.observed.job.uid and latest.step >= max(step, _in_memory(ctx)):
        return True
    return not _stopped_unsaved(ctx, report) and drains.saved_as_asked(ctx, constants.RETRY)


def _stopped_unsaved(ctx: JobContext, report: Report) -> bool:
    """Return whether a script stopped without saving state that is newer than the round's initial state.

    If the round began with state from the pods' memory, only the pods have that initial state.
    """
    step = report.progress.step if report.progress else 0
    return not ctx.spec.bundled and step <= _in_memory(ctx) > 0


def _in_memory(ctx: JobContext) -> int:
    """Return the step at which the round began, if its initial state came from the pods' memory; otherwise 0."""
    base = ctx.world.base
    return base.step if base is not None and base.source == RestoreSource.MEMORY else 0


def _goes_on(ctx: JobContext) -> bool:
    return ctx.round.committed and causes.broken(ctx) is None


def _limit(ctx: JobContext) -> float:
    """Return the time limit in seconds within which a round must stop and save its state."""
    return constants.DRAIN_DURABLE if ctx.saves_durably else constants.DRAIN


def _draining(ctx: JobContext, phase: Phase, reason: str, why: str) -> Decision:
    durable = ctx.saves_durably
    message = f"{why}: all ranks stop after the same step" + (" and is saved" if durable else "")
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
    claimed_at = ctx.round.claim.at if ctx.round.claim else None
    return not ctx.round.committed and claimed_at is not None and ctx.elapsed(claimed_at) >= 2 * constants.DRAIN


def _suspended(ctx: JobContext) -> Decision:
    pod_count, job = len(ctx.observed.pods), ctx.observed.job
    phase = Phase.SUSPENDING if pod_count else Phase.SUSPENDED
    checkpoint = ctx.status.last_checkpoint
    state = f"checkpoint {checkpoint.step} is in storage" if checkpoint else "no checkpoint is in storage"
    message = f"{ctx.why_stopped}: the pods are removed, and {state}"
    if pod_count:
        message = f"{amount(pod_count, 'pod')} {are(pod_count)} being deleted"
    if held_by(job):
        phase = Phase.DELETING
        message = f"{why_deleting(job)}: {message if pod_count else 'it has no pods anymore'}"
    if unready_nodes := sorted({pod.node for pod in ctx.observed.pods if not ctx.node(pod).ready}):
        message += f"; {first_of(unready_nodes, 5)} can't confirm this, so processes may still run there"
    disbanded = claims.disbanded(ctx, "Deleting" if phase is Phase.DELETING else "Suspended")
    return Decision(phase, phase.value, message, world=disbanded, pods=Pods.NONE)


# --- deleted jobs that a finalizer keeps

GARBAGE_COLLECTOR = ("foregroundDeletion", "orphan")
"""Finalizers of the Kubernetes garbage collector, which either deletes the pods itself or must leave them alone."""
ORPHAN = "orphan"
DELETION_REMARK = "the job is being deleted, and it still has a finalizer"


def held_by(job: JobView) -> tuple[str, ...]:
    """Return the finalizers that keep a deleted job in existence, except those of the Kubernetes garbage collector.

    The result is empty if the job is not being deleted. It is also empty if the deletion orphans the job's pods.
    """
    if not job.deleting or ORPHAN in job.finalizers:
        return ()
    return tuple(name for name in job.finalizers if name not in GARBAGE_COLLECTOR)


def why_deleting(job: JobView) -> str:
    """Return a sentence that says that the job is being deleted and which finalizers keep it."""
    return f"the job is being deleted, and it still has the finalizer {first_of(held_by(job), 3)}"


def annotate_deletion(ctx: JobContext, decision: Decision) -> Decision:
    """Add to the message of a decision that the job is being deleted."""
    if not held_by(ctx.observed.job) or decision.phase is Phase.DELETING or DELETION_REMARK in decision.message:
        return decision
    return replace(decision, message=f"{decision.message}; {DELETION_REMARK}")


def without_new_pods(pods: PodPlan) -> PodPlan:
    """Return the pod plan without the creations of pods, because a job that is being deleted gets no new pods."""
    ends = tuple(action for action in pods.actions if isinstance(action, DeletePod | EndPod))
    return replace(pods, actions=ends, events=(), missing=False)
