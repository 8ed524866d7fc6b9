"""Assignment of ranks to replicas, in which the ranks that communicate most are close to each other in the network.

The kinds of groups are, from small to large: tensor group, context group, pipeline and block. A group consists of whole
groups of the previous kind, and its ranks are consecutive. The order of the replicas therefore decides which groups
span several network domains (zones, NVLink domains, hosts). All functions are pure (decision "Ranks keep parallel
groups within node domains").
"""

from __future__ import annotations

import itertools
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

Path = tuple[str, ...]
"""Network domains that contain a replica, from the widest domain to the narrowest.

For a group of replicas, these are the domains that contain all its members.
"""


@dataclass(frozen=True)
class Blocks:
    """Sizes of the job's parallel groups, and network domains of its replicas.

    Rank orders are compared with these data.
    """

    sizes: tuple[int, ...]
    """Number of replicas in a group, for each kind of group, the smallest first. Small groups communicate most.

    Each size is a multiple of the size before it. The last size is that of a block, and a round is a whole number of
    blocks.
    """
    domains: Mapping[str, Path]
    """Network domains of each replica that may be a member."""

    def split(self, order: Sequence[str]) -> tuple[int, ...]:
        """Return how many parallel groups span several network domains, for each group size and each level of domains.

        The widest level of domains comes first. Of two orders, the one with the smaller tuple is better.
        """
        depth = max((len(path) for path in self.domains.values()), default=0)
        counts: list[int] = []
        for size in self.sizes:
            groups = [order[start : start + size] for start in range(0, len(order), size)]
            shared = [len(common(self.domains[name] for name in group)) for group in groups]
            counts += [sum(depth_shared <= level for depth_shared in shared) for level in range(depth)]
        return tuple(counts)


def order(names: Sequence[str], blocks: Blocks, last_order: Sequence[str] = ()) -> tuple[str, ...]:
    """Return `names` in the best order of ranks. The number of names must be a whole number of blocks.

    In this order, as few tensor groups as possible span several of the innermost domains. Among such orders, as few
    context groups as possible do, and so on for larger groups. The order of the previous round (`last_order`) is used
    if it is equally good.
    """
    seat = {name: rank for rank, name in enumerate(last_order)}
    fresh = _placed(_carved(_intact_first(names, blocks, last_order), blocks), max(1, len(last_order)), seat)
    unchanged = _unchanged_order(names, blocks, last_order)
    return tuple(unchanged if blocks.split(unchanged) <= blocks.split(fresh) else fresh)


def choose(names: Sequence[str], count: int, blocks: Blocks, last_order: Sequence[str] = ()) -> tuple[str, ...]:
    """Return `count` of the `names` whose whole blocks span as few network domains as possible.

    Whole blocks of the previous round are preferred to new blocks. Members of the previous round are preferred to
    replicas that join.
    """
    if count >= len(names):
        return tuple(names)
    last_members = frozenset(last_order)
    carved = _carved(_intact_first(names, blocks, last_order), blocks)
    carved.sort(key=lambda block: (blocks.split(block.members), -len(last_members.intersection(block.members))))
    chosen = {name for block in carved[: count // blocks.sizes[-1]] for name in block.members}
    return tuple(name for name in names if name in chosen)


def common(paths: Iterable[Path]) -> Path:
    """Return the smallest network domain that contains all `paths`: their longest common prefix."""
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
    """Return the whole blocks that can be formed from the replicas.

    The replicas of one network domain form as many groups as possible. Replicas that are left over form groups with
    left-over replicas of the same wider domain. Tensor groups are formed first, then each larger kind of group from
    them.
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
    """Return the names sorted by how complete their groups from the previous round are.

    Members of complete blocks come first. Members of complete smaller groups in incomplete blocks follow. Within each
    of these sets, the members are in order of rank. Replicas that join come last.
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


# --- the previous order, as far as it can be kept


def _unchanged_order(names: Sequence[str], blocks: Blocks, last_order: Sequence[str]) -> list[str]:
    """Return an order in which as many members of the previous round as possible keep their ranks.

    If there are fewer blocks than before, the fullest blocks keep their positions. Gaps in these blocks are filled with
    members of other blocks and with replicas that join, from the same network domain if possible.
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
    """Fill the gaps (None) in the order of ranks `seats`, and return the names for which there was no gap.

    Replicas in the same innermost domain as the members around a gap are used first.
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
    """Return the network domain that the members around a gap share.

    The function uses the smallest parallel group around the gap that has any members.
    """
    for size in blocks.sizes:
        group = seats[index - index % size : index - index % size + size]
        if present := [blocks.domains[name] for name in group if name]:
            return common(present)
    return ()


# --- a new order, close to the previous one


def _placed(groups: Sequence[_Group], within: int, seat: Mapping[str, int]) -> list[str]:
    """Return the members in order, with each group at the position where most of its members were before.

    A group of new members takes a free position. The parts of each group are placed within the group in the same way.

    Args:
        groups: Groups to place.
        within: Number of previous ranks that are available for the groups.
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
