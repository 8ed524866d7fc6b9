"""Facts about one observation of a job that several policies use. Each fact is computed on first access."""

from __future__ import annotations

from dataclasses import dataclass

from concertina.api.restarts import Restart
from concertina.api.spec import JobSpec
from concertina.api.status import JobStatus, unix_seconds
from concertina.api.world import World
from concertina.plan.facts.cached import cached
from concertina.plan.facts.constants import RETRY, since
from concertina.plan.facts.health import Health
from concertina.plan.facts.lending import NO_QUEUE, Lending
from concertina.plan.facts.replicas import Replicas
from concertina.plan.facts.round import Round
from concertina.plan.observed import UNKNOWN_AGENT, UNKNOWN_NODE, AgentView, Call, JobObservation, NodeView, PodView


@dataclass(frozen=True)
class JobContext:
    observed: JobObservation
    spec: JobSpec
    now: float
    """Time of this pass in Unix seconds. All times of this class are in Unix seconds."""
    lending: Lending = NO_QUEUE
    """Kueue quota that the job may use. `spec` requests no more replicas than this quota allows."""

    @cached
    def wanted_spec(self) -> JobSpec:
        """Spec as the user wrote it.

        In the field `spec`, `replicas` is lowered to the number that the Kueue queue allows.
        """
        return self.observed.job.spec or self.spec

    @property
    def stopped_by_queue(self) -> bool:
        """Return whether the job must have no pods for the single reason that its Kueue queue gives it no quota."""
        return self.lending.stops and not self.wanted_spec.suspend and not self.observed.job.deleting

    @property
    def why_stopped(self) -> str:
        """Reason why the job must have no pods, as a sentence."""
        return self.lending.message if self.stopped_by_queue else "spec.suspend is set"

    @property
    def why_fewer(self) -> str:
        """Reason why the job must run with fewer replicas than before, as a clause or sentence for a message."""
        size = self.lending.size
        if size is not None and size.replicas < self.wanted_spec.replicas and self.lending.message:
            return self.lending.message
        return f"spec.replicas is {self.spec.replicas} now"

    @cached
    def status(self) -> JobStatus:
        return self.observed.job.status

    @cached
    def world(self) -> World:
        return self.status.world

    @cached
    def round(self) -> Round:
        """Facts about the current round, and about the next round while the operator is forming it."""
        return Round(self.observed)

    @cached
    def keeps_state(self) -> bool:
        """Return whether the workers save snapshots of their state.

        Workers of the bundled trainer always save snapshots. Workers of a user's script save them if the script uses
        `trainingjob.State`, which the operator knows once the script has reported it.
        """
        reported = self.round.report is not None and self.round.report.keeps_state
        return self.spec.bundled or reported or self.status.last_snapshot is not None

    @cached
    def saves_durably(self) -> bool:
        """Return whether concertina's agents write durable checkpoints for the job."""
        return self.spec.checkpoint is not None and self.keeps_state

    @cached
    def health(self) -> Health:
        return Health(self.observed, self.round, self.now)

    @cached
    def replicas(self) -> Replicas:
        return Replicas(self.observed, self.spec, self.now, self.round, self.health, self.recent, self.avoided)

    def node(self, pod: PodView) -> NodeView:
        return self.observed.nodes.get(pod.node, UNKNOWN_NODE)

    def node_of(self, replica: str) -> str:
        """Return the name of the node on which the replica runs.

        If the replica's pod no longer exists, the name comes from the list of members in the job's status. The result
        is empty if that list does not contain the replica.
        """
        pod, member = self.replicas.pods.get(replica), self.round.members.get(replica)
        return pod.node if pod else member.node if member else ""

    def agent(self, replica: str) -> AgentView:
        return self.observed.agents.get(replica, UNKNOWN_AGENT)

    def is_due(self, call: Call | None) -> bool:
        """Return whether the operator should send a call now. `call` is the recorded call of this kind, or None.

        A call is due if it has not been sent yet, or if it failed at least RETRY seconds ago.
        """
        return call is None or (call.failed_at is not None and self.now - call.failed_at >= RETRY)

    @cached
    def avoided(self) -> frozenset[str]:
        """Nodes that new pods currently avoid."""
        nodes = self.status.avoided_nodes
        return frozenset(entry.node for entry in nodes if unix_seconds(entry.until) > self.now)

    @cached
    def recent(self) -> tuple[Restart, ...]:
        """Failures of the job within the last `failurePolicy.windowSeconds` seconds."""
        start = self.now - self.spec.failure_policy.window_seconds
        return tuple(restart for restart in self.status.restarts.recent if unix_seconds(restart.at) > start)

    def age(self, pod: PodView) -> float:
        """Return the seconds for which this operator has observed a pod.

        The pod's `created` time is not used, because the API server wrote it by its own clock. If the two clocks
        differed by an hour, the operator would consider every pod (or no pod) late. After a restart, the operator
        counts from its own start.
        """
        return self.observed.seen_for.get(pod.uid, self.now - pod.created)

    def elapsed(self, timestamp: str) -> float:
        """Return the seconds since `timestamp` in the job's status; infinity if `timestamp` is in the future."""
        return self.since(unix_seconds(timestamp))

    def since(self, timestamp: float) -> float:
        """Return the seconds since a Unix time; infinity if that time is in the future."""
        return since(timestamp, self.now)

    @property
    def running_for(self) -> float | None:
        """Seconds since the job started; None if the job has not started or is suspended."""
        return self.now - unix_seconds(self.status.start_time) if self.status.start_time else None

    @property
    def time_left(self) -> float | None:
        """Seconds until the job's deadline; None if there is no deadline or it has passed.

        A job that has not started has no deadline yet.
        """
        limit, ran = self.spec.active_deadline_seconds, self.running_for
        return limit - ran if limit is not None and ran is not None and limit > ran else None

    @property
    def ended_at(self) -> float:
        """Unix time at which the job ended; the time of this planning pass if the job ends in this pass."""
        return unix_seconds(self.status.completion_time) if self.status.completion_time else self.now

    @property
    def time_to_live(self) -> float | None:
        """Seconds until an ended job is deleted; None if `spec.ttlSecondsAfterFinished` is not set."""
        limit = self.spec.ttl_seconds_after_finished
        return self.ended_at + limit - self.now if limit is not None else None
