"""What counts as a failure: what happened within a sliding window, and whose cause lies in the job; a node's death is
none (decision "What uses up maxRestarts")."""

from __future__ import annotations

from concertina.api.restarts import LastFailure, Restart, Restarts
from concertina.api.status import ConditionType, rfc3339, unix_seconds
from concertina.plan.facts.context import JobContext
from concertina.plan.facts.decision import Decision, Phase, Pods
from concertina.plan.facts.reasons import Reason
from concertina.plan.observed import PodView
from concertina.plan.pods import backoff
from concertina.plan.recovery import escalation
from concertina.plan.rounds.claims import Cause

KEPT = 1001
WITH_ERROR = 50
LINES, LONGEST = 20, 400
"""Of what a worker printed last, and of one line of it."""


def restart(ctx: JobContext, cause: Cause) -> Restart | None:
    """The entry in status.restarts for a new round that answers this cause; its rung is still to be found."""
    if cause.planned:
        return None
    return Restart(
        at=rfc3339(ctx.now),
        replica=cause.replica,
        node=ctx.node_of(cause.replica),
        reason=cause.reason,
        step=max(ctx.round.step, cause.step or 0),
        counted=cause.counted,
        error=cause.error,
        after_seconds=max(0.0, ctx.now - unix_seconds(ctx.world.since)) if ctx.world.since else 0.0,
    )


def last_failure(ctx: JobContext, cause: Cause) -> LastFailure | None:
    """For status.lastFailure; the same as long as the cause is."""
    failed = restart(ctx, cause)
    if failed is None:
        return None
    old, round = ctx.status.last_failure, ctx.world.round
    if old and (old.round, old.replica, old.reason, old.message) == (
        round,
        failed.replica,
        failed.reason,
        cause.sentence,
    ):
        return old
    lines = [line.rstrip()[:LONGEST] for line in cause.last_lines if line.strip()]
    return LastFailure(
        at=failed.at,
        round=round,
        replica=failed.replica,
        node=failed.node,
        exit_code=cause.exit_code,
        reason=failed.reason,
        message=cause.sentence,
        last_lines=tuple(lines[-LINES:]),
    )


def exhausted(ctx: JobContext, cause: Cause | None = None) -> Decision | None:
    """Failed, where the budget is spent, this cause included."""
    counted = sum(restart.counted for restart in ctx.recent) + (cause is not None and cause.counted)
    policy = ctx.spec.failure_policy
    if counted <= policy.max_restarts:
        return None
    last = cause.sentence if cause else _last(ctx)
    message = (
        f"failed {counted} times within {policy.window_seconds} s, and failurePolicy.maxRestarts is "
        f"{policy.max_restarts}. The last failure: {last}"
    )
    return Decision(Phase.FAILED, "RestartsExhausted", message, pods=Pods.ENDED)


def _last(ctx: JobContext) -> str:
    running = ctx.status.condition(ConditionType.RUNNING)
    last = next((restart for restart in reversed(ctx.recent) if restart.counted), None)
    return running.message if running and running.message else f"{last.replica}: {last.reason}" if last else "unknown"


def counted(
    ctx: JobContext, answered: Restart | None, replaced: tuple[PodView, ...] = (), stuck: tuple[Restart, ...] = ()
) -> Restarts:
    """status.restarts after this pass: the failure answered, pods that ended by themselves (counted once each, when
    their index moves on to the next attempt), and replicas that don't get to start."""
    entries, new = list(ctx.recent), 0
    if answered and not _told(ctx, answered):
        entries, new = [*entries, answered], 1
    places = {entry.replica: place for place, entry in enumerate(entries)} if replaced else {}
    for pod in replaced:
        known = places.get(pod.name)
        if backoff.ended_by_itself(pod) and known is None:
            new += 1
            entries.append(backoff.entry_of(ctx, pod).model_copy(update={"rung": escalation.WITHOUT_MEMBER}))
        elif known is not None and (learnt := _learnt(ctx, pod)):
            entries[known] = entries[known].model_copy(update=learnt)
    entries, new = [*entries, *stuck], new + len(stuck)
    spent = sum(entry.counted for entry in entries)
    left = max(0, ctx.spec.failure_policy.max_restarts - spent)
    if entries == list(ctx.status.restarts.recent) and not new and left == ctx.status.restarts.budget:
        return ctx.status.restarts
    kept = _bounded(entries)
    return Restarts(
        in_window=spent,
        budget=left,
        total=ctx.status.restarts.total + new,
        rungs=escalation.uses(ctx.spec, kept),
        recent=kept,
    )


def _learnt(ctx: JobContext, pod: PodView) -> dict[str, object]:
    """What the end of a pod adds to the failure that it was answered as."""
    node = ctx.node(pod)
    if backoff.ended_by_itself(pod):
        return {"counted": True}
    return {"reason": Reason.NODE_LOST} if node.out_of_service or not node.ready else {}


def _bounded(entries: list[Restart]) -> tuple[Restart, ...]:
    """What was said is kept of the newest alone."""
    old, new = entries[-KEPT:-WITH_ERROR], entries[-WITH_ERROR:]
    return (*(entry.model_copy(update={"error": ""}) if entry.error else entry for entry in old), *new)


def _told(ctx: JobContext, answered: Restart) -> bool:
    """Whether the end of that replica's pod was counted since the round began: the same failure, answered later."""
    since = unix_seconds(ctx.world.since) if ctx.world.since else ctx.now
    return any(entry.replica == answered.replica and unix_seconds(entry.at) > since for entry in ctx.recent)
