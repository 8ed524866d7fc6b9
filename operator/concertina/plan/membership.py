"""Who makes up a round: the largest set of those who answered that is mutually reachable and of a valid size."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from concertina.api.spec import JobSpec
from concertina.plan import sizes
from concertina_agent.protocol import Prepared


def choose(replies: Mapping[str, Prepared], members: Collection[str], spec: JobSpec) -> tuple[str, ...]:
    """Replicas of the round to come, old members first; empty where too few can reach each other.

    `replies` are in order of replica index. Where someone must go, joiners go before members, later before earlier."""
    seniority = sorted(replies, key=lambda name: name not in members)
    mutual = _mutually_reachable(seniority, replies)
    return mutual[: sizes.fitting(len(mutual), spec)]


def _mutually_reachable(seniority: list[str], replies: Mapping[str, Prepared]) -> tuple[str, ...]:
    """Drops whoever misses the most links until nobody misses one (the exact answer is NP-hard, and partitions are
    mostly clean cuts, for which this is exact); ties go against the junior."""
    together = list(seniority)
    sets = {reply.reachable: frozenset(reply.reachable) for reply in replies.values()}  # mostly one and the same
    reach = {name: sets[replies[name].reachable] for name in together}
    missing = dict.fromkeys(together, 0)
    everybody = frozenset(together)
    absent = {reachable: everybody - found for reachable, found in sets.items()}
    for name in together:
        for other in absent[replies[name].reachable] - {name}:
            missing[name] += 1
            missing[other] += 1
    while together and (worst := max(reversed(together), key=missing.__getitem__)) and missing[worst]:
        together.remove(worst)
        for other in together:
            missing[other] -= (worst not in reach[other]) + (other not in reach[worst])
    return tuple(together)
