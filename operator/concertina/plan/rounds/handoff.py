"""What only leaving replicas hold goes on: they take part in one more round, whose snapshots the others then hold.

Without it the state of neighbours that leave together would go with them: a shard is in the memory of its member and of
the next one (decision "Who leaves stays for what only they hold").
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from concertina.plan.facts import constants, quorum
from concertina.plan.facts.context import JobContext
from concertina.plan.observed import Call
from concertina.plan.rounds import commits
from concertina_protocol import Prepared, Restore


@dataclass(frozen=True)
class Included:
    replies: Mapping[str, Prepared]
    """Of the members to be."""
    wait: float | None = None
    """Seconds to wait first for an answer that may bring newer state."""


def include_departing(ctx: JobContext, stay: Mapping[str, Prepared], departing: Mapping[str, Call | None]) -> Included:
    """`stay`: who makes up the round; `departing`: the Prepares to members with an urgent notice."""
    have = _step(ctx, stay)
    if not departing or have >= ctx.round.step:
        return Included(stay)
    answers = {name: call.reply for name, call in departing.items() if call and isinstance(call.reply, Prepared)}
    source = commits.source(ctx, {**answers, **stay})
    if isinstance(source, Restore) and source.step > have:
        needed = _holders(source, answers, stay)
        joined = {**needed, **stay}
        chosen = {name: joined[name] for name in quorum.choose(joined, ctx.round.members, ctx.spec)}
        if _step(ctx, chosen) > have:
            return Included(chosen)
    left = _seconds_left(ctx, departing)
    return Included(stay, left if left > 0 else None)


def _step(ctx: JobContext, replies: Mapping[str, Prepared]) -> int:
    source = commits.source(ctx, replies)
    return source.step if isinstance(source, Restore) else -1


def _holders(source: Restore, answers: Mapping[str, Prepared], stay: Mapping[str, Prepared]) -> dict[str, Prepared]:
    """As few of those who leave as hold together what the others lack."""
    needed: dict[str, Prepared] = {}
    for names in source.holders.values():
        if not any(name in stay or name in needed for name in names):
            needed[names[0]] = answers[names[0]]
    return needed


def _seconds_left(ctx: JobContext, departing: Mapping[str, Call | None]) -> float:
    """Their patience: as long as that of any candidate, from when the first one was asked."""
    waiting = [call.waited_for(ctx.now) for call in departing.values() if call and call.done_at is None]
    return constants.PATIENCE_PLANNED - max(waiting) if waiting else 0.0
