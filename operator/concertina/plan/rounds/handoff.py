"""What only leaving replicas hold goes on: they take part in one more round, whose snapshots the others then hold; or
where they would be alone in it, those who take their places fetch it from them.

Without it the state of neighbours that leave together would go with them: a shard is in the memory of its member and of
the next one (decision "Who leaves stays for what only they hold").
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from concertina.plan.facts import constants, sizes
from concertina.plan.facts.context import JobContext
from concertina.plan.observed import Call
from concertina.plan.rounds import commits
from concertina.plan.state import topology
from concertina_protocol import Prepared, Restore


@dataclass(frozen=True)
class Included:
    replies: Mapping[str, Prepared]
    """Of the members to be."""
    others: Mapping[str, Prepared]
    """Of those who stay, and are no members."""
    wait: float | None = None
    """Seconds to wait first for an answer that may bring newer state."""


def include_departing(
    ctx: JobContext,
    stay: Mapping[str, Prepared],
    others: Mapping[str, Prepared],
    departing: Mapping[str, Call | None],
) -> Included:
    """`stay`: who makes up the round; `others`: who is not needed for it; `departing`: the Prepares to members with an
    urgent notice."""
    here = {**stay, **others}
    have = _step(ctx, here)
    if not departing or have >= ctx.round.step:
        return Included(stay, others)
    answers = {name: call.reply for name, call in departing.items() if call and isinstance(call.reply, Prepared)}
    source = commits.source(ctx, {**answers, **here})
    if isinstance(source, Restore) and source.step > have:
        joined = {**commits.holders(source, answers, here), **stay}
        mutual = sizes.mutually_reachable(joined, ctx.round.members)
        chosen = {name: joined[name] for name in topology.chosen(ctx, mutual)}
        if chosen.keys().isdisjoint(stay) and stay.keys() <= set(mutual):
            # Nobody would be there to hand over to (a world of one): who leaves gives what it holds from outside.
            chosen, here = dict(stay), {name: joined[name] for name in mutual} | here
        rest = {name: reply for name, reply in here.items() if name not in chosen}
        if _step(ctx, {**chosen, **rest}) > have:
            return Included(chosen, rest)
    left = _seconds_left(ctx, departing)
    return Included(stay, others, left if left > 0 else None)


def _step(ctx: JobContext, replies: Mapping[str, Prepared]) -> int:
    source = commits.source(ctx, replies)
    return source.step if isinstance(source, Restore) else -1


def _seconds_left(ctx: JobContext, departing: Mapping[str, Call | None]) -> float:
    """Their patience: as long as that of any candidate, from when the first one was asked."""
    waiting = [call.waited_for(ctx.now) for call in departing.values() if call and call.done_at is None]
    return constants.PATIENCE_PLANNED - max(waiting) if waiting else 0.0
