"""Who makes up a round: the largest set of those who answered that is mutually reachable and of a valid size."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from concertina.api.spec import JobSpec
from concertina.plan.facts import sizes
from concertina_protocol import Prepared


def choose(replies: Mapping[str, Prepared], members: Collection[str], spec: JobSpec) -> tuple[str, ...]:
    """Replicas of the round to come, old members first; empty where too few can reach each other.

    `replies` are in order of replica index. Where someone must go, joiners go before members, later before earlier."""
    mutual = connected(replies, members)
    return mutual[: sizes.fitting(len(mutual), spec)]


def connected(replies: Mapping[str, Prepared], members: Collection[str]) -> tuple[str, ...]:
    """The largest set of those who answered that is mutually reachable, old members first."""
    seniority = sorted(replies, key=lambda name: name not in members)
    return _mutually_reachable(seniority, replies)


def _mutually_reachable(seniority: list[str], replies: Mapping[str, Prepared]) -> tuple[str, ...]:
    """Drops whoever misses the most links until nobody misses one (the exact answer is NP-hard, and partitions are
    mostly clean cuts, for which this is exact); ties go against the junior."""
    together = list(seniority)
    reach = _reach(replies)
    missing = dict.fromkeys(together, 0)
    everybody = frozenset(together)
    absent = {key: everybody - found for key, found in {id(found): found for found in reach.values()}.items()}
    for name in together:
        for other in absent[id(reach[name])] - {name}:
            missing[name] += 1
            missing[other] += 1
    while together and (worst := max(reversed(together), key=missing.__getitem__)) and missing[worst]:
        together.remove(worst)
        for other in together:
            missing[other] -= (worst not in reach[other]) + (other not in reach[worst])
    return tuple(together)


def _reach(replies: Mapping[str, Prepared]) -> dict[str, frozenset[str]]:
    """Whom each can reach: mostly one and the same list, and comparing it costs less than hashing it."""
    reach: dict[str, frozenset[str]] = {}
    last: tuple[str, ...] = ()
    found: frozenset[str] = frozenset()
    for name, reply in replies.items():
        if reply.reachable != last:
            last, found = reply.reachable, frozenset(reply.reachable)
        reach[name] = found
    return reach
