"""Search for the collective in which a round hangs, in the flight recorders of the round's ranks. No side effects.

Each rank counts the collectives that it calls in each process group, and all ranks of a group call the same collectives
in the same order. A rank has therefore not called a collective yet if the rank's count is lower than the collective's
number.

A round is a period in which a fixed set of replicas trains.
"""

from __future__ import annotations

import collections
from collections.abc import Iterable, Mapping, Sequence
from typing import Optional

from concertina_protocol import GroupCalls, HungCollective
from concertina_protocol.messages.collectives import MOST_MISSING

CallsByRank = Mapping[int, Optional[tuple[GroupCalls, ...]]]


def hung_collective(calls_by_rank: CallsByRank) -> Optional[HungCollective]:
    """Return the collective for which the ranks wait, or None if no rank waits in a collective.

    If ranks wait in several process groups, usually one rank is the cause: it has not called its next collective in one
    group, and waits in no other group. In that case, the result is the collective that this rank has not called.

    Args:
        calls_by_rank: For each rank of the round, the collectives that it has called, or None if its flight recorder
            did not answer.
    """
    ranks = sorted(calls_by_rank)
    silent = [rank for rank, groups in calls_by_rank.items() if groups is None]
    found = [
        collective for calls in _by_group(calls_by_rank) if (collective := _hung(calls, _members(calls, ranks), silent))
    ]
    waiting = {
        rank for rank, groups in calls_by_rank.items() if any(calls.waits_for is not None for calls in groups or ())
    }
    return min(found, key=lambda collective: _order(collective, waiting), default=None)


def _order(collective: HungCollective, waiting: set[int]) -> tuple[bool, bool, bool]:
    """Return a sort key of a collective. The most probable cause of the hang gets the smallest key."""
    missing = set(collective.missing)
    return not missing - waiting, bool(missing & waiting), not collective.silent


def _by_group(calls_by_rank: CallsByRank) -> Iterable[Mapping[int, GroupCalls]]:
    """Return the calls of each process group, keyed by rank."""
    by_group: dict[tuple[str, tuple[int, ...]], dict[int, GroupCalls]] = {}
    for rank, groups in sorted(calls_by_rank.items()):
        for calls in groups or ():
            by_group.setdefault((calls.group, calls.ranks), {})[rank] = calls
    return by_group.values()


def _members(calls: Mapping[int, GroupCalls], ranks: Iterable[int]) -> Sequence[int]:
    """Return those ranks of the round that are members of a process group.

    The group's range comes from a worker, and can be wrong. If it is not valid, the result is the ranks that have
    reported the group.
    """
    described = next(iter(calls.values())).ranks
    if len(described) != 3 or described[2] <= 0:
        return sorted(calls)
    first, last, distance = described
    return [rank for rank in ranks if rank in range(first, last + 1, distance)]


def _hung(calls: Mapping[int, GroupCalls], members: Sequence[int], silent: Iterable[int]) -> Optional[HungCollective]:
    """Return the collective of one process group for which some of its ranks wait, or None.

    Args:
        calls: Calls of the group's ranks whose flight recorder has answered.
        members: Ranks of the group.
        silent: Ranks of the round whose flight recorder has not answered.
    """
    number = min((entry.waits_for for entry in calls.values() if entry.waits_for is not None), default=None)
    if number is None:
        return None
    first = next(iter(calls.values()))
    silent = sorted(set(silent).intersection(members))
    missing = [rank for rank in members if rank not in silent and (rank not in calls or calls[rank].called < number)]
    names = {rank: entry.operations.get(str(number), "") for rank, entry in calls.items() if rank not in missing}
    operation, instead = _names(names.values())
    if not missing and instead:
        missing = [rank for rank, name in names.items() if name == instead]
    waiting = [rank for rank, entry in calls.items() if entry.waits_for == number and rank not in missing]
    return HungCollective(
        operation,
        number,
        first.title or first.group,
        len(waiting),
        tuple(missing[:MOST_MISSING]),
        len(missing),
        instead,
        tuple(silent[:MOST_MISSING]),
    )


def _names(names: Iterable[str]) -> tuple[str, str]:
    """Return the operation that most ranks called under a number, and a different operation that other ranks called."""
    counts = collections.Counter(filter(None, names)).most_common(2)
    operation = counts[0][0] if counts else "a collective"
    return operation, counts[1][0] if len(counts) > 1 else ""
