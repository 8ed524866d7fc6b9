"""Members that answer late and may hold newer state than those who have answered.

The usual patience is short, so that one slow candidate does not hold up a recovery. On a busy machine it is over before
members answer that are well and hold the newest snapshot: the round would begin from an older state though nothing was
lost. They are waited for longer, on evidence alone (decision "A late member is waited for where state would be lost").
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from concertina.api.world import Claim
from concertina.plan.facts import constants
from concertina.plan.facts.context import JobContext
from concertina.plan.observed import Call
from concertina.plan.rounds import commits
from concertina.plan.state import restore
from concertina_protocol import Prepared, SnapshotId


def seconds_left(ctx: JobContext, made: Claim, answers: Mapping[str, Prepared]) -> float | None:
    """Return the seconds to wait for members whose state the round would lose. None where it would lose none.

    `answers`: of those whom the round can get state from."""
    left = {name: constants.PATIENCE_STATE - call.waited_for(ctx.now) for name, call in _pending(ctx, made).items()}
    reached = {name for reply in answers.values() for name in reply.reachable} if left else set()
    late = [name for name in left if left[name] > 0 and (name in reached or ctx.agent(name).connected)]
    if not late or not _may_hold_newer(ctx, late, answers):
        return None
    return max(left[name] for name in late)


def is_cut_off(ctx: JobContext, answers: Mapping[str, Prepared], known: Mapping[str, Prepared]) -> bool:
    """Return whether all that answered (`known`) together hold a newer state than those that the round can use."""
    if answers.keys() >= known.keys():
        return False
    age = _age(ctx, answers)
    whole = restore.complete(known, ctx.status)
    return age is not None and any((id.round, id.step) > age for id in whole)


def _pending(ctx: JobContext, made: Claim) -> dict[str, Call]:
    """The Prepares of this claim to members of the last round that are under way."""
    replicas = ctx.replicas
    calls = {name: ctx.agent(name).prepare_of(made) for name in ctx.round.members if name in replicas.pods}
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
        return True  # nobody who answered knows of what the last round has saved
    newer = {id: parts for id, parts in restore.held(answers, ctx.status).items() if (id.round, id.step) > age}
    return any(set(range(id.shards)) - set(map(int, parts)) <= _shards_of(ctx, late, id) for id, parts in newer.items())


def _age(ctx: JobContext, answers: Mapping[str, Prepared]) -> tuple[int, int] | None:
    """(round, step) of the state that these would begin from; None where that is not known yet."""
    origin = commits.source(ctx, answers)
    return None if isinstance(origin, restore.Unknown) else restore.age(origin, ctx.observed.job.uid)


def _shards_of(ctx: JobContext, late: Collection[str], id: SnapshotId) -> set[int]:
    """The shards of that snapshot that these members may hold: their own and those of the members before them. All
    where the snapshot is of an earlier round, whose members the status no longer lists."""
    members = ctx.world.members
    if (id.round, id.shards) != (ctx.world.round, ctx.world.workers):
        return set(range(id.shards))
    found: set[int] = set()
    first = 0
    for index, member in enumerate(members):
        following = members[(index + 1) % len(members)]
        if member.replica in late or following.replica in late:
            found.update(range(first, first + member.workers))
        first += member.workers
    return found
