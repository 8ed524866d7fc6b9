"""Escalation: choose the recovery action for a failure, and decide which failures count against `maxRestarts`.

ACTIONS lists the recovery actions from the least disruptive to the last resort (decision "The recovery actions are a
table"). The operator chooses the most disruptive action for which there is a reason. While failures repeat without
progress, it never chooses a less disruptive action than before. Each action gives its reason in a sentence. An action
can have a limit on its uses within the last `failurePolicy.windowSeconds` (the failure window). The job fails when the
window contains more failures than `maxRestarts`, or when the same bug occurs repeatedly.

A failure counts if its cause is in the job. The loss of a node does not count (decision "Failures that count against
maxRestarts").
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from concertina.api.restarts import LONGEST_MESSAGE, LastFailure, RecoveryActionUse, Restart, Restarts
from concertina.api.spec import JobSpec
from concertina.api.status import ConditionType, rfc3339, unix_seconds
from concertina.plan.facts.context import JobContext
from concertina.plan.facts.decision import Decision, Failure, Phase, Pods, Reason
from concertina.plan.facts.replicas import RECREATE_POD
from concertina.plan.observed import PodView
from concertina.plan.pods import pod_backoff
from concertina.plan.recovery import repeats
from concertina_protocol import LONGEST_LAST_LINE, MOST_LAST_LINES, FailureReason, RestoreSource

RESTART_WORKERS, EXCLUDE_REPLICA, RESTART_FROM_CHECKPOINT = "RestartWorkers", "ExcludeReplica", "RestartFromCheckpoint"
IN_A_ROW = 3
"""Number of failures without progress after which the operator tries the next, more disruptive action."""
RESTARTS_FROM_CHECKPOINT = 2
"""Largest number of restarts from a checkpoint within `failurePolicy.windowSeconds`."""
REPLACE_AT_ONCE = frozenset({Reason.HANG, Reason.STRAGGLER, FailureReason.SILENT_CORRUPTION})
"""Failures of a replica that would occur again in a new round with the same replica."""
LOST = frozenset(
    {
        FailureReason.MEMBER_LOST,
        FailureReason.COORDINATOR_LOST,
        Reason.NODE_LOST,
        Reason.REPLICA_DELETED,
        Reason.REPLICA_ENDED,
        Reason.AGENT_RESTARTED,
        Reason.ASSIGN_REFUSED,
        Reason.ASSIGN_FAILED,
    }
)
"""Failure reasons which mean that the member itself is gone or has been restarted."""


@dataclass(frozen=True)
class RecoveryAction:
    name: str
    does: str
    """Sentence that says what the operator does in this action."""
    called_for: Callable[[JobContext, Restart], str]
    """Function that returns the reason why a failure calls for this action, as a sentence without its full stop.

    Its second argument is the failure's entry for `status.restarts`. The result is empty if the failure does not call
    for the action.
    """
    budget: Callable[[JobSpec], int | None]
    """Function that returns how often the action may be used within the failure window; None for no limit."""


def _restart_workers(ctx: JobContext, failed: Restart) -> str:
    return f"Replica {failed.replica} failed" if failed.replica else f"Training failed ({failed.reason})"


def _exclude_replica(ctx: JobContext, failed: Restart) -> str:
    return f"Replica {failed.replica} is lost" if failed.reason in LOST else ""


def _recreate_pod(ctx: JobContext, failed: Restart) -> str:
    if failed.reason == Reason.HARDWARE_FAULT:
        return "" if _would_lose_state(ctx) else f"Replica {failed.replica} has faulty hardware"
    if not _is_mendable(ctx, failed) or not failed.replica or _would_lose_state(ctx):
        return ""
    if failed.reason in REPLACE_AT_ONCE:
        return f"Replica {failed.replica} blocks the other replicas ({failed.reason})"
    if any(entry.replica == failed.replica and entry.counted for entry in ctx.recent):
        return f"Replica {failed.replica} failed again"
    if failed.node in ctx.avoided:
        return f"Replica {failed.replica} failed on node {failed.node}, where other replicas failed before"
    row = _in_a_row(ctx, failed)
    if _uses(RECREATE_POD, row) or _uses(RESTART_WORKERS, row) >= IN_A_ROW:
        return f"Replica {failed.replica} failed after {len(row)} failures without progress between them"
    return ""


def _restart_from_checkpoint(ctx: JobContext, failed: Restart) -> str:
    if not _is_mendable(ctx, failed) or not ctx.saves_durably or ctx.status.last_checkpoint is None:
        return ""
    row = _in_a_row(ctx, failed)
    if _uses(RESTART_FROM_CHECKPOINT, row):
        return "The job made no progress after a restart from the checkpoint"
    if failed.reason == FailureReason.RESTORE_FAILED and any(
        entry.reason == FailureReason.RESTORE_FAILED for entry in row
    ):
        return "The state in node memory cannot be restored"
    if (replaced := _uses(RECREATE_POD, row)) >= IN_A_ROW:
        return f"The job made no progress after {replaced} replaced pods"
    if replaced and repeats.is_bug(ctx, failed):
        return "Replaced pods fail in the same way, so the state in node memory may be damaged"
    return ""


def _in_a_row(ctx: JobContext, failed: Restart) -> tuple[Restart, ...]:
    """Return the earlier failures that count against `maxRestarts` and since which the job has made no progress."""
    return tuple(entry for entry in repeats.since_progress(ctx, failed) if entry.counted)


def _uses(action: str, entries: tuple[Restart, ...]) -> int:
    return sum(entry.action == action for entry in entries)


def _is_mendable(ctx: JobContext, failed: Restart) -> bool:
    """Return whether an action that is more disruptive than a new round could fix the cause of the failure.

    No action helps if storage can't return the state from which the round must start.
    """
    base = ctx.world.base
    from_storage = base is not None and base.source == RestoreSource.STORAGE
    return failed.counted and not (failed.reason == FailureReason.RESTORE_FAILED and from_storage)


def _would_lose_state(ctx: JobContext) -> bool:
    """Return whether the deletion of the failed replica's pod would lose the only copy of the job's state."""
    base = ctx.world.base
    if base is not None and base.source != RestoreSource.MEMORY and ctx.round.step <= base.step:
        return False  # any new pod would start from the same state
    return ctx.keeps_state and len(ctx.world.members) == 1 and ctx.status.last_checkpoint is None


def _allowed(spec: JobSpec) -> int:
    return spec.failure_policy.max_restarts


ACTIONS = (
    RecoveryAction(RESTART_WORKERS, "A new round starts with the same replicas.", _restart_workers, _allowed),
    RecoveryAction(
        EXCLUDE_REPLICA, "A new round starts without it unless it answers.", _exclude_replica, lambda spec: None
    ),
    RecoveryAction(RECREATE_POD, "A new pod replaces it, on another node if there is one.", _recreate_pod, _allowed),
    RecoveryAction(
        RESTART_FROM_CHECKPOINT,
        "The whole job restarts from its durable checkpoint.",
        _restart_from_checkpoint,
        lambda spec: RESTARTS_FROM_CHECKPOINT,
    ),
)


@dataclass(frozen=True)
class RecoveryDecision:
    """The operator's decision on how to recover from a failure."""

    action: RecoveryAction | None
    """Recovery action to take; None if the job has failed (`reason` says why)."""
    reason: str
    message: str
    entry: Restart
    """Entry for the failure in `status.restarts`, including the action."""


