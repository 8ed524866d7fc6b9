"""Who goes first where several jobs each hold a part of the room that they need to start: the others release theirs.

A job waits for room when it has fewer placed pods than its least size and the rest can't be placed. Waiting jobs stand
in line: by the priority of their pods, then those that have trained already, then the older one, then uid. Who holds
room in vain and isn't first releases it after PATIENCE, and stays away until nobody waits ahead of it. Who is first in
line keeps what it has; only if it can't start within TURN_TIMEOUT it lets the others go first for a set time, twice as
long at each time that follows: so every job that fits has its turn, whatever is ahead of it. (Who holds nothing, or
must not release it, goes on asking for room meanwhile; just nobody waits for it.) Nobody releases anything while nobody
else waits. What was released, and how often, stands in status.internal.gang.

Nobody waits for a job that room would not help (`room`): it stands in no line, or, where a quota is used up, only in
that of its namespace. What it holds in vain it releases to those that it is in no line with, for a set time."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from concertina.api.internal import Gang
from concertina.api.status import rfc3339, unix_seconds
from concertina.plan.actions import Event
from concertina.plan.facts import sizes
from concertina.plan.facts.context import JobContext
from concertina.plan.facts.decision import Decision, Phase, Pods
from concertina.plan.observed import Competitor, Hindrance, JobView, PodPhase, PodView, Refusal, Refused
from concertina.plan.recovery import causes
from concertina.plan.rounds import claims

PATIENCE = 20.0
"""Seconds for which room is held in vain by who isn't first in line; doubled after each release, three times."""
TURN_TIMEOUT = 120.0
"""Seconds that the first in line has to start, while others wait."""
LONGEST = 3600.0
"""Seconds, at most, for which a job lets the others go first."""


@dataclass(frozen=True)
class Waiting:
    """A job that waits for room, as it sees itself."""

    competitor: Competitor
    """As the others see it."""
    least: int
    """Pods that it needs."""
    held: int
    """Pods that have a node."""
    since: float
    """When its newest pod was made: nothing has changed since."""
    away: bool = False
    """It released what it had."""
    hindrance: Hindrance | None = None

    def needs_room_in(self, namespace: str) -> bool:
        """Whether it could start if jobs of that namespace made room."""
        if self.hindrance is Hindrance.QUOTA:
            return namespace == self.competitor.namespace
        return self.hindrance is None


def waiting(job: JobView, pods: Iterable[PodView], refused: bool) -> Waiting | None:
    """None where it does not wait for room; `refused`: whether the API server takes no more pods of it (a quota)."""
    spec, gang = job.spec, job.status.internal.gang
    if spec is None or job.deleting or spec.suspend or job.status.completion_time:
        return None
    alive = [pod for pod in pods if not pod.deleting and pod.phase in (PodPhase.PENDING, PodPhase.RUNNING)]
    held = sum(bool(pod.node) and pod.index is not None for pod in alive)
    # Whoever has released once stands in line until it starts, even while its new pods wait for their first try.
    stuck = refused or gang.releases > 0 or any(pod.unschedulable for pod in alive)
    if not stuck or held >= sizes.least(spec):
        return None
    competitor = Competitor(
        namespace=job.namespace,
        name=job.name,
        uid=job.uid,
        priority=max((pod.priority for pod in alive), default=gang.priority),
        trained=bool(job.status.world.members),
        created=job.created,
        deferred=gang.until is not None,
    )
    since = max((pod.created for pod in alive), default=job.created)
    return Waiting(competitor, sizes.least(spec), held, since, gang.since is not None)


def by_quota(refused: Refused | None) -> bool:
    """Other refusals no other job can end by giving way."""
    return refused is not None and refused.kind is Refusal.QUOTA


def release(ctx: JobContext) -> Decision | None:
    """Holds no pods for a while, so that another job can start: two that each hold a part would wait for each other for
    ever (decision "Jobs that wait for room stand in line")."""
    mine = _mine(ctx)
    if mine is None:
        return None
    if ctx.status.internal.gang.since is not None:
        return _away(ctx, ctx.status.internal.gang) if _stays_away(ctx, mine) else None
    if not _may_release(ctx, mine) or not _is_due(ctx, mine):
        return None
    made = _made(ctx, mine).model_copy(update={"since": rfc3339(round(ctx.now, 3))})
    return replace(
        _away(ctx, made),
        world=claims.disbanded(ctx, "GivesWay"),
        events=(Event("Warning", "GivesWay", made.message),),
    )


def seconds_left(ctx: JobContext) -> float:
    """Seconds until the job may have to let others go first, or may try again; 0 where time alone changes neither."""
    mine, until = _mine(ctx), ctx.status.internal.gang.until
    if mine is None:
        return 0.0
    ends = [unix_seconds(until)] if until else []
    due = _due(ctx, mine) if ctx.status.internal.gang.since is None else None
    return max(0.0, min(ends if due is None else [*ends, due], default=ctx.now) - ctx.now)


