"""Evidence of life: what says of a replica that it lives, is silent or is dead. All of it is judged here alone.

A pod that has ended says so; a host says at once that no agent listens; an agent that nobody hears may be cut off from
this operator and be training, so silence is given time, and more of it where no agent at all can be heard."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from concertina.plan.facts import constants
from concertina.plan.facts.cached import cached
from concertina.plan.facts.round import Round
from concertina.plan.observed import AgentView, ConnectionRefusal, Observed, PodPhase, PodView


class Life(enum.Enum):
    ALIVE = enum.auto()
    """Or nothing speaks against it."""
    SILENT = enum.auto()
    """In doubt: for longer than a broken stream takes to be opened again, and not long enough to be taken for dead."""
    DEAD = enum.auto()
    """It is not coming back as what it was."""


class Evidence(enum.Enum):
    """Who says so."""

    POD = enum.auto()
    """Its pod has ended, is going, or is another one."""
    NODE = enum.auto()
    """Its node is out of service, or does not answer either."""
    HOST = enum.auto()
    """Its host says that no agent listens."""
    SILENCE = enum.auto()
    """Nobody: it is not heard of."""


@dataclass(frozen=True)
class Verdict:
    life: Life
    sentence: str = ""
    """Why, in words that follow 'replica x'; empty where it is not dead."""
    evidence: Evidence | None = None
    """None where it is alive."""
    age: float | None = None
    """Seconds since it fell silent; None where silence is not the evidence."""

    @property
    def dead(self) -> bool:
        return self.life is Life.DEAD


ALIVE = Verdict(Life.ALIVE)


def _dead(evidence: Evidence, sentence: str, age: float | None = None) -> Verdict:
    return Verdict(Life.DEAD, sentence, evidence, age)


@dataclass(frozen=True)
class Health:
    observed: Observed
    round: Round
    now: float

    @cached
    def no_agent_reachable(self) -> bool:
        """Then it may be the operator who is cut off, and all may be well."""
        return not any(view.connected for view in self.observed.agents.values())

    def by_objects(self, pod: PodView) -> Verdict:
        """As its pod and its node say: what no agent could prove wrong."""
        if pod.ended:
            lines = [line for line in pod.exit_message.splitlines() if line.strip()]
            detail = lines[-1].strip()[:300] if lines else pod.exit_reason
            code = "" if pod.exit_code is None else f" with exit code {pod.exit_code}"
            return _dead(Evidence.POD, f"ended{code}{f' ({detail})' if detail else ''}")
        if pod.deleting:
            return _dead(Evidence.POD, "is being deleted")
        if self.observed.node(pod).out_of_service:
            return _dead(Evidence.NODE, f"was on node {pod.node}, which is out of service")
        return ALIVE

    def by_contact(self, pod: PodView) -> Verdict:
        """As its agent lets itself be heard. Of members of a round that goes on their lead knows more."""
        view = self.observed.agent(pod.name)
        if view.alive or pod.phase is not PodPhase.RUNNING or self._is_in_good_standing(pod.name):
            return ALIVE
        if not self.observed.node(pod).ready:
            return _dead(Evidence.NODE, f"can't be reached and its node {pod.node} is not ready")
        age = self._silent_for(view)
        if age is None:
            return ALIVE
        if age >= self._timeout(pod.name, view):
            return _dead(Evidence.SILENCE, f"could not be reached for {age:.0f} s", age)
        return ALIVE

    def _timeout(self, replica: str, view: AgentView) -> float:
        """Seconds. For a first contact: members once answered; others may still be starting their agent."""
        first = constants.FIRST_CONTACT if replica in self.round.members else constants.AGENT_GIVE_UP
        limit = first if view.lost_at is None else constants.UNREACHABLE
        return max(limit, constants.WHOLE_WORLD) if self.no_agent_reachable else limit

    def _silent_for(self, view: AgentView) -> float | None:
        return None if view.silent_since is None else self.now - view.silent_since

    def _is_in_good_standing(self, replica: str) -> bool:
        """A member of the committed round of which nothing bad is known."""
        if not self.round.committed or replica not in self.round.members:
            return False
        if replica == self.round.lead.replica:
            return not self.lead.dead
        report = self.round.report
        return report is None or not any(failure.replica == replica for failure in report.failures)

    @cached
    def lead(self) -> Verdict:
        """Whether the committed round still has its lead. Dead at once where its host says so; where it is silent, as
        soon as another member proves that it isn't the operator who is cut off. A world that is silent as a whole may
        be training: it is given time (decision "When a lead counts as lost")."""
        lead = self.round.lead
        pod = next((pod for pod in self.observed.pods if pod.name == lead.replica), None)
        if pod is None or pod.uid != lead.uid or pod.ended:
            return _dead(Evidence.POD, "has ended")
        view = self.observed.agent(lead.replica)
        if view.alive:
            return ALIVE
        if view.refusal is ConnectionRefusal.NOT_LISTENING:
            return _dead(Evidence.HOST, "is gone: its agent no longer listens")
        age = self._silent_for(view)
        # Its stream broke and was not opened again in time; or this operator, new, got no answer from it so far.
        if age is None or age < (constants.FIRST_CONTACT if view.lost_at is None else constants.RECONNECT):
            return ALIVE
        if pod.deleting:
            return _dead(Evidence.POD, "is gone: its agent no longer listens", age)
        if not self.observed.node(pod).ready:
            return _dead(Evidence.NODE, "is gone: its agent no longer listens", age)
        others = any(self.observed.agent(name).connected for name in self.round.members if name != lead.replica)
        if others or age >= constants.WHOLE_WORLD:
            return _dead(Evidence.SILENCE, "is silent", age)
        return Verdict(Life.SILENT, evidence=Evidence.SILENCE, age=age)

    def may_answer(self, replica: str) -> bool:
        """Whether it is worth waiting for its answer: neither turned away by its host nor cut off for a while."""
        view = self.observed.agent(replica)
        cut_off = view.lost_at is not None and self.now - view.lost_at >= constants.RECONNECT
        return view.connected or (view.refusal is None and not cut_off)