def decide(ctx: JobContext, failed: Restart, failure_message: str) -> RecoveryDecision:
    """Choose the recovery action for a failure. `maxRestarts` is checked elsewhere (`restarts_exhausted`).

    Args:
        failed: Entry of the failure for `status.restarts`, without an action.
        failure_message: Description of the failure for the job's condition, if the job fails.
    """
    action, why = next((action, why) for action in reversed(ACTIONS) if (why := action.called_for(ctx, failed)))
    whole, row = action.name == RESTART_FROM_CHECKPOINT, _in_a_row(ctx, failed)
    if (not whole or _uses(RESTART_FROM_CHECKPOINT, row)) and repeats.is_bug(ctx, failed):
        message = repeats.sentence(ctx, failed, failure_message)
        return RecoveryDecision(None, repeats.reason(failed), message, failed)
    if whole and failed.counted and _left(action, ctx.spec, ctx.recent) == 0:
        return RecoveryDecision(None, "ReachedMaxRestarts", _spent(ctx, why, failure_message), failed)
    entry = failed.model_copy(update={"action": action.name})
    return RecoveryDecision(action, action.name, f"{why}. {action.does}", entry)


def _spent(ctx: JobContext, why: str, failure_message: str) -> str:
    window = ctx.spec.failure_policy.window_seconds
    limit = f"A job restarts from its checkpoint at most {RESTARTS_FROM_CHECKPOINT} times within {window} s"
    return f"{why}. {limit}. The last failure: {failure_message}"


