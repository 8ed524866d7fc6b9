"""Notices: why a replica will leave, how long it has, and whether it should leave at once.

An urgent notice makes the replica leave at the next step that all agree on, and no later round includes it. A notice is
urgent if the pod is being deleted or disrupted, its node is about to end, or its agent was told to stop. A cordon is
not urgent: the replica works on until its successor, which is requested at once, is ready elsewhere (decision "An
urgent notice drains at once, a cordon waits"). A notice that is withdrawn before that changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from concertina.plan.observed import NodeView, PodPhase, PodView


@dataclass(frozen=True)
class PodNotice:
    message: str
    """Reason, in words that follow 'replica x'."""
    left: float
    """Seconds that the replica has for leaving, as far as known."""
    urgent: bool = True


class NoticeInput(NamedTuple):
    """Facts about one replica that can announce its end."""

    pod: PodView
    node: NodeView
    grace_seconds: float | None
    """Seconds of grace that the agent got with a SIGTERM; None if it got none."""
    now: float


def of(notice_input: NoticeInput) -> PodNotice | None:
    """Return the most urgent notice of a replica, or None."""
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
    # At least half of the grace period: the API server's clock may be ahead of the operator's.
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
    message = f"is on node {node.name}, whose end is announced by the taint {node.notice}"
    return PodNotice(message, notice_input.pod.grace)


def _asked_to_stop(notice_input: NoticeInput) -> PodNotice | None:
    if notice_input.grace_seconds is None:
        return None
    return PodNotice(f"was told to stop within {notice_input.grace_seconds:g} s", notice_input.grace_seconds)


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
