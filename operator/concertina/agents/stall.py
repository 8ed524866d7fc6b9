"""Time in which this operator itself stood still (stopped, starved, its machine asleep) is not time in which an agent
could not be reached, nor is time in its own queue (decision "Who stood still accuses nobody")."""

from __future__ import annotations

import dataclasses

from concertina.plan.observed import AgentView, Call

TICK_SECONDS = 0.5
"""How often `seconds` is asked at least."""
NOTICEABLE_SECONDS = 2.0


class StallDetector:
    def __init__(self, now: float) -> None:
        self._seen = now

    def seconds(self, now: float) -> float:
        """For how long this operator stood still; 0 after a usual time."""
        passed, self._seen = now - self._seen, now
        return passed if passed >= NOTICEABLE_SECONDS else 0.0


def later(view: AgentView, seconds: float) -> AgentView:
    """What is known of an agent, with all its times later."""
    return dataclasses.replace(
        view,
        wanted_at=_later(view.wanted_at, seconds),
        lost_at=_later(view.lost_at, seconds),
        queued_at=_later(view.queued_at, seconds),
        ready_at=_later(view.ready_at, seconds),
        prepare=_call_later(view.prepare, seconds),
        assign=_call_later(view.assign, seconds),
        drain=_call_later(view.drain, seconds),
        save=_call_later(view.save, seconds),
    )


def begun(view: AgentView, now: float) -> AgentView:
    """The view once its stream is being opened: the time for which that was queued is none of its silence."""
    waited = 0.0 if view.queued_at is None else now - view.queued_at
    wanted_at = now if view.wanted_at is None else view.wanted_at + waited
    return dataclasses.replace(view, queued_at=None, wanted_at=wanted_at, lost_at=_later(view.lost_at, waited))


def is_same_call(known: Call | None, sent: Call) -> bool:
    """Whether the call that a view holds is the one that was sent: `later` may have made its time another."""
    return known is not None and dataclasses.replace(known, sent_at=sent.sent_at) == sent


def _call_later(call: Call | None, seconds: float) -> Call | None:
    """Its answer may have been here all the time."""
    if call is None:
        return None
    return dataclasses.replace(call, sent_at=_later(call.sent_at, seconds), done_at=_later(call.done_at, seconds))


def _later(at: float | None, seconds: float) -> float | None:
    return None if at is None else at + seconds
