"""Assignment of ranks to the replicas of a world in blocks.

Ranks of a tensor group are neighbours, and so are those of a context group, of a pipeline and of a block, each of which
consists of whole groups of the previous kind. So the order decides which groups cross a domain of the nodes (a zone, an
NVLink domain, a host). Pure (decision "Blocks keep their ranks").
"""

from __future__ import annotations

import itertools
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

Path = tuple[str, ...]
"""Domains of a member, each within the one before; for a group, the domains that all its members share."""


@dataclass(frozen=True)
class Blocks:
    """Sizes of groups and domains of replicas, by which orders are compared."""

    sizes: tuple[int, ...]
    """Number of members of a group, for the groups that communicate most first; each size is a multiple of the one
    before. The last is a block, and a world is a whole number of blocks."""
    domains: Mapping[str, Path]
    """Domains of each replica that may be a member."""

    def split(self, order: Sequence[str]) -> tuple[int, ...]:
        """Return how many groups are not within one domain, for each size and each depth of domains, the widest first.

        Of two orders the better one has the smaller tuple.
        """
        depth = max((len(path) for path in self.domains.values()), default=0)
        counts: list[int] = []
        for size in self.sizes:
            groups = [order[start : start + size] for start in range(0, len(order), size)]
            shared = [len(common(self.domains[name] for name in group)) for group in groups]
            counts += [sum(depth_shared <= level for depth_shared in shared) for level in range(depth)]
        return tuple(counts)


def order(names: Sequence[str], blocks: Blocks, last_order: Sequence[str] = ()) -> tuple[str, ...]:
    """Return a permutation of `names`, which are a whole number of blocks.

    As few tensor groups as possible are not within the innermost domain, then as few context groups, and so on.
    `last_order`, the order of the previous round, stays if it is as good.
    """
    seat = {name: rank for rank, name in enumerate(last_order)}
    fresh = _placed(_carved(_intact_first(names, blocks, last_order), blocks), max(1, len(last_order)), seat)
    unchanged = _unchanged_order(names, blocks, last_order)
    return tuple(unchanged if blocks.split(unchanged) <= blocks.split(fresh) else fresh)


