"""Escalation: the action that answers a failure, and what counts as one.

ACTIONS lists them from the least disruptive one to the last resort (decision "The recovery ladder is a table"). A
failure gets the strongest action that is called for; while failures repeat without progress between them, none is
weaker than the one before. Each says in a sentence why it is called for, and has a budget of its own within
failurePolicy.windowSeconds. When the budget is spent, or the same bug shows again and again, the job has failed.

A failure counts if its cause lies in the job; the death of a node does not (decision "What uses up maxRestarts").
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from concertina.api.restarts import LONGEST_MESSAGE, LastFailure, Restart, Restarts, RungUse
from concertina.api.spec import JobSpec
from concertina.api.status import ConditionType, rfc3339, unix_seconds
from concertina.plan.facts.cached import cached
from concertina.plan.facts.context import JobContext
from concertina.plan.facts.decision import Decision, Phase, Pods, Reason
from concertina.plan.facts.replicas import REPLACE_POD
from concertina.plan.observed import PodView
from concertina.plan.pods import backoff
from concertina.plan.recovery import repeats
from concertina.plan.rounds.claims import Cause
from concertina_protocol import LONGEST_LAST_LINE, MOST_LAST_LINES, FailureReason, RestoreSource

NEW_ROUND, WITHOUT_MEMBER, WHOLE_RESTART = "NewRound", "WithoutMember", "WholeRestart"
IN_A_ROW = 3
"""Failures without progress that a rung answers before the next one is tried."""
WHOLE_RESTARTS = 2
"""Within a window."""
REPLACE_AT_ONCE = frozenset({Reason.HANG, Reason.STRAGGLER, FailureReason.SILENT_CORRUPTION})
"""Verdicts on a replica that a new round with it would not mend."""


@dataclass(frozen=True)
class Failing:
    """One failure, and those before it."""

    ctx: JobContext
    failed: Restart
    lost: bool
    """The member itself is gone; what its workers did is not the question."""

    @cached
    def row(self) -> tuple[Restart, ...]:
        """The failures before it, of the job's own, without progress since."""
        return tuple(entry for entry in repeats.since_progress(self.ctx, self.failed) if entry.counted)

    @cached
    def mendable(self) -> bool:
        """Whether more than a new round could help; it can't where storage does not give the state to go on from."""
        base = self.ctx.world.base
        from_storage = base is not None and base.source == RestoreSource.STORAGE
        return self.failed.counted and not (self.failed.reason == FailureReason.RESTORE_FAILED and from_storage)

    @property
    def from_nothing(self) -> bool:
        """Whether without its pod what it has trained would be lost: nobody else holds it, nor is it in storage."""
        ctx, base = self.ctx, self.ctx.world.base
        if base is not None and base.source != RestoreSource.MEMORY and ctx.round.step <= base.step:
            return False  # there is no more than any pod would begin with
        return ctx.keeps_state and len(ctx.world.members) == 1 and ctx.status.last_checkpoint is None

    def tried(self, rung: str) -> int:
        return sum(entry.rung == rung for entry in self.row)


@dataclass(frozen=True)
class RecoveryAction:
    name: str
    does: str
    """What the operator does, as a sentence."""
    called_for: Callable[[Failing], str]
    """Why the failure calls for the action, as a sentence without its full stop; empty where it does not."""
    budget: Callable[[JobSpec], int | None]
    """Failures that it answers within a window; None: any number."""


def _new_round(failing: Failing) -> str:
    failed = failing.failed
    return f"Replica {failed.replica} failed" if failed.replica else f"Training failed ({failed.reason})"


def _without_member(failing: Failing) -> str:
    return f"Replica {failing.failed.replica} is lost" if failing.lost else ""


