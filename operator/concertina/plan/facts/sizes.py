"""Choice of the replicas of a round: the valid sizes, and the largest set of replicas that reach each other.

A valid size is a whole number of blocks between the minimum and the maximum that the spec requests. A block is the
smallest number of replicas that the parallel layout needs.

A round is a period in which a fixed set of replicas trains.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from concertina.api.spec import JobSpec
from concertina_protocol import Prepared
from concertina_trainer.layouts import nearest_sizes


def most(spec: JobSpec) -> int:
    """Return the largest valid number of replicas that is at most `spec.replicas`; 0 if no block fits."""
    return spec.most_replicas


def least(spec: JobSpec) -> int:
    """Return the smallest valid number of replicas: `minReplicas`, rounded up to whole blocks.

    The result is at most `most(spec)`.
    """
    return spec.least_replicas


def fitting(available: int, spec: JobSpec) -> int:
    """Return the largest valid number of replicas that is at most `available`; 0 if there is no such number."""
    size = min(available, most(spec))
    size -= size % spec.replica_step
    return size if size and size >= least(spec) else 0


def rounding(spec: JobSpec) -> str:
    """Return a sentence that says why `spec.replicas` is not a valid size, with the nearest valid sizes.

    The result is empty if `spec.replicas` is valid.
    """
    if most(spec) == spec.replicas:
        return ""
    near_sizes = " and ".join(map(str, nearest_sizes(spec.replicas, spec.replica_step)))
    return (
        f"spec.replicas is {spec.replicas}, but it must be a multiple of {spec.replica_step} (a block of "
        f"spec.parallelism has {spec.parallelism.block} ranks, and a replica has {spec.workers}); the nearest "
        f"are: {near_sizes}"
    )


# --- the largest set that is mutually reachable


def mutually_reachable(replies: Mapping[str, Prepared], members: Collection[str]) -> tuple[str, ...]:
    """Return the largest set of replicas in which each can reach all others. Members of the last round come first.

    Args:
        replies: Answers of the replicas to the Prepare call, in order of replica index.
        members: Members of the last round.
    """
    seniority = sorted(replies, key=lambda name: name not in members)
    return _without_cut_links(seniority, replies, frozenset(members))


def _without_cut_links(
    seniority: list[str], replies: Mapping[str, Prepared], members: frozenset[str]
) -> tuple[str, ...]:
    """Return a large set of replicas in which each can reach all others.

    The function begins with the largest island (replicas that reach each other directly or through others). It
    repeatedly drops the replica that can't reach the most others; of several such replicas, the last one. This is an
    approximation, because the exact problem is NP-hard. Most network partitions are clean cuts, in which each side is
    an island.
    """
    cut: dict[str, list[str]] = {name: [] for name in seniority}
    for name, unreachable_names in _unreachable(replies).items():
        for peer in unreachable_names - {name}:
            cut[name].append(peer)
            cut[peer].append(name)
    together = _largest_island(seniority, replies, cut, members)
    island = frozenset(together)
    missing = {name: sum(peer in island for peer in cut[name]) for name in island}
    while together and (worst := max(reversed(together), key=missing.__getitem__)) and missing[worst]:
        together.remove(worst)
        for peer in island.intersection(cut[worst]):
            missing[peer] -= cut[worst].count(peer)
    return tuple(together)


def _largest_island(
    seniority: list[str],
    replies: Mapping[str, Prepared],
    cut: Mapping[str, Collection[str]],
    members: frozenset[str],
) -> list[str]:
    """Return the largest set of replicas that reach each other, directly or through others.

    Of two sets of the same size, the function returns the one with more members of the last round, because these
    members hold the state. If the sets have equally many such members, it returns the set with the earliest replica.
    """
    links: dict[str, set[str]] = {name: set() for name in seniority}
    for name, reply in replies.items():
        for peer in links.keys() & set(reply.reachable) - set(cut[name]):
            links[name].add(peer)
            links[peer].add(name)
    largest: set[str] = set()
    visited: set[str] = set()
    for name in seniority:
        if name in visited:
            continue
        island, fringe = {name}, [name]
        while fringe:
            added = links[fringe.pop()] - island
            island |= added
            fringe += added
        visited |= island
        largest = max(largest, island, key=lambda names: (len(names), len(names & members)))
    return [name for name in seniority if name in largest]


def _unreachable(replies: Mapping[str, Prepared]) -> dict[str, frozenset[str]]:
    """Return the replicas that each replica can't reach, according to the replies to the Prepare calls.

    Most replies contain the same list of reachable replicas. The function compares each list with the previous list,
    which is faster than to hash each list.
    """
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