def choose(names: Sequence[str], count: int, blocks: Blocks, last_order: Sequence[str] = ()) -> tuple[str, ...]:
    """Return `count` of `names`, in their order: a whole number of blocks that cross as few domains as possible.

    Whole blocks of the previous round stay before others, and its members before replicas that join.
    """
    if count >= len(names):
        return tuple(names)
    last_members = frozenset(last_order)
    carved = _carved(_intact_first(names, blocks, last_order), blocks)
    carved.sort(key=lambda block: (blocks.split(block.members), -len(last_members.intersection(block.members))))
    chosen = {name for block in carved[: count // blocks.sizes[-1]] for name in block.members}
    return tuple(name for name in names if name in chosen)


def common(paths: Iterable[Path]) -> Path:
    """Return the longest common beginning of the paths."""
    first, *other_paths = paths
    shared = len(first)
    for path in other_paths:
        shared = next((depth for depth in range(shared) if path[depth : depth + 1] != first[depth : depth + 1]), shared)
    return first[:shared]


@dataclass(frozen=True)
class _Group:
    members: tuple[str, ...]
    path: Path
    parts: tuple[_Group, ...] = ()


def _carved(names: Sequence[str], blocks: Blocks) -> list[_Group]:
    """Return the whole blocks.

    Members that are left over in a domain are combined with those of the next wider one. So at each depth as many
    groups as possible are within one domain, tensor groups first.
    """
    groups, inner = [_Group((name,), blocks.domains[name]) for name in names], 1
    for size in blocks.sizes:
        groups, inner = _joined(groups, size // inner), size
    return groups


def _joined(groups: Sequence[_Group], count: int) -> list[_Group]:
    whole: list[_Group] = []
    unjoined: list[_Group] = []
    for level in range(max((len(group.path) for group in groups), default=0), -1, -1):
        inside: dict[Path, list[_Group]] = {}
        for group in itertools.chain(unjoined, (ungrouped for ungrouped in groups if len(ungrouped.path) == level)):
            inside.setdefault(group.path[:level], []).append(group)
        unjoined = []
        for path, candidates in inside.items():
            last = len(candidates) - len(candidates) % count
            for start in range(0, last, count):
                parts = tuple(candidates[start : start + count])
                whole.append(_Group(tuple(name for part in parts for name in part.members), path, parts))
            unjoined += candidates[last:]
    return whole


def _intact_first(names: Sequence[str], blocks: Blocks, last_order: Sequence[str]) -> list[str]:
    """Return the names by what remains of the groups of the previous round.

    Members of whole blocks come first, then those of whole groups in broken blocks, in order of rank; then replicas
    that join.
    """
    current_names, seat = frozenset(names), {name: rank for rank, name in enumerate(last_order)}

    def key(name: str) -> tuple[int, int]:
        if name not in seat:
            return 1, 0
        rank = seat[name]
        whole = sum(
            current_names.issuperset(last_order[rank - rank % size : rank - rank % size + size])
            for size in blocks.sizes
        )
        return -whole, rank

    return sorted(names, key=key)


# --- the previous order, where it can stay


def _unchanged_order(names: Sequence[str], blocks: Blocks, last_order: Sequence[str]) -> list[str]:
    """Return an order in which members that stay keep their rank.

    The fullest blocks stay, in their places as far as there are still that many. Their gaps are filled by members of
    other blocks and by replicas that join, from the domain of the gap if possible.
    """
    size, current_names = blocks.sizes[-1], frozenset(names)
    count = len(names) // size
    old = [
        [name if name in current_names else None for name in last_order[index : index + size]]
        for index in range(0, len(last_order), size)
    ]
    for block in old:
        block += [None] * (size - len(block))
    fullest = sorted((index for index in range(len(old)) if any(old[index])), key=lambda index: old[index].count(None))[
        :count
    ]
    places = {index: old[index] for index in fullest if index < count}
    free = (index for index in range(count) if index not in fullest)
    places |= {next(free): old[index] for index in sorted(fullest) if index >= count}
    seated = {name for block in places.values() for name in block}
    waiting = [name for name in names if name not in seated]
    seats: list[str | None] = [name for index in range(count) for name in places.get(index, [None] * size)]
    gaps = [index for index in range(len(seats)) if seats[index] is None and index // size in places]
    waiting = _fill(seats, gaps, waiting, blocks)
    remaining_names = iter([name for block in _carved(waiting, blocks) for name in block.members])
    return [name or next(remaining_names) for name in seats]


def _fill(seats: list[str | None], gaps: Sequence[int], waiting: Sequence[str], blocks: Blocks) -> list[str]:
    """Fill the gaps, and return the names that are still waiting.

    Replicas that share the innermost domain with the members around a gap come first.
    """
    wanted_paths = {index: _path_around(seats, index, blocks) for index in gaps}
    unseated = dict.fromkeys(waiting)
    for level in range(max((len(path) for path in blocks.domains.values()), default=0), -1, -1):
        inside: dict[Path, deque[str]] = {}
        for name in unseated:
            inside.setdefault(blocks.domains[name][:level], deque()).append(name)
        for index in gaps:
            if (
                seats[index] is None
                and len(wanted_paths[index]) >= level
                and (queue := inside.get(wanted_paths[index][:level]))
            ):
                seats[index] = name = queue.popleft()
                del unseated[name]
    return list(unseated)


def _path_around(seats: Sequence[str | None], index: int, blocks: Blocks) -> Path:
    """Return the domain of the smallest group around a gap that has any members."""
    for size in blocks.sizes:
        group = seats[index - index % size : index - index % size + size]
        if present := [blocks.domains[name] for name in group if name]:
            return common(present)
    return ()


# --- another order, close to the previous one


def _placed(groups: Sequence[_Group], within: int, seat: Mapping[str, int]) -> list[str]:
    """Return the members in order, with each group in the place where most of its members were.

    The other groups take the free places in order.

    The same holds for the parts within each group.

    Args:
        groups: Groups to place.
        within: Number of previous ranks of which these groups are a part.
        seat: Previous rank of each member.
    """
    if not groups:
        return []
    size = len(groups[0].members)
    votes = Counter(
        (group_index, seat[name] % within // size)
        for group_index, group in enumerate(groups)
        for name in group.members
        if name in seat
    )
    group_at: dict[int, int] = {}
    unplaced = dict.fromkeys(range(len(groups)))
    for (group_index, position), _ in sorted(votes.items(), key=lambda vote: (-vote[1], vote[0])):
        if group_index in unplaced and position not in group_at and position < len(groups):
            group_at[position] = group_index
            del unplaced[group_index]
    next_unplaced = iter(unplaced)
    ordered = [
        groups[group_at[position] if position in group_at else next(next_unplaced)] for position in range(len(groups))
    ]
    return [name for group in ordered for name in (_placed(group.parts, size, seat) if group.parts else group.members)]
