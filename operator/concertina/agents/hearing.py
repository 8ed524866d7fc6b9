"""Whether this operator hears agents at all: the breaker over all jobs (decision "Silence alone is no death")."""

from __future__ import annotations

from collections.abc import Iterable

from concertina.plan.observed import AgentView
from concertina_protocol.log import log_event

Agent = tuple[str, str]
"""A job's uid and the name of a replica."""
FEWEST_JOBS = 3
"""That agents fell silent in: with fewer, a node that dies with two jobs on it would look like the operator's fault."""


class Hearing:
    """Of the agents that were heard and are still to be watched: which are, and which are not any more."""

    def __init__(self) -> None:
        self._heard: set[Agent] = set()
        self._lost: set[Agent] = set()
        self.own_side_suspected = False
        """At least as many are lost as are heard, of several jobs."""

    @property
    def silent(self) -> int:
        """Agents that were heard, and are still to be."""
        return len(self._lost)

    def update(self, uid: str, replica: str, view: AgentView) -> None:
        """What is known of that agent now; one that is not watched counts as neither."""
        agent, watched = (uid, replica), view.wanted_at is not None
        lost = watched and not view.alive and view.lost_at is not None
        for agents, belongs in ((self._heard, watched and view.alive), (self._lost, lost)):
            (agents.add if belongs else agents.discard)(agent)
        suspected = len(self._lost) >= len(self._heard) and _of_several_jobs(self._lost)
        if suspected != self.own_side_suspected:
            self.own_side_suspected = suspected
            jobs = len({uid for uid, _ in self._lost})
            counts = {"lost": len(self._lost), "heard": len(self._heard), "jobs": jobs}
            log_event("own side suspected" if suspected else "own side trusted", **counts)


def _of_several_jobs(agents: Iterable[Agent]) -> bool:
    """Looks at no more of them than it takes: agents are lost by the thousand."""
    jobs: set[str] = set()
    for uid, _ in agents:
        jobs.add(uid)
        if len(jobs) >= FEWEST_JOBS:
            return True
    return False