def uses(spec: JobSpec, entries: tuple[Restart, ...]) -> tuple[RecoveryActionUse, ...]:
    """Return how often the operator used each recovery action within the failure window, for `status.restarts`.

    Actions that were not used are left out.
    """
    uses_by_action = {action: _uses(action.name, entries) for action in ACTIONS}
    return tuple(
        RecoveryActionUse(action=action.name, in_window=in_window, budget=_left(action, spec, entries))
        for action, in_window in uses_by_action.items()
        if in_window
    )


def _left(action: RecoveryAction, spec: JobSpec, entries: tuple[Restart, ...]) -> int | None:
    """Return how often a recovery action may still be used within the failure window; None for no limit.

    Only failures that count against `maxRestarts` use this limit.
    """
    budget = action.budget(spec)
    spent = sum(entry.action == action.name and entry.counted for entry in entries)
    return None if budget is None else max(0, budget - spent)


# --- status.restarts and failurePolicy.maxRestarts

MOST_ENTRIES = 1001
WITH_TEXTS = 50
"""Number of entries in `status.restarts`, counted from the newest, that keep their message and error text."""


def restart_entry(ctx: JobContext, failure: Failure) -> Restart:
    """Return the entry for a failure in `status.restarts`, without a recovery action."""
    return Restart(
        at=rfc3339(ctx.now),
        replica=failure.replica,
        node=ctx.node_of(failure.replica),
        reason=failure.reason,
        step=max(ctx.round.step, failure.step or 0),
        counted=failure.counted,
        message=failure.message[:LONGEST_MESSAGE],
        error=failure.error,
        after_seconds=max(0.0, ctx.now - unix_seconds(ctx.world.since)) if ctx.world.since else 0.0,
    )


def last_failure(ctx: JobContext, failure: Failure) -> LastFailure:
    """Return the new value of `status.lastFailure`, for a failure.

    If the status already contains this failure, its entry and its time stay unchanged.
    """
    old, round = ctx.status.last_failure, ctx.world.round
    key = (round, failure.replica, failure.reason, failure.sentence)
    if old and (old.round, old.replica, old.reason, old.message) == key:
        return old
    lines = [line.rstrip()[:LONGEST_LAST_LINE] for line in failure.last_lines if line.strip()]
    return LastFailure(
        at=rfc3339(ctx.now),
        round=round,
        replica=failure.replica,
        node=ctx.node_of(failure.replica),
        exit_code=failure.exit_code,
        reason=failure.reason,
        message=failure.sentence,
        last_lines=tuple(lines[-MOST_LAST_LINES:]),
    )


