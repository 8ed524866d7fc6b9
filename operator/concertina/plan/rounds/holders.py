"""Waits for members whose state the next round needs: members that answer late, and members that depart.

The usual time to wait for answers is short, so that one slow candidate does not delay a recovery. On a busy machine,
healthy members with the newest snapshot may answer later than this. The round would then start from an older state
although nothing was lost. The operator therefore waits longer for members that may have the newest state (decision
"Waiting for late members that hold newer state").

Each shard is in the memory of its own member and of the next member in the ring of members. If two such neighbours
depart together, both copies are lost. The two members therefore take part in one more round, until other members have
that round's snapshots. There is one exception: if the only member of the last round departs, it does not join the new
round, and the new members fetch the state from it (decision "Departing members that hold the only copy"). A departing
replica may exit once the new round has a snapshot of its own.

A round is a period in which a fixed set of replicas trains.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from concertina.api.world import Claim
from concertina.plan.actions import Action
from concertina.plan.facts import constants, sizes
from concertina.plan.facts.context import JobContext
from concertina.plan.observed import Call
from concertina.plan.rounds import commits
from concertina.plan.state import restore, topology
from concertina_protocol import Prepared, Restore, SnapshotId


def seconds_for_late(ctx: JobContext, claim: Claim, answers: Mapping[str, Prepared]) -> float | None:
    """Return the seconds for which to wait for members of the last round that have not answered their Prepare call.

    The operator waits for such members only if they may have a newer state, which a round without them would lose. The
    result is None if there is no need to wait. A Prepare call asks a replica to join the next round.

    Args:
        ctx: Context of this planning pass.
        claim: Claim (decision to begin a round) that is not committed yet.
        answers: Answers of the replicas from which the round can get state.
    """
    seconds_by_member = {
        name: constants.PATIENCE_STATE - call.waited_for(ctx.now) for name, call in _pending(ctx, claim).items()
    }
    reached = {name for reply in answers.values() for name in reply.reachable} if seconds_by_member else set()
    late = [
        name
        for name in seconds_by_member
        if seconds_by_member[name] > 0 and (name in reached or ctx.agent(name).connected)
    ]
    if not late or not _may_hold_newer(ctx, late, answers):
        return None
    return max(seconds_by_member[name] for name in late)


def is_cut_off(ctx: JobContext, answers: Mapping[str, Prepared], all_answers: Mapping[str, Prepared]) -> bool:
    """Return whether the round would lose a newer state, because replicas that it can't reach have parts of that state.

    Args:
        ctx: Context of this planning pass.
        answers: Answers of the replicas from which the round can get state.
        all_answers: Answers of all replicas.
    """
    if answers.keys() >= all_answers.keys():
        return False
    age = _age(ctx, answers)
    whole = restore.complete(all_answers, ctx.status)
    return age is not None and any((id.round, id.step) > age for id in whole)


def _pending(ctx: JobContext, claim: Claim) -> dict[str, Call]:
    """Return the unanswered Prepare calls to members of the last round, keyed by replica.

    The calls ask the members to join the round of `claim`.
    """
    replicas = ctx.replicas
    calls = {name: ctx.agent(name).prepare_of(claim) for name in ctx.round.members if name in replicas.pods}
    return {
        name: call
        for name, call in calls.items()
        if call and call.done_at is None and replicas.member_still(name) and replicas.can_answer(name)
    }


def _may_hold_newer(ctx: JobContext, late: Collection[str], answers: Mapping[str, Prepared]) -> bool:
    age = _age(ctx, answers)
    if age is None:
        return False
    if ctx.keeps_state and ctx.round.members.keys().isdisjoint(answers):
        return True  # none of the replicas that answered knows what the last round has saved
    newer = {id: parts for id, parts in restore.held(answers, ctx.status).items() if (id.round, id.step) > age}
    return any(set(range(id.shards)) - set(map(int, parts)) <= _shards_of(ctx, late, id) for id, parts in newer.items())


def _age(ctx: JobContext, answers: Mapping[str, Prepared]) -> tuple[int, int] | None:
    """Return the round and step of the state from which a round of the replicas in `answers` would start.

    The result is None if that state is not known yet. A higher value means a newer state.
    """
    origin = commits.source(ctx, answers)
    return None if isinstance(origin, restore.Unknown) else restore.age(origin, ctx.observed.job.uid)


def _shards_of(ctx: JobContext, late: Collection[str], id: SnapshotId) -> set[int]:
    """Return the shards of a snapshot that the members in `late` may have.

    Each member has its own shards and a copy of the previous member's shards. If the snapshot is of an earlier round,
    the status no longer lists that round's members, and the result is all shards.
    """
    members = ctx.world.members
    if (id.round, id.shards) != (ctx.world.round, ctx.world.workers):
        return set(range(id.shards))
    shards: set[int] = set()
    first = 0
    for index, member in enumerate(members):
        following = members[(index + 1) % len(members)]
        if member.replica in late or following.replica in late:
            shards.update(range(first, first + member.workers))
        first += member.workers
    return shards


# --- departing members


@dataclass(frozen=True)
class Included:
    """Result of `include_departing`: the answers of a round's members, which may include departing members.

    A round is a period in which a fixed set of replicas trains.
    """

    replies: Mapping[str, Prepared]
    """Answers of the members of the round."""
    others: Mapping[str, Prepared]
    """Answers of the other replicas that can provide state to the members."""
    wait: float | None = None
    """Seconds to wait for an answer that may bring newer state; None to commit now."""


def include_departing(
    ctx: JobContext,
    stay: Mapping[str, Prepared],
    other_replies: Mapping[str, Prepared],
    departing: Mapping[str, Call | None],
) -> Included:
    """Return the members of the round, with departing members if they hold newer state than the others.

    Args:
        ctx: Context of this planning pass.
        stay: Answers of the members chosen so far.
        other_replies: Answers of replicas that the round does not need.
        departing: Prepare calls to members that will be terminated soon.
    """
    remaining = {**stay, **other_replies}
    restored_step = _restored_step(ctx, remaining)
    if not departing or restored_step >= ctx.round.step:
        return Included(stay, other_replies)
    answers = {name: call.reply for name, call in departing.items() if call and isinstance(call.reply, Prepared)}
    source = commits.source(ctx, {**answers, **remaining})
    if isinstance(source, Restore) and source.step > restored_step:
        joined = {**commits.holders(source, answers, remaining), **stay}
        mutual = sizes.mutually_reachable(joined, ctx.round.members)
        chosen = {name: joined[name] for name in topology.chosen(ctx, mutual)}
        if chosen.keys().isdisjoint(stay) and stay.keys() <= set(mutual):
            # The departing member would be the only member. It stays outside, and its successors fetch the state from
            # it.
            chosen, remaining = dict(stay), {name: joined[name] for name in mutual} | remaining
        outside = {name: reply for name, reply in remaining.items() if name not in chosen}
        if _restored_step(ctx, {**chosen, **outside}) > restored_step:
            return Included(chosen, outside)
    seconds = _seconds_for_departing(ctx, departing)
    return Included(stay, other_replies, seconds if seconds > 0 else None)


def _restored_step(ctx: JobContext, replies: Mapping[str, Prepared]) -> int:
    """Return the step of the state from which a round of the replicas in `replies` would start; -1 if unknown."""
    source = commits.source(ctx, replies)
    return source.step if isinstance(source, Restore) else -1


def _seconds_for_departing(ctx: JobContext, departing: Mapping[str, Call | None]) -> float:
    """Return the seconds for which to wait for answers of members that are about to leave.

    The time counts from the first Prepare call that asked such a member to join the next round.
    """
    waiting = [call.waited_for(ctx.now) for call in departing.values() if call and call.done_at is None]
    return constants.PATIENCE_PLANNED - max(waiting) if waiting else 0.0


# --- replicas that have handed over their state


def release(ctx: JobContext) -> tuple[Action, ...]:
    """Return the Release calls, which allow departing replicas outside of the round to exit.

    A departing replica may provide state that no member has. If the round fails before its first own snapshot, the next
    round needs this replica again. The operator therefore sends the calls only after that snapshot.

    This operator does not know which departing replicas a previous operator asked for state, so it calls all of them. A
    replica that was not asked refuses the call.
    """
    report, claim = ctx.round.report, ctx.round.claim
    if report is None or claim is None or report.progress is None or report.progress.snapshot_step is None:
        return ()
    leaving = (name for name in ctx.replicas.notices if name not in ctx.round.members)
    due = (name for name in leaving if ctx.replicas.can_answer(name) and ctx.is_due(ctx.agent(name).release_of(claim)))
    return commits.release(ctx, claim, due)
