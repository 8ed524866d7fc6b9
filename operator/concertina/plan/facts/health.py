"""Decide whether a replica is alive, silent or dead, from several sources of evidence.

There are three sources. Kubernetes reports that a pod has ended. Members of a round report whether they are in contact
with their coordinator (the agent of rank 0). If a host closes a stream and refuses a new one, no agent listens there.
Without any of this evidence, a silent agent may still train: it may only be unreachable for this operator (decision
"Silence alone does not count as a failure").

A round is a period in which a fixed set of replicas trains.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass, replace

import concertina_protocol as protocol
from concertina.api.status import unix_seconds
from concertina.plan.facts import constants
from concertina.plan.facts.cached import cached
from concertina.plan.facts.constants import since
from concertina.plan.facts.decision import PLANNED
from concertina.plan.facts.round import Round
from concertina.plan.observed import ConnectionRefusal, JobObservation, PodPhase, PodView


class Life(enum.Enum):
    ALIVE = enum.auto()
    """The replica is alive, or there is no evidence against it."""
    SILENT = enum.auto()
    """The replica may be dead: its report stream has been broken for longer than a reconnect takes.

    There is no other evidence.
    """
    DEAD = enum.auto()
    """The replica is lost, with its workers and their state."""


class EvidenceSource(enum.Enum):
    """Source of the evidence on which a verdict about a replica's health is based."""

    POD = enum.auto()
    """The pod has ended, is being deleted, or has been replaced by another pod."""
    NODE = enum.auto()
    """The replica's node is out of service or not ready."""
    HOST = enum.auto()
    """The replica's host refuses connections, so no agent listens."""
    MEMBERS = enum.auto()
    """The members report whether they have lost the replica, which is their coordinator, or are in contact with it."""
    DRAIN = enum.auto()
    """The members stopped at the step that their coordinator announced, so the coordinator was alive at that step."""
    SILENCE = enum.auto()
    """The replica does not answer, and nothing else is known about it."""


@dataclass(frozen=True)
class HealthVerdict:
    life: Life
    sentence: str = ""
    """Reason why the replica is dead, as words that follow 'replica x'; empty if the replica is not dead."""
    evidence: EvidenceSource | None = None
    """Source of the evidence; None if the replica is alive."""
    age: float | None = None
    """Seconds since the replica fell silent; None if the evidence is not silence."""
    waits: bool = False
    """True if the silent replica may count as dead, but `JobObservation.given_up` does not contain its pod yet."""

    @property
    def dead(self) -> bool:
        return self.life is Life.DEAD


ALIVE = HealthVerdict(Life.ALIVE)
TRAINS = (protocol.State.RUNNING, protocol.State.DRAINING)
"""Agent states of a member that takes part in a round. A member that lost its coordinator would be in state FAILED."""


def _dead(evidence: EvidenceSource, sentence: str, age: float | None = None) -> HealthVerdict:
    return HealthVerdict(Life.DEAD, sentence, evidence, age)


