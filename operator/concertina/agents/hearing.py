"""Detect full disruption: over all jobs, this operator seems not to hear agents (decision "Silence alone is no
death")."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from concertina.plan.observed import AgentView
from concertina_protocol.log import log_event

FEWEST_JOBS = 3
"""That fell silent: with fewer, a node that dies with two coordinators on it would look like the operator's fault."""


@dataclass
class _HeardJob:
    namespace: str = ""
    """Empty until the job has trained: then it has a vote."""
    heard: set[str] = field(default_factory=set)
    """Of the agents that are to be watched; of all others nothing is expected."""
    lost: set[str] = field(default_factory=set)
    """They were heard, and are not any more."""

    @property
    def votes_silent(self) -> bool | None:
        """Return whether the job counts as silent; None where it has no vote."""
        if not self.namespace or not (self.heard or self.lost):
            return None
        return not self.heard


class AgentConnectivityMonitor:
    """The jobs that have trained and were heard, and those of them that have fallen silent. A namespace counts as
    silent where at least half of its jobs are, so that the jobs of one tenant say nothing about those of all others."""

    def __init__(self) -> None:
        self._jobs: dict[str, _HeardJob] = {}
        """By uid."""
        self._votes: Counter[tuple[str, bool]] = Counter()
        """Jobs by namespace and whether they are silent."""
        self.operator_isolated = False
        """At least half of the jobs are silent, and most namespaces."""

    def update(self, uid: str, replica: str, view: AgentView) -> None:
        """What is known of that agent now; one that is not watched counts as neither."""
        job = self._jobs.setdefault(uid, _HeardJob())
        before, watched = job.votes_silent, view.wanted_at is not None
        lost = watched and not view.alive and view.lost_at is not None
        for agents, belongs in ((job.heard, watched and view.alive), (job.lost, lost)):
            (agents.add if belongs else agents.discard)(replica)
        self._count(job, before)
        if not (job.namespace or job.heard or job.lost):
            del self._jobs[uid]

    def has_trained(self, uid: str, namespace: str) -> None:
        job = self._jobs.setdefault(uid, _HeardJob())
        if not job.namespace:
            job.namespace = namespace
            self._count(job, None)

    def forget(self, uid: str) -> None:
        if job := self._jobs.pop(uid, None):
            before = job.votes_silent
            job.heard, job.lost = set(), set()
            self._count(job, before)

    def _count(self, job: _HeardJob, before: bool | None) -> None:
        after = job.votes_silent
        if after is before:
            return
        for vote, change in ((before, -1), (after, 1)):
            if vote is not None:
                self._votes[job.namespace, vote] += change
        self._votes = +self._votes
        suspected = self._most_are_silent()
        if suspected != self.operator_isolated:
            self.operator_isolated = suspected
            counts = {str(silent): sum(self._jobs_of(silent).values()) for silent in (True, False)}
            event = "own side suspected" if suspected else "own side trusted"
            log_event(event, silent_jobs=counts["True"], heard_jobs=counts["False"])

    def _most_are_silent(self) -> bool:
        silent, heard = self._jobs_of(True), self._jobs_of(False)
        jobs, others = sum(silent.values()), sum(heard.values())
        if jobs < FEWEST_JOBS or jobs < others:
            return False
        namespaces = silent.keys() | heard.keys()
        return 2 * sum(silent[name] >= heard[name] for name in namespaces) > len(namespaces)

    def _jobs_of(self, silent: bool) -> Counter[str]:
        return Counter({name: count for (name, vote), count in self._votes.items() if vote is silent})
