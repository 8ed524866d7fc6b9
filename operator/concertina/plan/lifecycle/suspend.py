"""spec.suspend: the round is drained and saved, then its pods are deleted."""

from __future__ import annotations

from concertina.plan.facts import constants, sizes
from concertina.plan.facts.context import JobContext
from concertina.plan.facts.decision import Decision, Phase, Pods
from concertina.plan.recovery import causes
from concertina.plan.rounds import claims, drains
from concertina.plan.state import restore
from concertina_protocol import State, StorageHealth


def suspend(ctx: JobContext) -> Decision | None:
    """Drain with a checkpoint in storage, then delete the pods. A round that is being made is made first, so that it
    can be drained; where there is none, nothing can be lost."""
    if not ctx.spec.suspend:
        return None
    if not ctx.observed.pods or not ctx.world.members:
        return _suspended(ctx)
    if ctx.round.committed:
        report = ctx.round.report
        if report is not None and report.state == State.DRAINED:
            return _suspended(ctx)
        if causes.broken(ctx) is None:
            return _draining(ctx)
    can_go_on = sizes.fitting(len(claims.candidates(ctx)), ctx.spec) > 0
    return None if can_go_on and not _overdue(ctx) else _suspended(ctx)


def _draining(ctx: JobContext) -> Decision:
    durable = restore.uses_storage(ctx.spec)
    limit = constants.DRAIN_DURABLE if durable else constants.DRAIN
    if drains.expired(ctx, limit):
        return _suspended(ctx)
    message = "spec.suspend is set: the round stops after the same step everywhere" + (
        " and is saved" if durable else ""
    )
    storage = ctx.round.report.storage if ctx.round.report else None
    if storage and storage.state == StorageHealth.ERROR:
        message += f"; durable storage fails: {storage.message}"
    return Decision(
        Phase.SUSPENDING,
        "Suspending",
        message,
        actions=drains.drain(ctx, "spec.suspend is set", durable, limit),
        recheck=constants.RETRY,
    )


def _overdue(ctx: JobContext) -> bool:
    at = ctx.round.claim.at if ctx.round.claim else None
    return not ctx.round.committed and at is not None and ctx.elapsed(at) >= 2 * constants.DRAIN


def _suspended(ctx: JobContext) -> Decision:
    left = len(ctx.observed.pods)
    phase = Phase.SUSPENDING if left else Phase.SUSPENDED
    message = f"{left} pods are being deleted" if left else "spec.suspend is set: no pods, the state is kept"
    reason = "Suspending" if left else "Suspended"
    return Decision(phase, reason, message, world=claims.disbanded(ctx, "Suspended"), pods=Pods.NONE)
