"""Detection that the operator itself has probably lost the network connection to all agents.

Decision "Silence alone does not count as a failure" gives the reason.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from concertina.plan.observed import AgentView
from concertina_protocol.log import log_event

FEWEST_JOBS = 3
"""Smallest number of silent jobs at which the operator assumes that its own network has failed.

With a smaller number, the failure of one node that runs the coordinators of two jobs would look like a failure of the
operator's network.
"""


@dataclass
class _HeardJob:
    """Replicas of one job, divided into those whose agents are connected and those whose connection was lost.

    The jobs vote on whether the operator's own network works. A job has a vote once it has trained.
    """

    namespace: str = ""
    """Namespace of the job; empty until the job has trained and so has a vote."""
    heard: set[str] = field(default_factory=set)
    """Replicas whose agent is connected. Agents without a report stream do not count."""
    lost: set[str] = field(default_factory=set)
    """Replicas whose agent was connected before and no longer is."""

    @property
    def votes_silent(self) -> bool | None:
        """Return whether the job votes that the operator's network has failed; None if the job has no vote.

        A job votes so if the operator is connected to none of its agents. It has a vote once it has trained and one of
        its agents was connected.
        """
        if not self.namespace or not (self.heard or self.lost):
            return None
        return not self.heard


class AgentConnectivityMonitor:
    """Decides whether the operator has lost its own network connection, from the number of jobs that became silent.

    A namespace counts as silent if at least half of its jobs are silent. Silent namespaces are counted in addition to
    silent jobs, so that one tenant with many jobs can't determine the result.
    """

    def __init__(self) -> None:
        self._jobs: dict[str, _HeardJob] = {}
        """State of each job, keyed by the job's uid."""
        self._votes: Counter[tuple[str, bool]] = Counter()
        """Number of jobs that have a vote, by namespace and by whether the job is silent."""
        self.operator_isolated = False
        """True if at least half of all jobs and more than half of the namespaces are silent."""

    def update(self, uid: str, replica: str, view: AgentView) -> None:
        """Record the state of an agent. An agent without a report stream counts neither as connected nor as lost."""
        job = self._jobs.setdefault(uid, _HeardJob())
        before, watched = job.votes_silent, view.wanted_at is not None
        lost = watched and not view.alive and view.lost_at is not None
        for agents, belongs in ((job.heard, watched and view.alive), (job.lost, lost)):
            (agents.add if belongs else agents.discard)(replica)
        self._count(job, before)
        if not (job.namespace or job.heard or job.lost):
            del self._jobs[uid]

    def has_trained(self, uid: str, namespace: str) -> None:
        """Give a job a vote on whether the operator's network works, because the job has trained."""
        job = self._jobs.setdefault(uid, _HeardJob())
        if not job.namespace:
            job.namespace = namespace
            self._count(job, None)

    def forget(self, uid: str) -> None:
        """Remove a job and its vote on whether the operator's network works."""
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