def restarts_exhausted(ctx: JobContext, failure: Failure | None = None) -> Decision | None:
    """Fail the job if more failures than `maxRestarts` are within the failure window.

    The current failure counts too.
    """
    failed = restart_entry(ctx, failure) if failure else None
    new = failed is not None and failed.counted and not _is_counted(ctx, failed)
    count = sum(entry.counted for entry in ctx.recent) + new
    if count <= ctx.spec.failure_policy.max_restarts:
        return None
    replica, last = (failure.replica, failure.sentence) if failure else ("", _last_counted(ctx))
    message = _exhausted_sentence(ctx, count, replica, last)
    return Decision(Phase.FAILED, "ReachedMaxRestarts", message, restart=failed, pods=Pods.ENDED)


def _exhausted_sentence(ctx: JobContext, count: int, replica: str, last: str) -> str:
    policy = ctx.spec.failure_policy
    limit = f"failurePolicy.maxRestarts is {policy.max_restarts}"
    if count == 1:
        subject = f"Replica {replica}" if replica else "The job"
        return f"{subject} failed once, and {limit}. Raise maxRestarts to allow restarts. The failure: {last}"
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
    """Return the new value of `status.restarts`.

    Args:
        ctx: Context of this planning pass.
        answered: Failure to which this pass responds, or None.
        replaced: Pods whose replica index gets its next attempt in this pass. Each pod that ended by itself gets an
            entry, unless its failure already has one.
        stuck: Entries of replicas that can't start.
    """
    entries, new = list(ctx.recent), 0
    if answered and not _is_counted(ctx, answered):
        entries, new = [*entries, answered], 1
    position_by_replica = {entry.replica: entry_index for entry_index, entry in enumerate(entries)} if replaced else {}
    for pod in replaced:
        position = position_by_replica.get(pod.name)
        if pod_backoff.ended_by_itself(pod) and position is None:
            new += 1
            entries.append(pod_backoff.entry_of(ctx, pod).model_copy(update={"action": EXCLUDE_REPLICA}))
        elif position is not None and (learnt := _learnt(ctx, pod)):
            entries[position] = entries[position].model_copy(update=learnt)
    entries, new = [*entries, *stuck], new + len(stuck)
    spent = sum(entry.counted for entry in entries)
    budget = max(0, ctx.spec.failure_policy.max_restarts - spent)
    if entries == list(ctx.status.restarts.recent) and not new and budget == ctx.status.restarts.budget:
        return ctx.status.restarts
    bounded = _bounded(entries)
    return Restarts(
        in_window=spent,
        budget=budget,
        total=ctx.status.restarts.total + new,
        recovery_actions=uses(ctx.spec, bounded),
        recent=bounded,
    )


def _learnt(ctx: JobContext, pod: PodView) -> dict[str, object]:
    """Return corrections to the entry of a failure, from what the failed replica's pod shows now that it has ended.

    For example, the failure gets the reason NodeLost if the pod's node is not ready.
    """
    node = ctx.node(pod)
    if pod_backoff.ended_by_itself(pod):
        return {"counted": True}
    return {"reason": Reason.NODE_LOST} if node.out_of_service or not node.ready else {}


def _bounded(entries: list[Restart]) -> tuple[Restart, ...]:
    """Return the newest MOST_ENTRIES entries. Only the newest WITH_TEXTS entries keep their messages and error texts.

    These limits bound the size of the status.
    """
    old, new = entries[-MOST_ENTRIES:-WITH_TEXTS], entries[-WITH_TEXTS:]
    without = {"error": "", "message": ""}
    return (*(entry.model_copy(update=without) if entry.error or entry.message else entry for entry in old), *new)


def _is_counted(ctx: JobContext, answered: Restart) -> bool:
    """Return whether the failure of this round already has an entry in `status.restarts`.

    Such an entry exists if the failed replica's pod ended earlier in this round.
    """
    since = unix_seconds(ctx.world.since) if ctx.world.since else ctx.now
    return any(entry.replica == answered.replica and unix_seconds(entry.at) > since for entry in ctx.recent)
