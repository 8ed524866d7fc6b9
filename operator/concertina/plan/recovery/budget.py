"""What counts as a failure: what happened within a sliding window, and whose cause lies in the job; a node's death is
none (decision "What uses up maxRestarts")."""

from __future__ import annotations

from concertina.api.restarts import LONGEST_MESSAGE, LastFailure, Restart, Restarts
from concertina.api.status import ConditionType, rfc3339, unix_seconds
from concertina.plan.facts.context import JobContext
from concertina.plan.facts.decision import Decision, Phase, Pods, Reason
from concertina.plan.observed import PodView
from concertina.plan.pods import backoff
from concertina.plan.recovery import escalation
from concertina.plan.rounds.claims import Cause
from concertina_protocol import LONGEST_LAST_LINE, MOST_LAST_LINES

KEPT = 1001
WITH_ERROR = 50


def restart(ctx: JobContext, cause: Cause) -> Restart | None:
    """Return the entry in status.restarts for this cause, without its rung; None for a planned change."""
    if cause.planned:
        return None
    return Restart(
        at=rfc3339(ctx.now),
        replica=cause.replica,
        node=ctx.node_of(cause.replica),
        reason=cause.reason,
        step=max(ctx.round.step, cause.step or 0),
        counted=cause.counted,
        message=cause.message[:LONGEST_MESSAGE],
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
    lines = [line.rstrip()[:LONGEST_LAST_LINE] for line in cause.last_lines if line.strip()]
    return LastFailure(
        at=failed.at,
        round=round,
        replica=failed.replica,
        node=failed.node,
        exit_code=cause.exit_code,
        reason=failed.reason,
        message=cause.sentence,
        last_lines=tuple(lines[-MOST_LAST_LINES:]),
    )


def exhausted(ctx: JobContext, cause: Cause | None = None) -> Decision | None:
    """End the job if its failures, this one included, exceed maxRestarts."""
    failed = restart(ctx, cause) if cause else None
    new = failed is not None and failed.counted and not _told(ctx, failed)
    count = sum(entry.counted for entry in ctx.recent) + new
    if count <= ctx.spec.failure_policy.max_restarts:
        return None
    message = _exhausted(ctx, count, cause.replica if cause else "", cause.sentence if cause else _last(ctx))
    return Decision(Phase.FAILED, "RestartsExhausted", message, restart=failed, pods=Pods.ENDED)


def _exhausted(ctx: JobContext, count: int, replica: str, last: str) -> str:
    policy = ctx.spec.failure_policy
    limit = f"failurePolicy.maxRestarts is {policy.max_restarts}"
    if count == 1:
        who = f"Replica {replica}" if replica else "The job"
        return f"{who} failed once, and {limit}. Raise maxRestarts to allow restarts. The failure: {last}"
    often = f"The job failed {count} times within {policy.window_seconds} s, and {limit}"
    return f"{often}. Raise maxRestarts if so many failures are expected. The last failure: {last}"


def _last(ctx: JobContext) -> str:
    running = ctx.status.condition(ConditionType.RUNNING)
    last = next((entry for entry in reversed(ctx.recent) if entry.counted), None)
    if last is not None:
        return last.message or f"{last.replica}: {last.reason}"
    return running.message if running and running.message else "unknown"


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
    """Keep the texts of the newest failures only."""
    old, new = entries[-KEPT:-WITH_ERROR], entries[-WITH_ERROR:]
    without = {"error": "", "message": ""}
    return (*(entry.model_copy(update=without) if entry.error or entry.message else entry for entry in old), *new)


def _told(ctx: JobContext, answered: Restart) -> bool:
    """Whether the end of that replica's pod was counted since the round began: the same failure, answered later."""
    since = unix_seconds(ctx.world.since) if ctx.world.since else ctx.now
    return any(entry.replica == answered.replica and unix_seconds(entry.at) > since for entry in ctx.recent)
