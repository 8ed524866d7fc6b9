"""Build the trace of a round: how long each phase took, from the end of training to the next round's first step.

A round is a period in which a fixed set of replicas trains. A trace is reported once, in the planning pass in which the
round begins to train or is aborted. All times are by this operator's clock. For the phases inside the pods, agents
report only durations. The first of these phases begins when the coordinator's agent answers its Assign call, and each
other phase begins when the previous one ends. The time of a worker's failure comes from `status.incidents`, and is
never later than the time at which the operator noticed the failure (decision "Trace spans use the operator's clock").
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import concertina_protocol as protocol
from concertina.api.accounting import Incident
from concertina.api.restarts import LastFailure
from concertina.api.spec import Launcher
from concertina.api.status import ConditionType, JobStatus, unix_seconds
from concertina.api.world import Claim
from concertina.plan.actions import RoundTrace, Span, SpanName
from concertina.plan.facts.cached import cached
from concertina.plan.facts.context import JobContext
from concertina.plan.facts.decision import PLANNED, Phase
from concertina.plan.observed import Call

MOST_MEMBERS = 32
"""Largest number of members that have a span of their own in a trace. These are the slowest members."""
NOT_YET = (Phase.STARTING, Phase.RECOVERING, Phase.WAITING, Phase.STALLED)
"""Phases of a job whose round does not train yet."""
UNDER_WAY = (Phase.TRAINING, Phase.DRAINING, Phase.COMPLETE)
"""Phases of a job whose round trains or has trained."""
DRAINS = (*PLANNED, Phase.DRAINING.value)
"""Causes of incidents (times without training) that began with a drain of the round.

The last cause is for drains that the coordinator (the agent of rank 0) began by itself.
"""
START = (
    SpanName.START, SpanName.GROUP, SpanName.BUILD, SpanName.RESTORE, SpanName.COMPILE, SpanName.FIRST_STEP,
)  # fmt: skip
"""Names of the spans of a round's start, in order."""


def round_trace(ctx: JobContext, status: JobStatus) -> RoundTrace | None:
    """Return the trace of a round that began to train or was aborted in this planning pass, or None.

    `status` is the new status, after this pass.
    """
    claim, next_claim = ctx.round.claim, status.world.claim
    if status is ctx.status or claim is None or next_claim is None or ctx.round.disbanded:
        return None
    if ctx.spec.launcher is Launcher.TORCHRUN:  # torchrun forms its rounds itself, and nothing reports on them
        return None
    history = _RoundHistory(ctx, claim)
    if not _is_in(ctx.status, NOT_YET) or history.trained:
        return None
    if _is_in(status, UNDER_WAY):
        return RoundTrace(claim.round, history.root())
    if _is_in(status, NOT_YET) and next_claim.claim_id == claim.claim_id:
        return None
    running = status.condition(ConditionType.RUNNING)
    why = running.message if running else next_claim.reason
    return RoundTrace(claim.round, history.root(f"given up before its first step: {why}"))


def _is_in(status: JobStatus, phases: tuple[Phase, ...]) -> bool:
    return status.phase in {phase.value for phase in phases}


