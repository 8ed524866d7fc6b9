"""The current round, as its coordinator and members report it, and the newest claim (decision to begin a round).

The operator commits a claim when it has chosen the members. While a claim is not committed, the operator is forming
that round.

The coordinator is the agent of rank 0. A round is a period in which a fixed set of replicas trains.
"""

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
"""Number of a job's first round, unless an agent already knows a round with a higher number."""


@dataclass(frozen=True)
class Round:
    observed: JobObservation

    @cached
    def world(self) -> World:
        return self.observed.job.status.world

    @cached
    def claim(self) -> Claim | None:
        """Newest claim (decision to begin a round): of the round that is being formed, otherwise of the current one."""
        return self.world.claim or self._asked_first_claim

    @property
    def first_claim(self) -> Claim | None:
        """Claim (decision to begin a round) of the job's first round; None if the job's first status has no id for it.

        The job's first status contains only the id of the claim. The operator can therefore call the replicas at once,
        and needs no second status write before it commits the round (decision "The first status holds the first
        claim").
        """
        claim_id = self.observed.job.status.internal.first_claim
        if not claim_id:
            return None
        return Claim(round=FIRST_ROUND, claim_id=claim_id, reason=Reason.FIRST_ROUND, message="the replicas are ready")

    @property
    def _asked_first_claim(self) -> Claim | None:
        """Claim (decision to begin a round) of the first round, with the time of its first call; None without a call.

        The call is a Prepare call of this operator, which asks a replica to join the next round. The status does not
        contain this claim before the round is committed.
        """
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
        """Return whether the job has a current round with members, and no later round is being formed."""
        claim, world = self.claim, self.world
        return claim is not None and claim.committed and claim.round == world.round and bool(world.members)

    @property
    def claimed(self) -> bool:
        """True if the operator is forming the next round: it has begun the round, but not chosen the members yet."""
        return self.claim is not None and not self.claim.committed

    @property
    def disbanded(self) -> bool:
        """True if there is no current round and the operator is not forming one.

        This is the case before the first round, and after the operator has ended a round without beginning a new one.
        The list of members alone does not show this, because rounds of torchrun list no members.
        """
        claim, world = self.claim, self.world
        if world.members:
            return False
        return not world.round if claim is None else claim.committed and claim.round > world.round

    @cached
    def members(self) -> Mapping[str, Member]:
        """Members of the current round, keyed by replica. They stay listed while the next round is being formed."""
        return {member.replica: member for member in self.world.members}

    @property
    def coordinator(self) -> Member:
        return self.world.members[0]

    @cached
    def report(self) -> protocol.Report | None:
        """Last report of the coordinator about the committed round; None if there is no report.

        The coordinator is the agent of rank 0. A round is committed once the operator has chosen its members.
        """
        if not self.committed or self.claim is None:
            return None
        report = self.observed.agent(self.coordinator.replica).report
        if report is None or (report.round, report.claim) != (self.claim.round, self.claim.claim_id):
            return None
        return report if self.coordinator.is_agent(report.instance) else None

    @cached
    def member_states(self) -> Mapping[str, protocol.MemberState]:
        """States of the current round's members in the coordinator's last report, keyed by replica.

        The coordinator is the agent of rank 0. Unlike `report`, the states are still known while the operator forms the
        next round, until the coordinator has prepared for that round.
        """
        report = self.observed.agent(self.coordinator.replica).report if self.members else None
        return report.members if report and report.round == self.world.round else {}

    @cached
    def failed(self) -> frozenset[str]:
        """Replicas of the committed round that have failed, as the coordinator (the agent of rank 0) reports them.

        A round is committed once the operator has chosen its members.
        """
        return frozenset(failure.replica for failure in self.report.failures) if self.report else frozenset()

    @cached
    def unacknowledged(self) -> tuple[tuple[str, Call], ...]:
        """Members that have not accepted their Assign call (which gives them a rank) yet, each with this call.

        Only calls that this operator process has sent are included.
        """
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
        """Number of training steps that the workers have reported as finished.

        For a script that reports no steps, concertina counts the optimizer's steps. Those are not used here, because
        the count of each worker process begins at 0.
        """
        progress = self.observed.job.status.progress
        reported_step = progress.step if progress and not progress.optimizer else 0
        live = self.report.progress if self.report else None
        return max(reported_step, live.step) if live and not live.optimizer else reported_step
