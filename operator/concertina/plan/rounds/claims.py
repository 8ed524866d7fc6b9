"""Claims: the operator begins a new round, chooses the replicas to call, and waits for their answers.

A round is a period in which a fixed set of replicas trains. A claim is the operator's decision to begin a round. It is
open until the operator commits it, which fixes the members of the round.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import concertina_protocol as protocol
from concertina.amounts import first_of
from concertina.api.restarts import Restart
from concertina.api.spec import Launcher
from concertina.api.status import rfc3339
from concertina.api.world import Claim, World
from concertina.plan.actions import Action, Event, Send
from concertina.plan.facts import constants, sizes
from concertina.plan.facts.context import JobContext
from concertina.plan.facts.decision import PLANNED, Decision, Failure, Phase, Reason, RoundTrigger, as_before
from concertina.plan.observed import Call
from concertina.plan.pods.pod_backoff import shortage
from concertina.plan.rounds import holders
from concertina.plan.rounds.commits import commit
from concertina.plan.rounds.holders import include_departing
from concertina.plan.state import topology
from concertina_protocol import Prepared

LEAP = 1000
"""Largest difference between the number of a new round and the number of the round in the status.

Agents may have seen higher rounds than the status shows, for example after etcd was restored from a backup. If an agent
reports a round beyond this limit, the operator makes several claims until the number is high enough. Without the limit,
one false report could lead to a round number that exceeds the limits of `agents.bounds`, so that no agent could report
the round.
"""


def departing(ctx: JobContext) -> tuple[str, ...]:
    """Return the departing members that must take part in the next round.

    A member departs if it has a termination notice, or is beyond `spec.replicas`. The members form a ring, in which
    each member's snapshots are copied to the next member. A departing member must take part if it may hold the only
    copy of some state. This is so if a neighbour in the ring departs too, or if the member has no neighbour.
    """
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
    """Begin a new round: make a claim, and ask the candidates to join by Prepare calls.

    The result is None if there are too few candidates for a round. The claim records the decision to begin the round.

    Args:
        ctx: Context of this planning pass.
        trigger: Reason for the new round.
        restart: Entry in `status.restarts` of the failure that the round answers, if any.
        from_storage: Whether the round starts from durable storage even if node memory holds newer state.
    """
    names = ctx.replicas.candidates
    if not sizes.fitting(len(names), ctx.spec):
        return None
    new_claim = Claim(
        round=1 + highest_round(ctx),
        claim_id=ctx.observed.fresh_claim,
        at=rfc3339(ctx.now),
        reason=trigger.reason,
        message=trigger.sentence,
        from_storage=from_storage,
    )
    phase = Phase.RECOVERING if ctx.status.rounds else Phase.STARTING
    failed = isinstance(trigger, Failure)
    is_event = ctx.status.rounds or failed  # the job's conditions report the first round
    event = Event("Warning" if failed else "Normal", trigger.reason, trigger.sentence)
    return Decision(
        phase,
        trigger.reason,
        trigger.sentence,
        world=ctx.world.model_copy(update={"claim": new_claim}),
        restart=restart,
        actions=_prepares(ctx, new_claim, names + departing(ctx)),
        events=(event,) if is_event else (),
        recheck=constants.RETRY,
    )


def first_claim(ctx: JobContext) -> Decision | None:
    """Begin the first round with the id from the job's first status: ask the candidates to join by Prepare calls.

    The result is None if that status has no such id. It is also None if an agent has already seen a round: the job's
    status has probably been lost, and the next round needs a higher number.
    """
    claim = ctx.round.first_claim
    if claim is None or highest_round(ctx):
        return None
    decision = _while_asking(ctx, Decision(Phase.STARTING, Reason.FIRST_ROUND, claim.message))
    return replace(decision, actions=_prepares(ctx, claim, ctx.replicas.candidates), recheck=constants.RETRY)


def _while_asking(ctx: JobContext, decision: Decision) -> Decision:
    """Return the decision about the first round. If the job's phase is Waiting, leave out the status write.

    The first round usually forms quickly, so a status write for this phase is not worth its cost.
    """
    return as_before(ctx.status) if ctx.status.phase == Phase.WAITING.value else decision


def next_first_claim(ctx: JobContext, decision: Decision) -> str:
    """Return the id with which the operator will begin the job's first round; empty after it has begun a round.

    The id is a part of the job's first status. The operator can then begin the round without another status write.
    """
    world = decision.world or ctx.world
    if world.round or world.claim is not None or ctx.spec.launcher is Launcher.TORCHRUN:
        return ""
    return ctx.status.internal.first_claim or ctx.observed.fresh_claim


def last_claim(ctx: JobContext, reason: str) -> Claim:
    """Return a claim that marks the end of the job or of its current round. No round follows it.

    Other claims are decisions to begin a round. If another operator does not know this claim, its status writes fail
    (decision "Status writes test whether the claim is committed").
    """
    round, claim_id = 1 + highest_round(ctx), ctx.observed.fresh_claim
    return Claim(round=round, claim_id=claim_id, committed=True, at=rfc3339(ctx.now), reason=reason)


def world_after(ctx: JobContext, decision: Decision) -> World:
    """Return the new value of `status.world`, which lists the current round and its members.

    If the job ends in this planning pass, the value also gets the claim that marks the end (`last_claim`).
    """
    world = decision.world or ctx.world
    if decision.phase.final and not ctx.status.completion_time:
        return world.model_copy(update={"claim": last_claim(ctx, decision.reason)})
    return world


def disbanded(ctx: JobContext, reason: str) -> World:
    """Return `status.world` without members, so that the job has no current round.

    The value stays unchanged if the job has no round.
    """
    world = ctx.world
    if ctx.round.disbanded:
        return world
    return World(round=world.round, claim=last_claim(ctx, reason), base=world.base, since=world.since)


def highest_round(ctx: JobContext) -> int:
    """Return the highest round number in the status and in the messages of the job's agents.

    The result exceeds the number in the status by at most LEAP, because an agent may report any number.
    """
    own_round = max(ctx.world.round, ctx.round.claim.round if ctx.round.claim else 0)
    rounds = [own_round]
    for view in ctx.observed.agents.values():
        rounds += [view.report.round] if view.report else []
        rounds += [call.reply.round for call in (view.prepare, view.assign) if call and call.reply]
    return min(max(rounds), own_round + LEAP)


def _prepares(
    ctx: JobContext, open_claim: Claim, names: tuple[str, ...], asked_again: frozenset[str] = frozenset()
) -> tuple[Action, ...]:
    """Return the Prepare calls that are due: not sent yet, failed a while ago, or to a replica in `asked_again`.

    The message Prepare asks a replica to join the next round.
    """
    message = protocol.Prepare(
        ctx.observed.job.uid,
        open_claim.round,
        open_claim.claim_id,
        tuple(protocol.Candidate(name, ctx.replicas.address(name)) for name in names),
    )
    due = (name for name in names if name in asked_again or ctx.is_due(ctx.agent(name).prepare_of(open_claim)))
    return tuple(Send(name, ctx.replicas.address(name), message) for name in due)


def _asked_again(ctx: JobContext) -> frozenset[str]:
    """Return the replicas whose Prepare call must be repeated, because other candidates were added after the call.

    The result is empty if enough replicas can already reach each other, and while an answer is outstanding. Otherwise,
    each new candidate would make all replicas of a large round check all others again.
    """
    last = ctx.replicas.all_done_at
    if last is None or ctx.now - last < constants.RETRY or sizes.fitting(len(ctx.replicas.connected), ctx.spec):
        return frozenset()
    return ctx.replicas.uninformed


# --- an open claim


@dataclass(frozen=True)
class Collecting:
    """Result of `tally` while the operator must wait for more answers of replicas."""

    seconds_left: float | None = None
    """Seconds until the wait ends even without an answer; None if only an answer ends it."""


@dataclass(frozen=True)
class Ready:
    replies: Mapping[str, Prepared]
    """Answers of the replicas that become members of the next round."""
    others: Mapping[str, Prepared]
    """Answers of replicas that can provide state that no member has.

    These replicas are not needed as members, but all members can reach them.
    """
    departing: Mapping[str, Call | None]
    """Prepare calls to departing members, by replica.

    Departing members that do not become members of this round may exit.
    """


@dataclass(frozen=True)
class InvalidClaim:
    """Result of `tally` if the replicas' answers can no longer lead to a round.

    The operator must then make a new claim (decision to begin a round). A round is a period in which a fixed set of
    replicas trains.
    """

    reason: str


def tally(ctx: JobContext, open_claim: Claim) -> Collecting | Ready | InvalidClaim:
    """Evaluate the answers of the replicas that were asked to join the round of an open claim.

    The result says whether the operator can commit the claim, must wait for more answers, or must make a new claim.
    """
    calls, replies = ctx.replicas.asked, ctx.replicas.answers
    if _overtaken(calls, open_claim):
        return InvalidClaim("an agent has seen a higher round, or another claim of this round")
    if _forgotten(ctx, replies):
        return InvalidClaim("an agent was restarted after its answer")
    seconds_left = _patience(ctx)
    prepare_by_departing = (
        {} if open_claim.from_storage else {name: ctx.agent(name).prepare_of(open_claim) for name in departing(ctx)}
    )
    extra = {
        name: call.reply for name, call in prepare_by_departing.items() if call and isinstance(call.reply, Prepared)
    }
    stay = {name: reply for name, reply in extra.items() if name not in ctx.replicas.notices}
    staying = {**replies, **stay}
    mutual = sizes.mutually_reachable(staying, ctx.round.members) if seconds_left is None else ()
    names = [name for name in mutual if name in replies]
    chosen = topology.chosen(ctx, _able_to_start(ctx, names)) or topology.chosen(ctx, names)
    if not chosen:
        if _hopeless(ctx, open_claim):
            return InvalidClaim("all agents have answered or failed, and the members are too few")
        return Collecting(seconds_left)
    members = {name: replies[name] for name in chosen}
    other_replies = {name: staying[name] for name in mutual if name not in members}
    included = include_departing(ctx, members, other_replies, prepare_by_departing)
    if included.wait is not None:
        return Collecting(included.wait)
    if not open_claim.from_storage:
        answers = {**included.replies, **included.others}
        late = holders.seconds_for_late(ctx, open_claim, answers)
        if late is not None:
            return Collecting(late)
        if open_claim.round == ctx.world.round + 1 and holders.is_cut_off(ctx, answers, {**replies, **extra}):
            return InvalidClaim("the newest state is on replicas that not all other replicas can reach")
    return Ready(included.replies, included.others, prepare_by_departing)


def _able_to_start(ctx: JobContext, names: Sequence[str]) -> list[str]:
    """Return the names, without members whose agents were restarted and are still importing PyTorch.

    The members' answers to the Prepare call (which asks them to join the next round) show this. `Replicas.coming_back`
    is not enough: an operator that has just started has no stream to a member, and did not observe the restart of the
    member's container. If no other member remains, all names are returned, so that the round waits for all of them.
    """
    members, answers = ctx.round.members, ctx.replicas.answers

    def imports(name: str) -> bool:
        return name in members and not answers[name].ready and not members[name].is_agent(answers[name].instance)

    able = [name for name in names if not imports(name)]
    return list(names) if members.keys().isdisjoint(able) else able


def proceed(ctx: JobContext) -> Decision | None:
    """Continue to form a round whose members are not chosen yet: send calls, wait for answers, or commit the round."""
    open_claim = ctx.round.claim
    if open_claim is None or open_claim.committed:
        return None
    match tally(ctx, open_claim):
        case Ready(replies, others, departing_calls):
            return commit(ctx, open_claim, replies, others, departing_calls)
        case InvalidClaim():
            new_claim = claim(
                ctx, RoundTrigger(open_claim.reason, open_claim.message), from_storage=open_claim.from_storage
            )
            # The event was already sent. Without enough candidates there is no new claim, and the operator waits for
            # them.
            return replace(new_claim, events=()) if new_claim else _collect(ctx, open_claim, None)
        case Collecting(seconds_left):
            return _collect(ctx, open_claim, seconds_left)


def _late(ctx: JobContext, open_claim: Claim) -> bool:
    return open_claim.at is None or ctx.elapsed(open_claim.at) >= constants.FIND_AGAIN


def _collect(ctx: JobContext, open_claim: Claim, seconds_left: float | None) -> Decision:
    names, replies = ctx.replicas.candidates, ctx.replicas.answers
    if (
        not ctx.replicas.asked
        and not ctx.round.members
        and len(names) < sizes.most(ctx.spec)
        and not _late(ctx, open_claim)
    ):
        # This operator has just started, and has found the claim of a first round before all of its candidates.
        return Decision(Phase.STARTING, open_claim.reason, open_claim.message, recheck=constants.RETRY)
    late = open_claim.at is not None and ctx.elapsed(open_claim.at) > 1.0 + constants.crowd(len(names))
    phase = Phase.RECOVERING if ctx.status.rounds else Phase.STARTING
    message = open_claim.message
    if late:
        absent = [name for name in names if name not in replies]
        message += f"; round {open_claim.round} waits for {first_of(absent, 5) or 'replicas that can reach each other'}"
        if len(names) < sizes.least(ctx.spec):
            phase, message = Phase.WAITING, f"{open_claim.message}; {shortage(ctx)}"
    decision = Decision(phase, open_claim.reason or "Claimed", message)
    if ctx.world.claim is None and not late:
        decision = _while_asking(ctx, decision)
    return replace(
        decision,
        actions=_prepares(ctx, open_claim, names + departing(ctx), _asked_again(ctx)),
        recheck=min(constants.RETRY, seconds_left or constants.RETRY),
        watch_all=late,
    )


def _overtaken(calls: Mapping[str, Call], open_claim: Claim) -> bool:
    """Return whether an agent refused its Prepare call because it has seen a different claim of this or a higher round.

    A claim is an operator's decision to begin a round. The different claim may be that of another operator. A Prepare
    call asks a replica to join the next round.
    """
    refusals = [call.reply for call in calls.values() if isinstance(call.reply, protocol.Refused)]
    return any(
        refused.round > open_claim.round or (refused.round == open_claim.round and refused.claim != open_claim.claim_id)
        for refused in refusals
    )


def _forgotten(ctx: JobContext, replies: Mapping[str, Prepared]) -> bool:
    """Return whether an agent was restarted after it answered its Prepare call, which asks it to join the next round.

    The new agent process has not prepared for the round, and has lost the state of the old process. For example, the
    old process may still have been reading from storage.
    """
    views = {name: ctx.agent(name) for name in replies}
    reports = {name: view.report for name, view in views.items() if view.connected and view.report}
    return any(
        report.instance != replies[name].instance and report.round >= replies[name].round
        for name, report in reports.items()
    )


def _hopeless(ctx: JobContext, open_claim: Claim) -> bool:
    """Return whether the operator must make a new claim, because all answers have arrived and are too few for a round.

    The operator waits before it makes the new claim. The delay increases with each try.
    """
    last = ctx.replicas.all_done_at
    if last is None:
        return False
    delay = min(30.0, constants.RETRY * 2 ** min(10, open_claim.round - ctx.world.round))
    return ctx.now - last >= delay or (open_claim.at is not None and ctx.elapsed(open_claim.at) >= 2 * delay)


def _patience(ctx: JobContext) -> float | None:
    """Return the seconds to wait for candidates that have not answered yet; None to stop waiting.

    The operator has asked these candidates by a Prepare call to join the round.
    """
    names, calls, replies = ctx.replicas.candidates, ctx.replicas.asked, ctx.replicas.answers
    done = {name: call.done_at for name, call in calls.items() if call.done_at is not None}
    pending = [name for name in names if name not in done]
    if not pending:
        return None
    size = sizes.fitting(len(replies), ctx.spec)
    if not size:
        return constants.RETRY
    if size == sizes.most(ctx.spec) and ctx.round.members.keys().isdisjoint(pending):
        return None  # the pending candidates are standby replicas
    planned = ctx.round.claim is not None and ctx.round.claim.reason in PLANNED
    patience = constants.PATIENCE_PLANNED if planned else constants.PATIENCE
    patience += min(constants.crowd(len(names)), constants.RELAYED)
    waited = [calls[name].waited_for(ctx.now) for name in pending if name in calls]
    seconds = patience - min([ctx.now - max(done[name] for name in replies), *waited])
    return seconds if seconds > 0 else None
