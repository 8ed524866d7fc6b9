"""Evidence of life: what says of a replica that it lives, is silent or is dead. All of it is judged here alone.

Kubernetes says that a pod has ended; members say that they lost their coordinator, or hear it; a host closes a stream
and says that no agent listens. An agent of which nobody speaks may be cut off from this operator and be training
(decision "Silence alone is no death")."""

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
    """Or nothing speaks against it."""
    SILENT = enum.auto()
    """In doubt: for longer than a broken stream takes to be opened again, and nobody says that it is dead."""
    DEAD = enum.auto()
    """It is not coming back as what it was."""


class EvidenceSource(enum.Enum):
    """Who says so."""

    POD = enum.auto()
    """Its pod has ended, is going, or is another one."""
    NODE = enum.auto()
    """Its node is out of service, or does not answer either."""
    HOST = enum.auto()
    """Its host says that no agent listens."""
    MEMBERS = enum.auto()
    """Those that it coordinates: they have lost it, or hear it."""
    DRAIN = enum.auto()
    """Those that it coordinated: they have stopped where it told them to, so that it was alive then."""
    SILENCE = enum.auto()
    """Nobody: it is not heard of."""


@dataclass(frozen=True)
class HealthVerdict:
    life: Life
    sentence: str = ""
    """Why, in words that follow 'replica x'; empty where it is not dead."""
    evidence: EvidenceSource | None = None
    """None where it is alive."""
    age: float | None = None
    """Seconds since it fell silent; None where silence is not the evidence."""
    waits: bool = False
    """Whether it is to be given up for its silence, and not yet (`JobObservation.given_up`)."""

    @property
    def dead(self) -> bool:
        return self.life is Life.DEAD


ALIVE = HealthVerdict(Life.ALIVE)
TRAINS = (protocol.State.RUNNING, protocol.State.DRAINING)
"""As a member says of its own part in a round: it would have failed if it had lost its coordinator."""


def _dead(evidence: EvidenceSource, sentence: str, age: float | None = None) -> HealthVerdict:
    return HealthVerdict(Life.DEAD, sentence, evidence, age)


@dataclass(frozen=True)
class Health:
    observed: JobObservation
    round: Round
    now: float

    @cached
    def no_agent_reachable(self) -> bool:
        """Then it may be the operator who is cut off, and all may be well."""
        return not any(view.connected for view in self.observed.agents.values())

    def by_objects(self, pod: PodView) -> HealthVerdict:
        """As its pod and its node say: what no agent could prove wrong."""
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
        """As its agent lets itself be heard. Of members of a round that goes on their coordinator knows more."""
        view = self.observed.agent(pod.name)
        if pod.phase is PodPhase.PENDING and pod.node and not self.observed.node(pod).ready:
            # Bound to it before anybody knew: whoever dies in a crowd is replaced on nodes that died with it.
            return _dead(EvidenceSource.NODE, f"waits to start on node {pod.node}, which is not ready")
        if view.alive or pod.phase is not PodPhase.RUNNING or self._is_in_good_standing(pod.name):
            return ALIVE
        if not self.observed.node(pod).ready:
            return _dead(EvidenceSource.NODE, f"can't be reached and its node {pod.node} is not ready")
        age, is_first = view.silent_for(self.now), view.lost_at is None
        if age is not None and (again := self.observed.started_again_for.get(pod.uid, age)) < age:
            age, is_first = again, True  # until then it was the container before that kept silent
        age = None if age is None else min(age, self._since_planned_claim)
        # For a first contact: members once answered; others may still be starting their agent.
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
        """Seconds; infinite where the last claim was none. Until it nothing had failed, so that a member was alive whom
        the operator alone did not hear (decision "Silence alone is no death")."""
        claim = self.round.claim
        if claim is None or claim.at is None or claim.reason not in PLANNED:
            return math.inf
        return since(unix_seconds(claim.at), self.now)

    def _is_in_good_standing(self, replica: str) -> bool:
        """A member of the committed round of which nothing bad is known."""
        if not self.round.committed or replica not in self.round.members:
            return False
        if replica == self.round.coordinator.replica:
            return not self.coordinator.dead or self.coordinator.evidence is EvidenceSource.DRAIN
        return replica not in self.round.failed

    @cached
    def coordinator(self) -> HealthVerdict:
        """Whether the committed round still has its coordinator. Dead at once where its host closes the stream and
        refuses the next; in doubt its members are asked, and where none of them is heard either, the world may be
        training as a whole: it is left alone until Kubernetes knows more (decision "When a coordinator counts as
        lost")."""
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
        # Its stream broke and was not opened again in time; or this operator, new, got no answer from it so far.
        patience = constants.FIRST_CONTACT if view.lost_at is None else constants.RECONNECT
        if age is None or (age < patience and not refused):
            return ALIVE
        if word := self._word_of_members():
            return replace(word, age=age)
        if not self._members_were_asked:
            return HealthVerdict(Life.SILENT, evidence=EvidenceSource.SILENCE, age=age)
        if pod.deleting:
            return _dead(EvidenceSource.POD, "is gone: its agent no longer listens", age)
        if not self.observed.node(pod).ready:
            return _dead(EvidenceSource.NODE, "is gone: its agent no longer listens", age)
        return HealthVerdict(Life.SILENT, evidence=EvidenceSource.SILENCE, age=age)

    def _word_of_members(self) -> HealthVerdict | None:
        """About a coordinator that is not heard, of those of its members that are. A member's part in the round ends
        soon after it has lost its coordinator: while it trains, it hears it. None where nobody can say."""
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
                why = view.report.failures[0].message if view.report.failures else "its part is over"
                evidence = (
                    EvidenceSource.DRAIN if view.report.state == protocol.State.DRAINED else EvidenceSource.MEMBERS
                )
                return _dead(evidence, f"can't be reached, and its member {name} says: {why}")
            trains |= view.report.state in TRAINS
        return HealthVerdict(Life.SILENT, evidence=EvidenceSource.MEMBERS) if trains else None

    @property
    def _members_were_asked(self) -> bool:
        """Whether each of those that could be heard has had the time to open its stream: they are watched from the
        first doubt on."""
        there = {pod.name for pod in self.observed.pods if pod.phase is PodPhase.RUNNING and not pod.deleting}
        others = (
            self.observed.agent(name) for name in self.round.members.keys() & there - {self.round.coordinator.replica}
        )
        return all(view.connected or (view.silent_for(self.now) or 0.0) >= constants.RECONNECT for view in others)

    def may_answer(self, replica: str) -> bool:
        """Whether it is worth waiting for its answer: neither turned away by its host nor cut off for a while."""
        view = self.observed.agent(replica)
        silent_for = None if view.lost_at is None else view.silent_for(self.now)
        cut_off = silent_for is not None and silent_for >= constants.RECONNECT
        return view.connected or (view.refusal is None and not cut_off)