def _replace_pod(failing: Failing) -> str:
    failed, ctx = failing.failed, failing.ctx
    if not failing.mendable or not failed.replica or failing.from_nothing:
        return ""
    if failed.reason in REPLACE_AT_ONCE:
        return f"Replica {failed.replica} holds up the others ({failed.reason})"
    if any(entry.replica == failed.replica and entry.counted for entry in ctx.recent):
        return f"Replica {failed.replica} failed again"
    if failed.node in ctx.avoided:
        return f"Replica {failed.replica} failed on node {failed.node}, where other replicas failed before"
    if failing.tried(REPLACE_POD) or failing.tried(NEW_ROUND) >= IN_A_ROW:
        return f"Replica {failed.replica} failed after {len(failing.row)} failures without progress between them"
    return ""


def _whole_restart(failing: Failing) -> str:
    ctx, failed = failing.ctx, failing.failed
    if not failing.mendable or not ctx.saves_durably or ctx.status.last_checkpoint is None:
        return ""
    if failing.tried(WHOLE_RESTART):
        return "The job made no progress after a whole restart"
    if failed.reason == FailureReason.RESTORE_FAILED and any(
        entry.reason == FailureReason.RESTORE_FAILED for entry in failing.row
    ):
        return "The state in node memory cannot be restored"
    if failing.tried(REPLACE_POD) >= IN_A_ROW:
        return f"The job made no progress after {failing.tried(REPLACE_POD)} replaced pods"
    if failing.tried(REPLACE_POD) and repeats.is_bug(ctx, failed):
        return "Replaced pods fail in the same way, so the state in node memory may be damaged"
    return ""


def _allowed(spec: JobSpec) -> int:
    return spec.failure_policy.max_restarts


ACTIONS = (
    RecoveryAction(NEW_ROUND, "A new round starts with the same replicas.", _new_round, _allowed),
    RecoveryAction(
        WITHOUT_MEMBER, "A new round starts without it unless it answers.", _without_member, lambda spec: None
    ),
    RecoveryAction(REPLACE_POD, "A new pod replaces it, on another node if there is one.", _replace_pod, _allowed),
    RecoveryAction(
        WHOLE_RESTART,
        "The whole job restarts from its durable checkpoint.",
        _whole_restart,
        lambda spec: WHOLE_RESTARTS,
    ),
)


@dataclass(frozen=True)
class Answer:
    """Empty `rung`: the job has failed, for `reason`."""

    rung: str
    reason: str
    sentence: str


def answer(ctx: JobContext, failed: Restart, lost: bool, told: str) -> Answer:
    """Return what follows from a failure, apart from maxRestarts (`budget.exhausted`). `told` is the failure in a
    sentence, for a job that ends with it."""
    failing = Failing(ctx, failed, lost)
    rung, why = next((rung, why) for rung in reversed(ACTIONS) if (why := rung.called_for(failing)))
    if (rung.name != WHOLE_RESTART or failing.tried(WHOLE_RESTART)) and repeats.is_bug(ctx, failed):
        return Answer("", repeats.reason(failed), repeats.sentence(ctx, failed, told))
    if rung.name == WHOLE_RESTART and failed.counted and _left(rung, ctx.spec, ctx.recent) == 0:
        return Answer("", "RestartsExhausted", _spent(ctx, why, told))
    return Answer(rung.name, rung.name, f"{why}. {rung.does}")


def _spent(ctx: JobContext, why: str, told: str) -> str:
    window = ctx.spec.failure_policy.window_seconds
    limit = f"A job restarts as a whole at most {WHOLE_RESTARTS} times within {window} s"
    return f"{why}. {limit}. The last failure: {told}"


def uses(spec: JobSpec, entries: tuple[Restart, ...]) -> tuple[RungUse, ...]:
    """For status.restarts."""
    return tuple(
        RungUse(rung=rung.name, in_window=_used(rung, entries), budget=_left(rung, spec, entries)) for rung in ACTIONS
    )


def _used(rung: RecoveryAction, entries: tuple[Restart, ...]) -> int:
    return sum(entry.rung == rung.name for entry in entries)


def _left(rung: RecoveryAction, spec: JobSpec, entries: tuple[Restart, ...]) -> int | None:
    """Of the budget; what lies outside of the job uses up none."""
    budget = rung.budget(spec)
    spent = sum(entry.rung == rung.name and entry.counted for entry in entries)
    return None if budget is None else max(0, budget - spent)


