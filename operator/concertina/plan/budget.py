"""The recovery ladder: a new round of the same members, then one without the member whose pod is replaced (on another
node where there is one), then Failed. Failures count within a sliding window; a node's death isn't the job's."""

from __future__ import annotations

from concertina.api.status import Restart, Restarts, rfc3339, unix_seconds
from concertina.plan.claims import Cause
from concertina.plan.decision import Decision, Phase, Pods
from concertina.plan.look import Look
from concertina.plan.types import PodView

OUTSIDE = frozenset(
    {
        "Evicted",
        "Preempting",
        "Preempted",
        "NodeShutdown",
        "Terminated",
        "NodeLost",
        "Shutdown",
        "UnexpectedAdmissionError",
    }
)
"""Ways for a pod to end that its own container did not cause."""
KEPT = 1001
APART = 120.0
"""Seconds between failures that have nothing to do with each other, though no step is known to lie between them."""


def restart(look: Look, cause: Cause) -> Restart | None:
    """The entry in status.restarts for a new round that answers this cause."""
    if cause.planned:
        return None
    pod = look.pods.get(cause.replica)
    return Restart(
        at=rfc3339(look.now),
        replica=cause.replica,
        node=pod.node if pod else "",
        reason=cause.reason,
        step=look.step,
        counted=cause.counted,
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


def backoff(look: Look) -> float:
    """Seconds to wait before the next round: none for the first two failures at a step that follow each other closely,
    then 1, 2, 4 ... 30."""
    recent = look.recent
    if not recent:
        return 0.0
    same, later = 0, look.now
    for entry in reversed(recent):
        at = unix_seconds(entry.at)
        if entry.step < look.step or later - at > APART:
            break
        same, later = same + 1, at
    delay = 0.0 if same < 2 else float(min(30, 2 ** (same - 2)))
    return unix_seconds(recent[-1].at) + delay - look.now


def counted(look: Look, answered: Restart | None, replaced: tuple[PodView, ...]) -> Restarts:
    """status.restarts after this pass: the failure answered, and pods that ended by themselves (counted once each, when
    their successor is made)."""
    entries = list(look.recent) + ([answered] if answered else [])
    new = 1 if answered else 0
    for pod in replaced:
        if pod.phase != "Failed" or pod.deleting or pod.exit_reason in OUTSIDE:
            continue
        known = next((i for i, entry in enumerate(entries) if entry.replica == pod.name), None)
        if known is not None:
            entries[known] = entries[known].model_copy(update={"counted": True})
        else:
            new += 1
            reason = pod.exit_reason or "ReplicaEnded"
            entries.append(
                Restart(at=rfc3339(look.now), replica=pod.name, node=pod.node, reason=reason, step=look.step)
            )
    if entries == list(look.status.restarts.recent) and not new:
        return look.status.restarts
    spent = sum(entry.counted for entry in entries)
    return Restarts(
        in_window=spent,
        budget=max(0, look.spec.failure_policy.max_restarts - spent),
        total=look.status.restarts.total + new,
        recent=tuple(entries[-KEPT:]),
    )