def next_status(ctx: JobContext, decision: Decision) -> Gang:
    """status.internal.gang after this pass: a round with members, or one that trains, ends the count."""
    if decision.gang:
        return decision.gang
    committed = decision.world is not None and decision.world.round > ctx.world.round and decision.world.members
    if committed or decision.phase is Phase.TRAINING:  # a round of torchrun begins before there is room for it
        return Gang()
    old, mine = ctx.status.internal.gang, _mine(ctx)
    if old.since or (old.until and unix_seconds(old.until) <= ctx.now):
        return Gang(releases=old.releases, priority=old.priority)
    if mine is None or not _is_first(ctx, mine):
        return old.model_copy(update={"turn": None}) if old.turn else old
    if _is_due(ctx, mine):
        return _made(ctx, mine)
    begun = old.turn is not None and ctx.elapsed(old.turn) <= TURN_TIMEOUT
    return old if begun else old.model_copy(update={"turn": rfc3339(round(ctx.now, 3))})


def _mine(ctx: JobContext) -> Waiting | None:
    observed = ctx.observed
    found = waiting(observed.job, observed.pods, by_quota(observed.refused)) if observed.competitors else None
    return replace(found, hindrance=observed.hindrance) if found else None


def _ahead(ctx: JobContext, mine: Waiting) -> Competitor | None:
    """The first of those in a line with this job, unless that is this job itself."""
    line = [
        competitor
        for competitor in ctx.observed.competitors
        if not competitor.deferred
        and mine.needs_room_in(competitor.namespace)
        and (mine.competitor.deferred or competitor.queue_position < mine.competitor.queue_position)
    ]
    return min(line, key=lambda competitor: competitor.queue_position, default=None)


def _is_first(ctx: JobContext, mine: Waiting) -> bool:
    """Whether it is its turn: others in a line with it wait behind it, or let it go first."""
    in_line = any(mine.needs_room_in(competitor.namespace) for competitor in ctx.observed.competitors)
    return in_line and not mine.competitor.deferred and _ahead(ctx, mine) is None


def _stays_away(ctx: JobContext, mine: Waiting) -> bool:
    until = ctx.status.internal.gang.until
    if until is None:
        return _ahead(ctx, mine) is not None
    return ctx.now < unix_seconds(until) and not all(competitor.deferred for competitor in ctx.observed.competitors)


def _due(ctx: JobContext, mine: Waiting) -> float | None:
    """When it lets others go first if nothing changes; None where it needn't."""
    others = [competitor for competitor in ctx.observed.competitors if not competitor.deferred]
    if not others:
        return None
    due, releases = [], _may_release(ctx, mine)
    if _is_first(ctx, mine):
        turn = ctx.status.internal.gang.turn
        due.append((unix_seconds(turn) if turn else ctx.now) + TURN_TIMEOUT)
    elif releases and _ahead(ctx, mine):
        due.append(mine.since + PATIENCE * 2.0 ** min(ctx.status.internal.gang.releases, 3))
    if releases and not all(mine.needs_room_in(competitor.namespace) for competitor in others):
        # Who has trained may have lost a node that comes back: that is worth a while.
        due.append(mine.since + (TURN_TIMEOUT if mine.competitor.trained else PATIENCE))
    return min(due, default=None)


def _is_due(ctx: JobContext, mine: Waiting) -> bool:
    due = _due(ctx, mine)
    return due is not None and due <= ctx.now


def _may_release(ctx: JobContext, mine: Waiting) -> bool:
    """It holds something, and no state is lost that nothing else holds."""
    if not mine.held:
        return False
    if ctx.round.members and ctx.keeps_state and ctx.spec.checkpoint is None:
        return False
    return not (ctx.round.committed and causes.broken(ctx) is None)


def _made(ctx: JobContext, mine: Waiting) -> Gang:
    """From now on, others go first."""
    gang, first = ctx.status.internal.gang, _ahead(ctx, mine)
    until = gang.until
    if not until and not first:
        until = rfc3339(round(ctx.now + min(LONGEST, TURN_TIMEOUT * 2.0 ** min(gang.releases, 10)), 3))
    message = _why(ctx, mine, first, until)
    return Gang(releases=gang.releases + 1, until=until, priority=mine.competitor.priority, message=message)


def _why(ctx: JobContext, mine: Waiting, first: Competitor | None, until: str | None) -> str:
    had = f"only {mine.held} of the {mine.least} replicas needed found room"
    if until:
        why = f", and more room would not help: {mine.hindrance.value}" if mine.hindrance else ""
        does = "releases them, and lets" if _may_release(ctx, mine) else "lets"
        return f"{had}{why}; {does} other jobs that wait go first until {until}"
    assert first is not None
    reason = (
        "it has a higher priority"
        if first.priority > mine.competitor.priority
        else "it has trained already"
        if first.trained > mine.competitor.trained
        else "it is the older one"
    )
    near = first.namespace == mine.competitor.namespace
    who = f"{first.namespace}/{first.name}" if near else "a job of another namespace"
    return f"{had}: releases them for {who}, which goes first ({reason}); tries again when that no longer waits"


def _away(ctx: JobContext, gang: Gang) -> Decision:
    recheck = unix_seconds(gang.until) - ctx.now if gang.until else None
    return Decision(Phase.WAITING, "GivesWay", gang.message, gang=gang, recheck=recheck, pods=Pods.NONE)
