"""Replicas that can make up a round: how many (a valid size is a whole number of blocks between the least and the most
that the spec wants), and which of them (the largest set that is mutually reachable)."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from concertina.api.spec import JobSpec
from concertina_protocol import Prepared
from concertina_trainer.layouts import nearest_sizes


def most(spec: JobSpec) -> int:
    """The largest valid size that the spec wants; 0 where no block fits."""
    return spec.replicas - spec.replicas % spec.replica_step


def least(spec: JobSpec) -> int:
    """The smallest valid size that the spec allows: minReplicas rounded up, but never more than the most."""
    floor = min(spec.min_replicas, most(spec))
    return min(most(spec), -(-floor // spec.replica_step) * spec.replica_step)


def fitting(available: int, spec: JobSpec) -> int:
    """The largest valid size of at most `available` replicas; 0 where that is below the least."""
    size = min(available, most(spec))
    size -= size % spec.replica_step
    return size if size and size >= least(spec) else 0


def rounding(spec: JobSpec) -> str:
    """Why the most is not spec.replicas, in a sentence with the nearest valid sizes; empty where it is."""
    if most(spec) == spec.replicas:
        return ""
    near = " and ".join(map(str, nearest_sizes(spec.replicas, spec.replica_step)))
    return (
        f"spec.replicas is {spec.replicas}, but only multiples of {spec.replica_step} replicas make whole blocks "
        f"(parallelism needs {spec.parallelism.block} ranks together, {spec.workers} in a replica); next to it: {near}"
    )


# --- which of them


def mutually_reachable(replies: Mapping[str, Prepared], members: Collection[str]) -> tuple[str, ...]:
    """The largest set of those who answered that is mutually reachable, old members first. `replies` are in order of
    replica index."""
    seniority = sorted(replies, key=lambda name: name not in members)
    return _without_cut_links(seniority, replies)


def _without_cut_links(seniority: list[str], replies: Mapping[str, Prepared]) -> tuple[str, ...]:
    """Of the largest island, drops whoever misses the most links until nobody misses one (the exact answer is NP-hard,
    and partitions are mostly clean cuts, of which each side is an island); ties go against the junior."""
    cut: dict[str, list[str]] = {name: [] for name in seniority}
    for name, others in _unreachable(replies).items():
        for other in others - {name}:
            cut[name].append(other)
            cut[other].append(name)
    together = _largest_island(seniority, replies, cut)
    here = frozenset(together)
    missing = {name: sum(other in here for other in cut[name]) for name in here}
    while together and (worst := max(reversed(together), key=missing.__getitem__)) and missing[worst]:
        together.remove(worst)
        for other in here.intersection(cut[worst]):
            missing[other] -= cut[worst].count(other)
    return tuple(together)


def _largest_island(
    seniority: list[str], replies: Mapping[str, Prepared], cut: Mapping[str, Collection[str]]
) -> list[str]:
    """The most of those who reach each other by way of others; of two as large, that of the senior. In a large world,
    where each was asked for some, two sides of a cut may not know of each pair that it parts."""
    links: dict[str, set[str]] = {name: set() for name in seniority}
    for name, reply in replies.items():
        for other in links.keys() & set(reply.reachable) - set(cut[name]):
            links[name].add(other)
            links[other].add(name)
    largest: set[str] = set()
    seen: set[str] = set()
    for name in seniority:
        if name in seen:
            continue
        island, fringe = {name}, [name]
        while fringe:
            news = links[fringe.pop()] - island
            island |= news
            fringe += news
        seen |= island
        largest = max(largest, island, key=len)
    return [name for name in seniority if name in largest]


def _unreachable(replies: Mapping[str, Prepared]) -> dict[str, frozenset[str]]:
    """Whom of the others each can't reach. Those whom each can are mostly one and the same list, and comparing it costs
    less than hashing it."""
    everybody, unreachable = frozenset(replies), {}
    last: tuple[str, ...] = ()
    absent = everybody
    for name, reply in replies.items():
        if reply.unreachable is not None:
            unreachable[name] = everybody.intersection(reply.unreachable)
            continue
        if reply.reachable != last:
            last, absent = reply.reachable, everybody - frozenset(reply.reachable)
        unreachable[name] = absent
    return unreachable
