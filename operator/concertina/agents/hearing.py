"""Detection of full disruption: this operator has probably lost its connection to the agents of all jobs.

See the decision "Silence alone is no death".
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from concertina.plan.observed import AgentView
from concertina_protocol.log import log_event

FEWEST_JOBS = 3
"""Smallest number of silent jobs from which the operator suspects itself.

With fewer jobs, a node that fails with two coordinators on it would look like a fault of the operator.
"""


@dataclass
class _HeardJob:
    """State of one job's agents, and its vote."""

    namespace: str = ""
    """Namespace of the job, or empty until the job has trained. A job has a vote once this is set."""
    heard: set[str] = field(default_factory=set)
    """Replicas whose agents are watched and connected. Agents that are not watched do not count."""
    lost: set[str] = field(default_factory=set)
    """Replicas whose agents were connected earlier and no longer are."""

    @property
    def votes_silent(self) -> bool | None:
        """Whether the job counts as silent, or None when it has no vote."""
        if not self.namespace or not (self.heard or self.lost):
            return None
        return not self.heard


class AgentConnectivityMonitor:
    """Jobs that have trained and were connected, and those of them that have become silent.

    A namespace counts as silent when at least half of its jobs are, so the jobs of one tenant do not decide for all
    others.
    """

    def __init__(self) -> None:
        self._jobs: dict[str, _HeardJob] = {}
        """State of each job, by uid."""
        self._votes: Counter[tuple[str, bool]] = Counter()
        """Number of jobs, by namespace and by whether they are silent."""
        self.operator_isolated = False
        """Whether at least half of the jobs are silent, and most namespaces."""

    def update(self, uid: str, replica: str, view: AgentView) -> None:
        """Record the current view of an agent. An agent that is not watched counts neither as connected nor as lost."""
        job = self._jobs.setdefault(uid, _HeardJob())
        before, watched = job.votes_silent, view.wanted_at is not None
        lost = watched and not view.alive and view.lost_at is not None
        for agents, belongs in ((job.heard, watched and view.alive), (job.lost, lost)):
            (agents.add if belongs else agents.discard)(replica)
        self._count(job, before)
        if not (job.namespace or job.heard or job.lost):
            del self._jobs[uid]

    def has_trained(self, uid: str, namespace: str) -> None:
        """Give the job a vote, because it has trained."""
        job = self._jobs.setdefault(uid, _HeardJob())
        if not job.namespace:
            job.namespace = namespace
            self._count(job, None)

    def forget(self, uid: str) -> None:
        """Remove the job and its vote."""
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