# --- status.restarts and failurePolicy.maxRestarts

KEPT = 1001
WITH_ERROR = 50


def restart_entry(ctx: JobContext, cause: Cause) -> Restart | None:
    """Return the entry in status.restarts for this cause, without its action; None for a planned change."""
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
    failed = restart_entry(ctx, cause)
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


def restarts_exhausted(ctx: JobContext, cause: Cause | None = None) -> Decision | None:
    """End the job if its failures, this one included, exceed maxRestarts."""
    failed = restart_entry(ctx, cause) if cause else None
    new = failed is not None and failed.counted and not _is_counted(ctx, failed)
    count = sum(entry.counted for entry in ctx.recent) + new
    if count <= ctx.spec.failure_policy.max_restarts:
        return None
    message = _exhausted_sentence(
        ctx, count, cause.replica if cause else "", cause.sentence if cause else _last_counted(ctx)
    )
    return Decision(Phase.FAILED, "RestartsExhausted", message, restart=failed, pods=Pods.ENDED)


def _exhausted_sentence(ctx: JobContext, count: int, replica: str, last: str) -> str:
    policy = ctx.spec.failure_policy
    limit = f"failurePolicy.maxRestarts is {policy.max_restarts}"
    if count == 1:
        who = f"Replica {replica}" if replica else "The job"
        return f"{who} failed once, and {limit}. Raise maxRestarts to allow restarts. The failure: {last}"
    often = f"The job failed {count} times within {policy.window_seconds} s, and {limit}"
    return f"{often}. Raise maxRestarts if so many failures are expected. The last failure: {last}"


def _last_counted(ctx: JobContext) -> str:
    running = ctx.status.condition(ConditionType.RUNNING)
    last = next((entry for entry in reversed(ctx.recent) if entry.counted), None)
    if last is not None:
        return last.message or f"{last.replica}: {last.reason}"
    return running.message if running and running.message else "unknown"


def restarts_after(
    ctx: JobContext, answered: Restart | None, replaced: tuple[PodView, ...] = (), stuck: tuple[Restart, ...] = ()
) -> Restarts:
    """Return status.restarts after this pass.

    It gains the failure that is answered, pods that ended by themselves (once each, when their index moves on to the
    next attempt), and replicas that don't get to start.
    """
    entries, new = list(ctx.recent), 0
    if answered and not _is_counted(ctx, answered):
        entries, new = [*entries, answered], 1
    places = {entry.replica: place for place, entry in enumerate(entries)} if replaced else {}
    for pod in replaced:
        known = places.get(pod.name)
        if backoff.ended_by_itself(pod) and known is None:
            new += 1
            entries.append(backoff.entry_of(ctx, pod).model_copy(update={"rung": WITHOUT_MEMBER}))
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
        rungs=uses(ctx.spec, kept),
        recent=kept,
    )


def _learnt(ctx: JobContext, pod: PodView) -> dict[str, object]:
    """Return what the end of a pod adds to the entry of the failure that it was answered as."""
    node = ctx.node(pod)
    if backoff.ended_by_itself(pod):
        return {"counted": True}
    return {"reason": Reason.NODE_LOST} if node.out_of_service or not node.ready else {}


def _bounded(entries: list[Restart]) -> tuple[Restart, ...]:
    """Keep the texts of the newest failures only."""
    old, new = entries[-KEPT:-WITH_ERROR], entries[-WITH_ERROR:]
    without = {"error": "", "message": ""}
    return (*(entry.model_copy(update=without) if entry.error or entry.message else entry for entry in old), *new)


def _is_counted(ctx: JobContext, answered: Restart) -> bool:
    """Whether the end of that replica's pod was counted since the round began: the same failure, answered later."""
    since = unix_seconds(ctx.world.since) if ctx.world.since else ctx.now
    return any(entry.replica == answered.replica and unix_seconds(entry.at) > since for entry in ctx.recent)