@dataclass(frozen=True)
class Health:
    observed: JobObservation
    round: Round
    now: float

    @cached
    def no_agent_reachable(self) -> bool:
        """Return whether the operator has no connection to any agent of the job.

        The cause may then be the operator's own network, while all replicas train.
        """
        return not any(view.connected for view in self.observed.agents.values())

    def by_objects(self, pod: PodView) -> HealthVerdict:
        """Return whether a pod's replica is alive, judged by Kubernetes objects alone: the pod and its node.

        This verdict takes precedence over any report of an agent.
        """
        if pod.ended:
            lines = [line for line in pod.exit_message.splitlines() if line.strip()]
            detail = lines[-1].strip()[:300] if lines else pod.exit_reason
            code = "" if pod.exit_code is None else f" with exit code {pod.exit_code}"
            return _dead(EvidenceSource.POD, f"ended{code}{f' ({detail})' if detail else ''}")
        if pod.deleting:
            return _dead(EvidenceSource.POD, "is being deleted")
        if self.observed.node(pod).out_of_service:
            return _dead(EvidenceSource.NODE, f"was on node {pod.node}, which is out of service")
        return ALIVE

    def by_contact(self, pod: PodView) -> HealthVerdict:
        """Return whether a pod's replica is alive, judged by the operator's connection to the pod's agent.

        The coordinator is the agent of rank 0. For members of a running round, the coordinator's reports are better
        evidence than this connection.
        """
        view = self.observed.agent(pod.name)
        if pod.phase is PodPhase.PENDING and pod.node and not self.observed.node(pod).ready:
            # The pod was bound before the failure of its node was known: when many nodes die together, successors may
            # be placed on a node that has died too.
            return _dead(EvidenceSource.NODE, f"waits to start on node {pod.node}, which is not ready")
        if view.alive or pod.phase is not PodPhase.RUNNING or self._is_in_good_standing(pod.name):
            return ALIVE
        if not self.observed.node(pod).ready:
            return _dead(EvidenceSource.NODE, f"can't be reached and its node {pod.node} is not ready")
        age, is_first = view.silent_for(self.now), view.lost_at is None
        if age is not None and (restarted_for := self.observed.started_again_for.get(pod.uid, age)) < age:
            age, is_first = restarted_for, True  # the previous container was the silent one
        age = None if age is None else min(age, self._since_planned_claim)
        # The first contact takes longer: a replica outside of the round may still be starting its agent.
        first = constants.FIRST_CONTACT if pod.name in self.round.members else constants.AGENT_GIVE_UP
        lost = constants.UNREACHABLE if self.observed.job.status.world.round else constants.UNREACHABLE_BEFORE
        patience = first if is_first else lost
        if age is None or age < patience:
            return ALIVE
        if view.refusal is ConnectionRefusal.NOT_LISTENING:
            return _dead(EvidenceSource.HOST, f"has had no listening agent for {age:.0f} s", age)
        if self.no_agent_reachable or self.observed.operator_isolated:
            return HealthVerdict(Life.SILENT, evidence=EvidenceSource.SILENCE, age=age)
        if pod.uid not in self.observed.given_up:
            return HealthVerdict(Life.SILENT, evidence=EvidenceSource.SILENCE, age=age, waits=True)
        return _dead(EvidenceSource.SILENCE, f"could not be reached for {age:.0f} s, while other replicas could", age)

    @cached
    def _since_planned_claim(self) -> float:
        """Seconds since the newest claim (decision to begin a round), if it was planned; otherwise infinity.

        A claim is planned if nothing had failed when the operator made it. A member that only this operator could not
        reach was therefore alive at that time (decision "Silence alone does not count as a failure").
        """
        claim = self.round.claim
        if claim is None or claim.at is None or claim.reason not in PLANNED:
            return math.inf
        return since(unix_seconds(claim.at), self.now)

    def _is_in_good_standing(self, replica: str) -> bool:
        """Return whether the replica is a member of the committed round and has not failed, as far as is known.

        A round is committed once the operator has chosen its members.
        """
        if not self.round.committed or replica not in self.round.members:
            return False
        if replica == self.round.coordinator.replica:
            return not self.coordinator.dead or self.coordinator.evidence is EvidenceSource.DRAIN
        return replica not in self.round.failed

    @cached
    def coordinator(self) -> HealthVerdict:
        """Verdict on whether the coordinator (the agent of rank 0) of the committed round is alive.

        The coordinator counts as dead at once if its host closes the stream and refuses the next one. If the
        coordinator is only silent, the operator asks the members. If the operator can't reach any member either, the
        whole round may still be training. The operator then does nothing about the round until Kubernetes reports more
        (decision "When a coordinator counts as lost").

        A round is committed once the operator has chosen its members.
        """
        coordinator = self.round.coordinator
        pod = next((pod for pod in self.observed.pods if pod.name == coordinator.replica), None)
        if pod is None or not coordinator.is_pod(pod.uid) or pod.ended:
            return _dead(EvidenceSource.POD, "has ended")
        view = self.observed.agent(coordinator.replica)
        if view.alive:
            return ALIVE
        refused = view.refusal is ConnectionRefusal.NOT_LISTENING
        if refused and view.closed and not self.observed.operator_isolated:
            return _dead(EvidenceSource.HOST, "is gone: its agent no longer listens")
        age = view.silent_for(self.now)
        # The stream broke and was not reopened in time, or this operator is new and has received no answer so far.
        patience = constants.FIRST_CONTACT if view.lost_at is None else constants.RECONNECT
        if age is None or (age < patience and not refused):
            return ALIVE
        if members_verdict := self._word_of_members():
            return replace(members_verdict, age=age)
        if not self._members_were_asked:
            return HealthVerdict(Life.SILENT, evidence=EvidenceSource.SILENCE, age=age)
        if pod.deleting:
            return _dead(EvidenceSource.POD, "is gone: its agent no longer listens", age)
        if not self.observed.node(pod).ready:
            return _dead(EvidenceSource.NODE, "is gone: its agent no longer listens", age)
        return HealthVerdict(Life.SILENT, evidence=EvidenceSource.SILENCE, age=age)

    def _word_of_members(self) -> HealthVerdict | None:
        """Return a verdict on a silent coordinator from the states of the connected members.

        The coordinator is the agent of rank 0. A member stops soon after it has lost its coordinator. A member that
        trains is therefore in contact with the coordinator. The result is None if the members' states show nothing.
        """
        assert self.round.claim is not None
        this_round, trains = (self.round.claim.round, self.round.claim.claim_id), False
        for name, member in self.round.members.items():
            view = self.observed.agent(name)
            if name == self.round.coordinator.replica or not view.connected or view.report is None:
                continue
            if not member.is_agent(view.report.instance):
                return _dead(
                    EvidenceSource.MEMBERS, f"can't be reached, and the agent of its member {name} was restarted"
                )
            if (view.report.round, view.report.claim) != this_round:
                continue
            if view.report.state in (protocol.State.FAILED, protocol.State.DRAINED):
                message = view.report.failures[0].message if view.report.failures else "its part is over"
                evidence = (
                    EvidenceSource.DRAIN if view.report.state == protocol.State.DRAINED else EvidenceSource.MEMBERS
                )
                return _dead(evidence, f"can't be reached, and its member {name} says: {message}")
            trains |= view.report.state in TRAINS
        return HealthVerdict(Life.SILENT, evidence=EvidenceSource.MEMBERS) if trains else None

    @property
    def _members_were_asked(self) -> bool:
        """True if the operator has had enough time to open a stream to each member that it can reach.

        The coordinator is the agent of rank 0. The operator opens these streams as soon as it doubts that the
        coordinator is alive.
        """
        running_pods = {pod.name for pod in self.observed.pods if pod.phase is PodPhase.RUNNING and not pod.deleting}
        other_names = self.round.members.keys() & running_pods - {self.round.coordinator.replica}
        views = (self.observed.agent(name) for name in other_names)
        return all(view.connected or (view.silent_for(self.now) or 0.0) >= constants.RECONNECT for view in views)

    def may_answer(self, replica: str) -> bool:
        """Return whether to wait for the replica's answer to a call.

        The operator does not wait if the replica's host refuses the report stream, or if the replica has been
        unreachable for RECONNECT seconds.
        """
        view = self.observed.agent(replica)
        silent_for = None if view.lost_at is None else view.silent_for(self.now)
        cut_off = silent_for is not None and silent_for >= constants.RECONNECT
        return view.connected or (view.refusal is None and not cut_off)
