"""What counts as a failure: what happened within a sliding window, and whose cause lies in the job; a node's death is
none."""

from __future__ import annotations

from concertina.api.status import LastFailure, Restart, Restarts, rfc3339, unix_seconds
from concertina.plan.facts.decision import Decision, Phase, Pods
from concertina.plan.facts.look import Look
from concertina.plan.pods import backoff
from concertina.plan.recovery import ladder
from concertina.plan.rounds.claims import Cause
from concertina.plan.types import PodView

KEPT = 1001
WITH_ERROR = 50
LINES, LONGEST = 20, 400
"""Of what a worker printed last, and of one line of it."""


def restart(look: Look, cause: Cause) -> Restart | None:
    """The entry in status.restarts for a new round that answers this cause; its rung is still to be found."""
    if cause.planned:
        return None
    pod = look.pods.get(cause.replica)
    member = look.members.get(cause.replica)
    return Restart(
        at=rfc3339(look.now),
        replica=cause.replica,
        node=pod.node if pod else member.node if member else "",
        reason=cause.reason,
        step=max(look.step, cause.step),
        counted=cause.counted,
        error=cause.error,
        after_seconds=max(0.0, look.now - unix_seconds(look.world.since)) if look.world.since else 0.0,
    )


def last_failure(look: Look, cause: Cause) -> LastFailure | None:
    """For status.lastFailure; the same as long as the cause is."""
    failed = restart(look, cause)
    if failed is None:
        return None
    old, round = look.status.last_failure, look.world.round
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


def exhausted(look: Look, cause: Cause | None = None) -> Decision | None:
    """Failed, where the budget is spent, this cause included."""
    counted = sum(restart.counted for restart in look.recent) + (cause is not None and cause.counted)
    policy = look.spec.failure_policy
    if counted <= policy.max_restarts:
        return None
    last = cause.sentence if cause else _last(look)
    message = (
        f"failed {counted} times within {policy.window_seconds} s, and failurePolicy.maxRestarts is "
        f"{policy.max_restarts}. The last failure: {last}"
    )
    return Decision(Phase.FAILED, "RestartsExhausted", message, pods=Pods.ENDED)


def _last(look: Look) -> str:
    running = look.status.condition("Running")
    last = next((restart for restart in reversed(look.recent) if restart.counted), None)
    return running.message if running and running.message else f"{last.replica}: {last.reason}" if last else "unknown"


def counted(
    look: Look, answered: Restart | None, replaced: tuple[PodView, ...] = (), stuck: tuple[Restart, ...] = ()
) -> Restarts:
    """status.restarts after this pass: the failure answered, pods that ended by themselves (counted once each, when
    their index moves on to the next attempt), and replicas that don't get to start."""
    entries, new = list(look.recent), 0
    if answered and not _told(look, answered):
        entries, new = [*entries, answered], 1
    for pod in replaced:
        known = next((i for i, entry in reversed(list(enumerate(entries))) if entry.replica == pod.name), None)
        if backoff.ended_by_itself(pod) and known is None:
            new += 1
            entries.append(backoff.entry_of(look, pod).model_copy(update={"rung": ladder.WITHOUT_MEMBER}))
        elif known is not None and (learnt := _learnt(look, pod)):
            entries[known] = entries[known].model_copy(update=learnt)
    entries, new = [*entries, *stuck], new + len(stuck)
    spent = sum(entry.counted for entry in entries)
    left = max(0, look.spec.failure_policy.max_restarts - spent)
    if entries == list(look.status.restarts.recent) and not new and left == look.status.restarts.budget:
        return look.status.restarts
    kept = _bounded(entries)
    return Restarts(
        in_window=spent,
        budget=left,
        total=look.status.restarts.total + new,
        rungs=ladder.uses(look.spec, kept),
        recent=kept,
    )


def _learnt(look: Look, pod: PodView) -> dict[str, object]:
    """What the end of a pod adds to the failure that it was answered as."""
    node = look.node(pod)
    if backoff.ended_by_itself(pod):
        return {"counted": True}
    return {"reason": "NodeLost"} if node.out_of_service or not node.ready else {}


def _bounded(entries: list[Restart]) -> tuple[Restart, ...]:
    """What was said is kept of the newest alone."""
    old, new = entries[-KEPT:-WITH_ERROR], entries[-WITH_ERROR:]
    return (*(entry.model_copy(update={"error": ""}) if entry.error else entry for entry in old), *new)


def _told(look: Look, answered: Restart) -> bool:
    """Whether the end of that replica's pod was counted since the round began: the same failure, answered later."""
    since = unix_seconds(look.world.since) if look.world.since else look.now
    return any(entry.replica == answered.replica and unix_seconds(entry.at) > since for entry in look.recent)
