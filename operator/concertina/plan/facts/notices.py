"""Notices: what announces that a replica will go, how long it has, and whether it should leave at once.

An urgent notice (its pod is being deleted or disrupted, its node is to end, its agent was told to stop) makes the
replica leave at the next step that all agree on; no later round takes it in. A cordon is no end: the replica works on
until its successor, asked for at once, is ready elsewhere (decision "An urgent notice drains at once, a cordon waits").
A notice that is taken back before that changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from concertina.plan.observed import NodeView, PodPhase, PodView


@dataclass(frozen=True)
class PodNotice:
    message: str
    """In words that follow 'replica x'."""
    left: float
    """Seconds that it has for leaving, as far as is known."""
    urgent: bool = True


class NoticeInput(NamedTuple):
    """One replica, as far as it concerns its end."""

    pod: PodView
    node: NodeView
    told: float | None
    """Seconds of grace that its agent was given with a SIGTERM; None where none was."""
    now: float


def of(given: NoticeInput) -> PodNotice | None:
    """The most urgent one."""
    if given.pod.phase not in (PodPhase.PENDING, PodPhase.RUNNING):
        return None
    for check in CHECKS:
        if notice := check(given):
            return notice
    return None


def _deleted(given: NoticeInput) -> PodNotice | None:
    pod = given.pod
    if not pod.deleting:
        return None
    # At least half of the grace: the API server's clock may be ahead of ours.
    until = pod.deletion_at - given.now if pod.deletion_at is not None else 0.0
    seconds = max(pod.grace / 2, min(pod.grace, until))
    return PodNotice(f"is being deleted{_why(pod)}", seconds)


def _disrupted(given: NoticeInput) -> PodNotice | None:
    return PodNotice(f"is about to be deleted{_why(given.pod)}", given.pod.grace) if given.pod.disruption else None


def _why(pod: PodView) -> str:
    return f" ({pod.disruption})" if pod.disruption else ""


def _node_ends(given: NoticeInput) -> PodNotice | None:
    node = given.node
    if not node.notice:
        return None
    return PodNotice(f"is on node {node.name}, whose end is announced by the taint {node.notice}", given.pod.grace)


def _asked_to_stop(given: NoticeInput) -> PodNotice | None:
    if given.told is None:
        return None
    return PodNotice(f"was told to stop within {given.told:g} s", given.told)


def _cordoned(given: NoticeInput) -> PodNotice | None:
    node = given.node
    if not node.cordoned:
        return None
    return PodNotice(f"is on node {node.name}, which is cordoned", given.pod.grace, urgent=False)


CHECKS: tuple[Callable[[NoticeInput], PodNotice | None], ...] = (
    _deleted,
    _disrupted,
    _node_ends,
    _asked_to_stop,
    _cordoned,
)
