"""Claims: why a new round is made, who is asked to prepare it, and how long their answers are waited for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import concertina_protocol as protocol
from concertina.amounts import first_of
from concertina.api.restarts import Restart
from concertina.api.status import rfc3339
from concertina.api.world import Claim, World
from concertina.plan.actions import Action, Event, Send
from concertina.plan.facts import constants, sizes
from concertina.plan.facts.context import JobContext
from concertina.plan.facts.decision import PLANNED, Decision, Failure, Phase, RoundTrigger
from concertina.plan.observed import Call
from concertina.plan.pods.pod_backoff import shortage
from concertina.plan.rounds import holders
from concertina.plan.rounds.commits import commit
from concertina.plan.rounds.holders import include_departing
from concertina.plan.state import topology
from concertina_protocol import Prepared

LEAP = 1000
"""Rounds beyond those of the status that an agent may have seen, as after a backup of etcd was restored. One that says
more is passed in several claims: numbers without end would make a round that `agents.bounds` lets nobody report."""


def departing(ctx: JobContext) -> tuple[str, ...]:
    """Members with a notice, or beyond spec.replicas, that are asked as well, since a neighbour goes with them, or they
    have none: what only they hold has to be handed over. (A member's snapshots are copied to the next one.)"""
    names = list(ctx.round.members) if ctx.keeps_state else []
    replicas = ctx.replicas
    seated = {name for index, name in replicas.pod_by_index.items() if index in replicas.wanted_indexes}
    going = [name not in seated for name in names]
    surplus = set(replicas.pod_by_index.values()) - seated
    return tuple(
        name
        for i, name in enumerate(names)
        if going[i] and (going[i - 1] or going[(i + 1) % len(names)])
        if (name in replicas.notices or name in surplus) and replicas.can_answer(name) and replicas.member_still(name)
    )


def claim(
    ctx: JobContext, trigger: RoundTrigger, restart: Restart | None = None, from_storage: bool = False
) -> Decision | None:
    """Make a new claim, with its Prepares; None if there are too few candidates for a round.

    `restart` is the entry of the failure that the round answers. With `from_storage` the round starts from durable
    storage, whatever is in node memory.
    """
    names = ctx.replicas.candidates
    if not sizes.fitting(len(names), ctx.spec):
        return None
    made = Claim(
        round=1 + highest_round(ctx),
        claim_id=ctx.observed.fresh_claim,
        at=rfc3339(ctx.now),
        reason=trigger.reason,
        message=trigger.sentence,
        from_storage=from_storage,
    )
    phase = Phase.RECOVERING if ctx.status.rounds else Phase.STARTING
    failed = isinstance(trigger, Failure)
    is_event = ctx.status.rounds or failed  # conditions report a first round
    event = Event("Warning" if failed else "Normal", trigger.reason, trigger.sentence)
    return Decision(
        phase,
        trigger.reason,
        trigger.sentence,
        world=ctx.world.model_copy(update={"claim": made}),
        restart=restart,
        actions=_prepares(ctx, made, names + departing(ctx)),
        events=(event,) if is_event else (),
        recheck=constants.RETRY,
    )


def last_claim(ctx: JobContext, reason: str) -> Claim:
    """The claim that no round follows: written at the end of the job or of its rounds, so that an operator that has not
    heard of it loses the precondition of all it writes (decision "A claim says whether it is committed")."""
    round, claim_id = 1 + highest_round(ctx), ctx.observed.fresh_claim
    return Claim(round=round, claim_id=claim_id, committed=True, at=rfc3339(ctx.now), reason=reason)


def world_after(ctx: JobContext, decision: Decision) -> World:
    """The world from now on; where the job ends, under its last claim."""
    world = decision.world or ctx.world
    if decision.phase.final and not ctx.status.completion_time:
        return world.model_copy(update={"claim": last_claim(ctx, decision.reason)})
    return world


def disbanded(ctx: JobContext, reason: str) -> World:
    """The world without its members, so that no round goes on; as it is where none does."""
    world = ctx.world
    if ctx.round.disbanded:
        return world
    return World(round=world.round, claim=last_claim(ctx, reason), base=world.base, since=world.since)


def highest_round(ctx: JobContext) -> int:
    """The highest round that anybody is known to have seen, as far as LEAP lets it be believed."""
    own = max(ctx.world.round, ctx.round.claim.round if ctx.round.claim else 0)
    seen = [own]
    for view in ctx.observed.agents.values():
        seen += [view.report.round] if view.report else []
        seen += [call.reply.round for call in (view.prepare, view.assign) if call and call.reply]
    return min(max(seen), own + LEAP)


def _prepares(
    ctx: JobContext, made: Claim, names: tuple[str, ...], again: frozenset[str] = frozenset()
) -> tuple[Action, ...]:
    """To those that were not asked yet, whose call failed a while ago, or who are to be asked again."""
    message = protocol.Prepare(
        ctx.observed.job.uid,
        made.round,
        made.claim_id,
        tuple(protocol.Candidate(name, ctx.replicas.address(name)) for name in names),
    )
    due = (name for name in names if name in again or _is_due(ctx, ctx.agent(name).prepare_of(made)))
    return tuple(Send(name, ctx.replicas.address(name), message) for name in due)


def _is_due(ctx: JobContext, call: Call | None) -> bool:
    return call is None or (call.failed_at is not None and ctx.now - call.failed_at >= constants.RETRY)


def _asked_again(ctx: JobContext) -> frozenset[str]:
    """Who is to look for those as well that came later, where too few can reach each other without them. Only once
    nobody is waited for: of a large world each newcomer alone would make all look round."""
    last = ctx.replicas.all_done_at
    if last is None or ctx.now - last < constants.RETRY or sizes.fitting(len(ctx.replicas.connected), ctx.spec):
        return frozenset()
    return ctx.replicas.uninformed


# --- an open claim


@dataclass(frozen=True)
class Collecting:
    """More answers are waited for."""

    seconds_left: float | None = None
    """Until time alone ends that; None where it doesn't."""


@dataclass(frozen=True)
class Ready:
    replies: Mapping[str, Prepared]
    """Of the members to be."""
    others: Mapping[str, Prepared]
    """Of those whom all of these reach, and who are not needed: what only they hold can be had from them."""
    departing: Mapping[str, Call | None]
    """The Prepares to those who were asked as well, and may go now unless they are members."""


@dataclass(frozen=True)
class InvalidClaim:
    """The claim can't lead to a round any more: another one must replace it."""

    reason: str


def tally(ctx: JobContext, made: Claim) -> Collecting | Ready | InvalidClaim:
    """What the answers to an open claim amount to."""
    calls, replies = ctx.replicas.asked, ctx.replicas.answers
    if _overtaken(calls, made):
        return InvalidClaim("an agent has seen a higher round, or another claim of this one")
    if _forgotten(ctx, replies):
        return InvalidClaim("an agent was restarted since it answered")
    seconds_left = _patience(ctx)
    going = {} if made.from_storage else {name: ctx.agent(name).prepare_of(made) for name in departing(ctx)}
    extra = {name: call.reply for name, call in going.items() if call and isinstance(call.reply, Prepared)}
    stay = {name: reply for name, reply in extra.items() if name not in ctx.replicas.notices}
    staying = {**replies, **stay}
    mutual = sizes.mutually_reachable(staying, ctx.round.members) if seconds_left is None else ()
    chosen = topology.chosen(ctx, [name for name in mutual if name in replies])
    if not chosen:
        if _hopeless(ctx, made):
            return InvalidClaim("all have answered or failed, and it is not enough")
        return Collecting(seconds_left)
    members = {name: replies[name] for name in chosen}
    others = {name: staying[name] for name in mutual if name not in members}
    included = include_departing(ctx, members, others, going)
    if included.wait is not None:
        return Collecting(included.wait)
    if not made.from_storage:
        answers = {**included.replies, **included.others}
        late = holders.seconds_for_late(ctx, made, answers)
        if late is not None:
            return Collecting(late)
        if made.round == ctx.world.round + 1 and holders.is_cut_off(ctx, answers, {**replies, **extra}):
            return InvalidClaim("what is newest is held by replicas that not all others have reached")
    return Ready(included.replies, included.others, going)


def proceed(ctx: JobContext) -> Decision | None:
    """A claim that isn't committed: ask, wait for answers, commit."""
    made = ctx.round.claim
    if made is None or made.committed:
        return None
    match tally(ctx, made):
        case Ready(replies, others, going):
            return commit(ctx, made, replies, others, going)
        case InvalidClaim():
            again = claim(ctx, RoundTrigger(made.reason, made.message), from_storage=made.from_storage)
            # Told already. Without enough candidates there is none: these are waited for then.
            return replace(again, events=()) if again else _collect(ctx, made, None)
        case Collecting(seconds_left):
            return _collect(ctx, made, seconds_left)


def _late(ctx: JobContext, made: Claim) -> bool:
    return made.at is None or ctx.elapsed(made.at) >= constants.FIND_AGAIN


def _collect(ctx: JobContext, made: Claim, seconds_left: float | None) -> Decision:
    names, replies = ctx.replicas.candidates, ctx.replicas.answers
    if not ctx.replicas.asked and not ctx.round.members and len(names) < sizes.most(ctx.spec) and not _late(ctx, made):
        # This operator has just come, and finds the claim of a first round before all of its candidates.
        return Decision(Phase.STARTING, made.reason, made.message, recheck=constants.RETRY)
    late = made.at is not None and ctx.elapsed(made.at) > 1.0 + constants.crowd(len(names))
    phase = Phase.RECOVERING if ctx.status.rounds else Phase.STARTING
    message = made.message
    if late:
        absent = [name for name in names if name not in replies]
        message += f"; round {made.round} waits for {first_of(absent, 5) or 'replicas that can reach each other'}"
        if len(names) < sizes.least(ctx.spec):
            phase, message = Phase.WAITING, f"{made.message}; {shortage(ctx)}"
    return Decision(
        phase,
        made.reason or "Claimed",
        message,
        actions=_prepares(ctx, made, names + departing(ctx), _asked_again(ctx)),
        recheck=min(constants.RETRY, seconds_left or constants.RETRY),
        watch_all=late,
    )


def _overtaken(calls: Mapping[str, Call], made: Claim) -> bool:
    """Whether an agent has seen a higher round, or another claim of this one."""
    refusals = [call.reply for call in calls.values() if isinstance(call.reply, protocol.Refused)]
    return any(
        refused.round > made.round or (refused.round == made.round and refused.claim != made.claim_id)
        for refused in refusals
    )


def _forgotten(ctx: JobContext, replies: Mapping[str, Prepared]) -> bool:
    """Whether an agent was restarted since it answered: the one that runs now has prepared nothing, and what the other
    was about to find out (of storage, say) is never heard."""
    views = {name: ctx.agent(name) for name in replies}
    heard = {name: view.report for name, view in views.items() if view.connected and view.report}
    return any(
        report.instance != replies[name].instance and report.round >= replies[name].round
        for name, report in heard.items()
    )


def _hopeless(ctx: JobContext, made: Claim) -> bool:
    """Everyone has answered or failed, and it is not enough: some failed, or can't reach each other. Tried again under
    a new claim, ever more slowly."""
    last = ctx.replicas.all_done_at
    if last is None:
        return False
    delay = min(30.0, constants.RETRY * 2 ** min(10, made.round - ctx.world.round))
    return ctx.now - last >= delay or (made.at is not None and ctx.elapsed(made.at) >= 2 * delay)


def _patience(ctx: JobContext) -> float | None:
    """Seconds to go on waiting for those who haven't answered; None: no longer."""
    names, calls, replies = ctx.replicas.candidates, ctx.replicas.asked, ctx.replicas.answers
    done = {name: call.done_at for name, call in calls.items() if call.done_at is not None}
    pending = [name for name in names if name not in done]
    if not pending:
        return None
    size = sizes.fitting(len(replies), ctx.spec)
    if not size:
        return constants.RETRY
    if size == sizes.most(ctx.spec) and ctx.round.members.keys().isdisjoint(pending):
        return None  # those are standby replicas
    planned = ctx.round.claim is not None and ctx.round.claim.reason in PLANNED
    patience = constants.PATIENCE_PLANNED if planned else constants.PATIENCE
    patience += min(constants.crowd(len(names)), constants.RELAYED)
    waited = [calls[name].waited_for(ctx.now) for name in pending if name in calls]
    seconds = patience - min([ctx.now - max(done[name] for name in replies), *waited])
    return seconds if seconds > 0 else None
