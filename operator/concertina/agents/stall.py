"""Detection of pauses of this operator process, for example by SIGSTOP or because its machine was suspended.

During a pause, the operator cannot receive the reports of any agent, so the pause does not count as silence of agents.
Time in the operator's own queues does not count either (decision "Pauses of a process do not count as silence").
"""

from __future__ import annotations

import dataclasses

from concertina.plan.observed import AgentView, Call

TICK_SECONDS = 0.5
"""Longest interval in seconds between two calls of `StallDetector.seconds`."""
NOTICEABLE_SECONDS = 1.0
"""Shortest pause in seconds that is detected. It must be shorter than constants.UNANSWERED."""


class StallDetector:
    """Detects pauses of this operator process, from the time between two calls of `seconds`."""

    def __init__(self, now: float) -> None:
        self._last_call = now

    def seconds(self, now: float) -> float:
        """Return the seconds for which this process was paused since the last call of this method, or 0."""
        passed, self._last_call = now - self._last_call, now
        return passed if passed >= NOTICEABLE_SECONDS else 0.0


def later(view: AgentView, seconds: float) -> AgentView:
    """Return the last known state of an agent, with all times moved later by the `seconds` of a pause of the operator.

    The pause then does not count as silence of the agent.
    """
    return dataclasses.replace(
        view,
        wanted_at=_later(view.wanted_at, seconds),
        lost_at=_later(view.lost_at, seconds),
        queued_at=_later(view.queued_at, seconds),
        ready_at=_later(view.ready_at, seconds),
        prepare=_call_later(view.prepare, seconds),
        assign=_call_later(view.assign, seconds),
        release=_call_later(view.release, seconds),
        drain=_call_later(view.drain, seconds),
        save=_call_later(view.save, seconds),
    )


def begun(view: AgentView, now: float) -> AgentView:
    """Return the last known state of an agent, without the time that its report stream waited in the operator.

    The wait ends at `now`, when the operator begins to open the stream. It does not count as silence of the agent.
    """
    waited = 0.0 if view.queued_at is None else now - view.queued_at
    wanted_at = now if view.wanted_at is None else view.wanted_at + waited
    return dataclasses.replace(view, queued_at=None, wanted_at=wanted_at, lost_at=_later(view.lost_at, waited))


def is_same_call(viewed: Call | None, sent: Call) -> bool:
    """Return whether two records are of the same call, whatever their times of sending.

    After a pause of the operator, the time in the recorded call `viewed` is moved later (see `later`), so it can differ
    from the time in `sent`.
    """
    return viewed is not None and dataclasses.replace(viewed, sent_at=sent.sent_at) == sent


def _call_later(call: Call | None, seconds: float) -> Call | None:
    """Return the call with its times moved later by the `seconds` of a pause of the operator.

    The time of the answer is moved too, because the answer may have arrived during the pause.
    """
    if call is None:
        return None
    return dataclasses.replace(call, sent_at=_later(call.sent_at, seconds), done_at=_later(call.done_at, seconds))


def _later(timestamp: float | None, seconds: float) -> float | None:
    return None if timestamp is None else timestamp + seconds
