"""The last committed round, as its coordinator and its members report it, and the claim of the next one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import concertina_protocol as protocol
from concertina.api.status import rfc3339
from concertina.api.world import Claim, Member, World
from concertina.plan.facts.cached import cached
from concertina.plan.facts.decision import Reason
from concertina.plan.observed import Call, JobObservation

FIRST_ROUND = 1
"""Number of a job's first round, unless an agent has seen a higher one."""


@dataclass(frozen=True)
class Round:
    observed: JobObservation

    @cached
    def world(self) -> World:
        return self.observed.job.status.world

    @cached
    def claim(self) -> Claim | None:
        """Highest claim, of this round or of the next."""
        return self.world.claim or self._asked_first_claim

    @property
    def first_claim(self) -> Claim | None:
        """Claim of the first round whose id the first status holds; None once another write shows a claim.

        With this claim, the operator asks the replicas without another write, and the commit is the first write that
        shows the claim (decision "The first status holds the first claim").
        """
        claim_id = self.observed.job.status.internal.first_claim
        if not claim_id:
            return None
        return Claim(round=FIRST_ROUND, claim_id=claim_id, reason=Reason.FIRST_ROUND, message="the replicas are ready")

    @property
    def _asked_first_claim(self) -> Claim | None:
        """Claim of the first round with the time of the first Prepare; None if this operator has sent none."""
        claim = self.first_claim
        if claim is None:
            return None
        calls = [call for view in self.observed.agents.values() if (call := view.prepare_of(claim))]
        sent_at = min((call.sent_at for call in calls if call.sent_at is not None), default=None)
        if sent_at is not None:
            claim = claim.model_copy(update={"at": rfc3339(sent_at)})
        return claim if calls else None

    @cached
    def committed(self) -> bool:
        """Whether there is a round with members, and no claim of a later one."""
        claim, world = self.claim, self.world
        return claim is not None and claim.committed and claim.round == world.round and bool(world.members)

    @property
    def claimed(self) -> bool:
        """Whether the next round is being formed."""
        return self.claim is not None and not self.claim.committed

    @property
    def disbanded(self) -> bool:
        """Whether there is no current round, and none is being formed.

        Either there was no round so far, or no round follows the last claim. (Rounds of torchrun have no members.)
        """
        claim, world = self.claim, self.world
        if world.members:
            return False
        return not world.round if claim is None else claim.committed and claim.round > world.round

    @cached
    def members(self) -> Mapping[str, Member]:
        """Members by replica; a later claim may be about to replace them."""
        return {member.replica: member for member in self.world.members}

    @property
    def coordinator(self) -> Member:
        return self.world.members[0]

    @cached
    def report(self) -> protocol.Report | None:
        """Last report of the committed round's coordinator about that round, or None."""
        if not self.committed or self.claim is None:
            return None
        report = self.observed.agent(self.coordinator.replica).report
        if report is None or (report.round, report.claim) != (self.claim.round, self.claim.claim_id):
            return None
        return report if self.coordinator.is_agent(report.instance) else None

    @cached
    def failed(self) -> frozenset[str]:
        """Replicas whose failure the coordinator reports."""
        return frozenset(failure.replica for failure in self.report.failures) if self.report else frozenset()

    @cached
    def unacknowledged(self) -> tuple[tuple[str, Call], ...]:
        """Members whose Assign of this round, sent by this operator, was not accepted so far."""
        if not self.committed or self.claim is None:
            return ()
        calls = ((name, self.observed.agent(name).assign) for name in self.members)
        return tuple(
            (name, call)
            for name, call in calls
            if call and call.is_of(self.claim) and not isinstance(call.reply, protocol.Accepted)
        )

    @property
    def step(self) -> int:
        """Number of finished steps of the run, as far as reported. Counted optimizer steps do not say it."""
        progress = self.observed.job.status.progress
        reported_step = progress.step if progress and not progress.optimizer else 0
        live = self.report.progress if self.report else None
        return max(reported_step, live.step) if live and not live.optimizer else reported_step
