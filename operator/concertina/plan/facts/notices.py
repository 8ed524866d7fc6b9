"""Notices: signs that a replica will be terminated, each with the time left and its urgency.

A replica with an urgent notice leaves the round at the next step on which all ranks agree, and is in no later round. A
notice is urgent in these cases:
  - The pod is being deleted or disrupted.
  - A taint announces the end of the node.
  - The agent received a SIGTERM.

The cordon of a node is not urgent. The replica then trains until a successor on another node is ready, and the operator
requests that successor at once (decision "Drains after urgent notices and after cordons"). A notice that is withdrawn
before the replica leaves has no effect.

A round is a period in which a fixed set of replicas trains.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from concertina.plan.observed import NodeView, PodPhase, PodView


@dataclass(frozen=True)
class PodNotice:
    message: str
    """Reason of the notice, as words that follow 'replica x'."""
    left: float
    """Seconds that the replica still has to leave the round, as far as the operator knows."""
    urgent: bool = True


class NoticeInput(NamedTuple):
    """Facts about one replica that show whether it will be terminated."""

    pod: PodView
    node: NodeView
    grace_seconds: float | None
    """Grace period in seconds that the agent got with a SIGTERM; None if it received no SIGTERM."""
    now: float


def of(notice_input: NoticeInput) -> PodNotice | None:
    """Return the most urgent sign that a replica will be terminated (its notice), or None."""
    if notice_input.pod.phase not in (PodPhase.PENDING, PodPhase.RUNNING):
        return None
    for check in CHECKS:
        if notice := check(notice_input):
            return notice
    return None


def _deleted(notice_input: NoticeInput) -> PodNotice | None:
    pod = notice_input.pod
    if not pod.deleting:
        return None
    # Use at least half of the grace period, because the API server's clock may be ahead of the operator's clock.
    until = pod.deletion_at - notice_input.now if pod.deletion_at is not None else 0.0
    seconds = max(pod.grace / 2, min(pod.grace, until))
    return PodNotice(f"is being deleted{_why(pod)}", seconds)


def _disrupted(notice_input: NoticeInput) -> PodNotice | None:
    pod = notice_input.pod
    return PodNotice(f"is about to be deleted{_why(pod)}", pod.grace) if pod.disruption else None


def _why(pod: PodView) -> str:
    return f" ({pod.disruption})" if pod.disruption else ""


def _node_ends(notice_input: NoticeInput) -> PodNotice | None:
    node = notice_input.node
    if not node.notice:
        return None
    message = f"is on node {node.name}, whose end the taint {node.notice} announces"
    return PodNotice(message, notice_input.pod.grace)


def _asked_to_stop(notice_input: NoticeInput) -> PodNotice | None:
    if notice_input.grace_seconds is None:
        return None
    return PodNotice(f"received a request to stop within {notice_input.grace_seconds:g} s", notice_input.grace_seconds)


def _cordoned(notice_input: NoticeInput) -> PodNotice | None:
    node = notice_input.node
    if not node.cordoned:
        return None
    return PodNotice(f"is on node {node.name}, which is cordoned", notice_input.pod.grace, urgent=False)


CHECKS: tuple[Callable[[NoticeInput], PodNotice | None], ...] = (
    _deleted,
    _disrupted,
    _node_ends,
    _asked_to_stop,
    _cordoned,
)
