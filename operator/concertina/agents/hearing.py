"""Whether this operator hears agents at all: the breaker over all jobs (decision "Silence alone is no death")."""

from __future__ import annotations

from concertina.plan.observed import AgentView
from concertina_protocol.log import log_event

FEWEST_JOBS = 3
"""That agents fell silent in: with fewer, a node that dies with two jobs on it would look like the operator's fault."""


class Hearing:
    """Of the agents that were heard and are still to be watched: which are, and which are not any more, by job."""

    def __init__(self) -> None:
        self._heard: dict[str, set[str]] = {}
        self._lost: dict[str, set[str]] = {}
        self._heard_count = self._lost_count = 0
        self.own_side_suspected = False
        """At least as many are lost as are heard, of several jobs."""

    def update(self, uid: str, replica: str, view: AgentView) -> None:
        """What is known of that agent now; one that is not watched counts as neither."""
        watched = view.wanted_at is not None
        self._heard_count += _put(self._heard, uid, replica, watched and view.alive)
        self._lost_count += _put(self._lost, uid, replica, watched and not view.alive and view.lost_at is not None)
        suspected = len(self._lost) >= FEWEST_JOBS and self._lost_count >= self._heard_count
        if suspected != self.own_side_suspected:
            self.own_side_suspected = suspected
            counts = {"lost": self._lost_count, "heard": self._heard_count, "jobs": len(self._lost)}
            log_event("own side suspected" if suspected else "own side trusted", **counts)


def _put(by_job: dict[str, set[str]], uid: str, replica: str, member: bool) -> int:
    """By how much the number of replicas has changed."""
    if member:
        replicas = by_job.setdefault(uid, set())
        added = replica not in replicas
        replicas.add(replica)
        return int(added)
    replicas = by_job.get(uid, set())
    if replica not in replicas:
        return 0
    replicas.discard(replica)
    if not replicas:
        del by_job[uid]
    return -1
