"""Time in which this operator itself stood still (stopped, starved, its machine asleep) is not time in which an agent
could not be reached."""

from __future__ import annotations

import dataclasses

from concertina.plan.types import AgentView

TICK_SECONDS = 0.5
"""How often `seconds` is asked at least."""
NOTICEABLE_SECONDS = 2.0


class Absence:
    def __init__(self, now: float) -> None:
        self._seen = now

    def seconds(self, now: float) -> float:
        """For how long nobody was here; 0 after a usual time. A clock that was set forward looks the same."""
        passed, self._seen = now - self._seen, now
        return passed if passed >= NOTICEABLE_SECONDS else 0.0


def discounted(view: AgentView, seconds: float) -> AgentView:
    """What is known of an agent, as if the time away had not passed."""
    return dataclasses.replace(
        view,
        wanted_at=view.wanted_at and view.wanted_at + seconds,
        lost_at=view.lost_at and view.lost_at + seconds,
    )