@dataclass(frozen=True)
class _RoundHistory:
    """Times and events of the current round that are known so far.

    A round is a period in which a fixed set of replicas trains.
    """

    ctx: JobContext
    claim: Claim

    @cached
    def incident(self) -> Incident | None:
        """Incident (a time without training) that ends with this round, or None."""
        return self.ctx.status.internal.incident

    @cached
    def trained(self) -> bool:
        """Return whether the workers of the round have already trained."""
        return self.incident is not None and self.incident.round >= self.claim.round

    @cached
    def failure(self) -> LastFailure | None:
        """Failure that caused this round; None if there was none, or if the failed round had not trained."""
        failure, incident = self.ctx.status.last_failure, self.incident
        if failure is None or incident is None:
            return None
        return failure if (failure.round, failure.reason) == (incident.round, incident.cause) else None

    # --- times --------------------------------------------------------------------------------------------------------

    @cached
    def claimed(self) -> float:
        return unix_seconds(self.claim.at) if self.claim.at else self.ctx.now

    @cached
    def begin(self) -> float:
        """Unix time at which the round's trace begins.

        If the round follows a failure or a planned change, this is the time at which training ended. Otherwise it is
        the time at which the operator began to form the round: the claim in the status, or the first Prepare call if
        that was earlier.

        The message Prepare asks a replica to join the next round.
        """
        return min(unix_seconds(self.incident.at) if self.incident else self.claimed, self.asked)

    @cached
    def asked(self) -> float:
        """Unix time of the round's first Prepare call; the time of the claim if another operator sent that call.

        A claim is the operator's decision to begin the round. A Prepare call asks a replica to join the round.
        """
        return min((call.sent_at for _, call in self.prepares if call.sent_at is not None), default=self.claimed)

    @cached
    def committed(self) -> float | None:
        world = self.ctx.world
        return unix_seconds(world.since) if world.since and world.round == self.claim.round else None

    @cached
    def prepares(self) -> tuple[tuple[str, Call], ...]:
        """Prepare calls that this operator sent for the round, keyed by replica."""
        calls = ((name, view.prepare_of(self.claim)) for name, view in self.ctx.observed.agents.items())
        return tuple((name, call) for name, call in calls if call is not None)

    @cached
    def accepted(self) -> dict[str, float]:
        """Unix times at which the members acknowledged their ranks, keyed by replica."""
        accepted_at = {}
        for name in self.ctx.round.members:
            call = self.ctx.agent(name).assign
            if call and call.claim == self.claim.claim_id and isinstance(call.reply, protocol.Accepted):
                accepted_at[name] = call.done_at or self.ctx.now
        return accepted_at

    # --- spans --------------------------------------------------------------------------------------------------------

    def root(self, error: str = "") -> Span:
        job, world = self.ctx.observed.job, self.ctx.world
        attributes: dict[str, str | int] = {
            "k8s.namespace.name": job.namespace,
            "concertina.trainingjob.name": job.name,
            "concertina.trainingjob.uid": job.uid,
            "concertina.round": self.claim.round,
            "concertina.reason": self.claim.reason,
        }
        if self.committed is not None:
            attributes |= {"concertina.replicas": world.replicas, "concertina.workers": world.workers}
            if world.base:
                attributes |= {
                    "concertina.restore.source": world.base.source,
                    "concertina.restore.step": world.base.step,
                }
        spans = tuple(self._spans())
        return Span(SpanName.ROUND, self.begin, max(self.begin, self.ctx.now), attributes, spans, error)

    def _spans(self) -> Iterator[Span]:
        decided = self.begin
        if self.failure is not None:
            decided = unix_seconds(self.failure.at)
            yield _span(SpanName.DETECT, self.begin, decided, self._cause(self.failure))
        elif self.incident is not None and self.incident.cause in DRAINS:
            decided = self.claimed
            yield _span(SpanName.DRAIN, self.begin, decided)
        yield _span(SpanName.DECIDE, decided, self.asked)
        until = self.ctx.now if self.committed is None else self.committed
        counts = {"concertina.replicas.asked": len(self.prepares)}
        yield _span(SpanName.PREPARE, self.asked, until, counts, tuple(self._members(until)))
        if self.committed is not None:
            last = max(self.accepted.values(), default=self.committed)
            yield _span(SpanName.ASSIGN, self.committed, last, {"concertina.replicas.accepted": len(self.accepted)})
            yield from self._start(self.committed)

    def _cause(self, failure: LastFailure) -> Mapping[str, str | int]:
        named = {"k8s.pod.name": failure.replica, "k8s.node.name": failure.node, "concertina.failure": failure.reason}
        return {name: value for name, value in named.items() if value}

    def _members(self, until: float) -> Iterator[Span]:
        """Yield a span for each member that was called, limited to the MOST_MEMBERS slowest ones."""
        spans = [span for name, call in self.prepares if (span := self._member(name, call, until)) is not None]
        yield from sorted(spans, key=lambda span: span.begin - span.end)[:MOST_MEMBERS]

    def _member(self, name: str, call: Call, until: float) -> Span | None:
        if call.sent_at is None:
            return None
        attributes = {"k8s.pod.name": name, "k8s.node.name": self.ctx.node_of(name)}
        error = call.error
        if isinstance(call.reply, protocol.Refused):
            error = f"refused: {call.reply.reason}"
        elif isinstance(call.reply, protocol.Prepared) and call.reply.replaced:
            attributes["concertina.workers.replaced"] = ",".join(sorted(call.reply.replaced))
        elif call.done_at is None:
            error = "no answer"
        end = until if call.done_at is None else call.done_at
        return _span(SpanName.PREPARE_MEMBER, call.sent_at, end, attributes, error=error)

    def _start(self, committed: float) -> Iterator[Span]:
        """Yield the spans of the phases between the commit and the first step, as rank 0 reported them.

        A custom command reports no phases, so its start gets a single span.
        """
        begin, now = self.accepted.get(self.ctx.world.coordinator or "", committed), self.ctx.now
        progress = self.ctx.round.report.progress if self.ctx.round.report else None
        timeline = [(name, progress.timeline[name]) for name in START if name in progress.timeline] if progress else []
        if not timeline:
            yield _span(SpanName.START, begin, now)
            return
        begin = max(committed, min(begin, now - sum(seconds for _, seconds in timeline)))
        for name, seconds in timeline:
            yield _span(name, begin, min(now, begin + seconds))
            begin = min(now, begin + seconds)


def _span(
    name: SpanName,
    begin: float,
    end: float,
    attributes: Mapping[str, str | int] | None = None,
    children: tuple[Span, ...] = (),
    error: str = "",
) -> Span:
    """Return a span whose end is not before its beginning, even if a clock was set back meanwhile."""
    return Span(name, begin, max(begin, end), attributes or {}, children, error)
