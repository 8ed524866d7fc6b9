"""Evidence of life: whether a replica is alive, silent or dead. This module alone judges it.

Kubernetes reports that a pod has ended. Members report that they lost their coordinator, or are in contact with it. A
host closes a stream and reports that no agent listens. An agent without any such report may be cut off from this
operator and still be training (decision "Silence alone is no death").
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
    """The replica is alive, or nothing speaks against it."""
    SILENT = enum.auto()
    """The replica is in doubt: it has been silent for longer than a broken stream takes to reopen, and nobody reports
    it dead."""
    DEAD = enum.auto()
    """The replica does not come back as it was."""


class EvidenceSource(enum.Enum):
    """Source of the evidence for a verdict."""

    POD = enum.auto()
    """The pod has ended, is being deleted, or is another one."""
    NODE = enum.auto()
    """The node is out of service, or does not answer either."""
    HOST = enum.auto()
    """The host reports that no agent listens."""
    MEMBERS = enum.auto()
    """The members report that they lost this replica, which coordinates them, or that they are in contact with it."""
    DRAIN = enum.auto()
    """The members have stopped at the step that this replica, their coordinator, announced, so it was alive then."""
    SILENCE = enum.auto()
    """There is no source: the replica is silent."""


@dataclass(frozen=True)
class HealthVerdict:
    life: Life
    sentence: str = ""
    """Reason, in words that follow 'replica x'; empty if the replica is not dead."""
    evidence: EvidenceSource | None = None
    """Source of the evidence; None if the replica is alive."""
    age: float | None = None
    """Seconds since the replica fell silent; None if silence is not the evidence."""
    waits: bool = False
    """Whether the replica is to be given up for its silence, but not yet (`JobObservation.given_up`)."""

    @property
    def dead(self) -> bool:
        return self.life is Life.DEAD


ALIVE = HealthVerdict(Life.ALIVE)
TRAINS = (protocol.State.RUNNING, protocol.State.DRAINING)
"""States in which a member takes part in a round: it would have failed if it had lost its coordinator."""


def _dead(evidence: EvidenceSource, sentence: str, age: float | None = None) -> HealthVerdict:
    return HealthVerdict(Life.DEAD, sentence, evidence, age)


@dataclass(frozen=True)
class Health:
    observed: JobObservation
    round: Round
    now: float

    @cached
    def no_agent_reachable(self) -> bool:
        """Whether no agent is connected. Then the operator may be the one that is cut off, and all may be well."""
        return not any(view.connected for view in self.observed.agents.values())

    def by_objects(self, pod: PodView) -> HealthVerdict:
        """Judge a pod by its own object and its node's: no agent could prove these wrong."""
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
        """Judge a pod by the contact with its agent. For members of a round under way, the coordinator knows more."""
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
            age, is_first = restarted_for, True  # until the restart, the previous container was the one that was silent
        age = None if age is None else min(age, self._since_planned_claim)
        # The first contact takes longer: members have answered before, but other replicas may still be starting their
        # agent.
        first = constants.FIRST_CONTACT if pod.name in self.round.members else constants.AGENT_GIVE_UP
        lost = constants.UNREACHABLE if self.observed.job.status.world.round else constants.UNREACHABLE_BEFORE
        patience = first if is_first else lost
        if age is None or age < patience:
            return ALIVE
        if view.refusal is ConnectionRefusal.NOT_LISTENING:
            return _dead(EvidenceSource.HOST, f"has had no agent that listens for {age:.0f} s", age)
        if self.no_agent_reachable or self.observed.operator_isolated:
            return HealthVerdict(Life.SILENT, evidence=EvidenceSource.SILENCE, age=age)
        if pod.uid not in self.observed.given_up:
            return HealthVerdict(Life.SILENT, evidence=EvidenceSource.SILENCE, age=age, waits=True)
        return _dead(EvidenceSource.SILENCE, f"could not be reached for {age:.0f} s, while others could", age)

    @cached
    def _since_planned_claim(self) -> float:
        """Seconds since the last claim, if that was a planned one; infinity if not.

        Nothing had failed until a planned claim, so that a member that only the operator could not reach was alive then
        (decision "Silence alone is no death").
        """
        claim = self.round.claim
        if claim is None or claim.at is None or claim.reason not in PLANNED:
            return math.inf
        return since(unix_seconds(claim.at), self.now)

    def _is_in_good_standing(self, replica: str) -> bool:
        """Return whether the replica is a member of the committed round without any evidence against it."""
        if not self.round.committed or replica not in self.round.members:
            return False
        if replica == self.round.coordinator.replica:
            return not self.coordinator.dead or self.coordinator.evidence is EvidenceSource.DRAIN
        return replica not in self.round.failed

    @cached
    def coordinator(self) -> HealthVerdict:
        """Verdict on the coordinator of the committed round.

        The coordinator is dead at once if its host closes the stream and refuses the next one. If it is in doubt, its
        members are asked. If none of them can be reached either, the world may be training as a whole, and it is left
        alone until Kubernetes knows more (decision "When a coordinator counts as lost").
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
        # The stream broke and was not reopened in time, or this operator is new and has had no answer so far.
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
        """Return the verdict of the connected members on a coordinator that is silent; None if no member has evidence.

        A member's part in the round ends soon after it has lost its coordinator: while it trains, it is in contact.
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
        """Whether each member that could be reached has had the time to open its stream.

        Members are watched from the first doubt on.
        """
        running_pods = {pod.name for pod in self.observed.pods if pod.phase is PodPhase.RUNNING and not pod.deleting}
        other_names = self.round.members.keys() & running_pods - {self.round.coordinator.replica}
        views = (self.observed.agent(name) for name in other_names)
        return all(view.connected or (view.silent_for(self.now) or 0.0) >= constants.RECONNECT for view in views)

    def may_answer(self, replica: str) -> bool:
        """Return whether an answer of the replica is worth waiting for.

        The answer is not worth it if the replica's host refuses the stream, or if the replica has been cut off for a
        while.
        """
        view = self.observed.agent(replica)
        silent_for = None if view.lost_at is None else view.silent_for(self.now)
        cut_off = silent_for is not None and silent_for >= constants.RECONNECT
        return view.connected or (view.refusal is None and not cut_off)
