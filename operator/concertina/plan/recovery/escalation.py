"""Escalation: what answers a failure. ACTIONS is read from the least to the last resort (decision "The recovery ladder
is a table").

A failure gets the strongest action that is called for; while failures repeat without progress between them, none is
weaker than the one before. Each says in a sentence why it is called for, and has a budget of its own within
failurePolicy.windowSeconds; once it is spent, or the job shows the same bug again and again, the job has failed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from concertina.api.restarts import Restart, RungUse
from concertina.api.spec import JobSpec
from concertina.plan.facts.cached import cached
from concertina.plan.facts.context import JobContext
from concertina.plan.facts.decision import Reason
from concertina.plan.facts.replicas import REPLACE_POD
from concertina.plan.recovery import repeats
from concertina_protocol import FailureReason, RestoreSource

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
