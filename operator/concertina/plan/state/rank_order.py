"""Which replicas of a world in blocks get which ranks. Ranks of a tensor group are neighbours, and so are those of a
context group, of a pipeline and of a block, each made of whole ones of those before: so the order decides which groups
cross a domain of the nodes (a zone, an NVLink domain, a host). Pure (decision "Blocks keep their ranks").
"""

from __future__ import annotations

import itertools
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

Path = tuple[str, ...]
"""The domains that a member is in, each within the one before; of a group those that all its members share."""


@dataclass(frozen=True)
class Blocks:
    """What an order is made by."""

    sizes: tuple[int, ...]
    """Members of a group, of those that talk the most first; each is a whole number of the one before. The last is a
    block, and a world is a whole number of blocks."""
    domains: Mapping[str, Path]
    """Of each replica that may be a member."""

    def split(self, order: Sequence[str]) -> tuple[int, ...]:
        """For each size, for each depth of domains, the widest first: how many groups are not within one. Of two
        orders the better one has the smaller tuple."""
        depth = max((len(path) for path in self.domains.values()), default=0)
        counts: list[int] = []
        for size in self.sizes:
            groups = [order[at : at + size] for at in range(0, len(order), size)]
            shared = [len(common(self.domains[name] for name in group)) for group in groups]
            counts += [sum(depth_shared <= level for depth_shared in shared) for level in range(depth)]
        return tuple(counts)


def order(names: Sequence[str], blocks: Blocks, before: Sequence[str] = ()) -> tuple[str, ...]:
    """A permutation of `names`, which are a whole number of blocks: with as few tensor groups as possible that are not
    within the innermost domain, then as few context groups, and so on. `before`, the order of the round before, stays
    where it is as good."""
    seat = {name: at for at, name in enumerate(before)}
    fresh = _placed(_carved(_intact_first(names, blocks, before), blocks), max(1, len(before)), seat)
    unchanged = _kept(names, blocks, before)
    return tuple(unchanged if blocks.split(unchanged) <= blocks.split(fresh) else fresh)


def choose(names: Sequence[str], count: int, blocks: Blocks, before: Sequence[str] = ()) -> tuple[str, ...]:
    """So many of `names`, in their order: a whole number of blocks that cross as few domains as possible. Blocks of the
    round before that are whole stay before others, and its members before those who join."""
    if count >= len(names):
        return tuple(names)
    were = frozenset(before)
    carved = _carved(_intact_first(names, blocks, before), blocks)
    carved.sort(key=lambda block: (blocks.split(block.members), -len(were.intersection(block.members))))
    chosen = {name for block in carved[: count // blocks.sizes[-1]] for name in block.members}
    return tuple(name for name in names if name in chosen)


def common(paths: Iterable[Path]) -> Path:
    """What all of these begin with."""
    first, *others = paths
    shared = len(first)
    for path in others:
        shared = next((at for at in range(shared) if path[at : at + 1] != first[at : at + 1]), shared)
    return first[:shared]


@dataclass(frozen=True)
class _Group:
    members: tuple[str, ...]
    path: Path
    parts: tuple[_Group, ...] = ()


def _carved(names: Sequence[str], blocks: Blocks) -> list[_Group]:
    """As many whole blocks as there are. Who is left over in a domain is put together with those of the next wider one:
    so at each depth as many groups as possible are within one domain, of tensor groups first."""
    groups, inner = [_Group((name,), blocks.domains[name]) for name in names], 1
    for size in blocks.sizes:
        groups, inner = _joined(groups, size // inner), size
    return groups


def _joined(groups: Sequence[_Group], count: int) -> list[_Group]:
    whole: list[_Group] = []
    unjoined: list[_Group] = []
    for level in range(max((len(group.path) for group in groups), default=0), -1, -1):
        inside: dict[Path, list[_Group]] = {}
        for group in itertools.chain(unjoined, (other for other in groups if len(other.path) == level)):
            inside.setdefault(group.path[:level], []).append(group)
        unjoined = []
        for path, those in inside.items():
            last = len(those) - len(those) % count
            for at in range(0, last, count):
                parts = tuple(those[at : at + count])
                whole.append(_Group(tuple(name for part in parts for name in part.members), path, parts))
            unjoined += those[last:]
    return whole


def _intact_first(names: Sequence[str], blocks: Blocks, before: Sequence[str]) -> list[str]:
    """By what is left of the groups of before: members of whole blocks, then of whole groups in broken ones, in order
    of rank; then those who join."""
    here, seat = frozenset(names), {name: at for at, name in enumerate(before)}

    def key(name: str) -> tuple[int, int]:
        if name not in seat:
            return 1, 0
        at = seat[name]
        whole = sum(here.issuperset(before[at - at % size : at - at % size + size]) for size in blocks.sizes)
        return -whole, at

    return sorted(names, key=key)


# --- the order of before, where it can stay


def _kept(names: Sequence[str], blocks: Blocks, before: Sequence[str]) -> list[str]:
    """Who stays keeps the rank: the fullest blocks stay, in their places as far as there are still so many; their gaps
    are filled by members of the others and by those who join, of the domain of the gap where there are some."""
    size, here = blocks.sizes[-1], frozenset(names)
    count = len(names) // size
    old = [[name if name in here else None for name in before[at : at + size]] for at in range(0, len(before), size)]
    for block in old:
        block += [None] * (size - len(block))
    fullest = sorted((at for at in range(len(old)) if any(old[at])), key=lambda at: old[at].count(None))[:count]
    places = {at: old[at] for at in fullest if at < count}
    free = (at for at in range(count) if at not in fullest)
    places |= {next(free): old[at] for at in sorted(fullest) if at >= count}
    seated = {name for block in places.values() for name in block}
    waiting = [name for name in names if name not in seated]
    seats: list[str | None] = [name for at in range(count) for name in places.get(at, [None] * size)]
    gaps = [at for at in range(len(seats)) if seats[at] is None and at // size in places]
    waiting = _fill(seats, gaps, waiting, blocks)
    rest = iter([name for block in _carved(waiting, blocks) for name in block.members])
    return [name or next(rest) for name in seats]


def _fill(seats: list[str | None], gaps: Sequence[int], waiting: Sequence[str], blocks: Blocks) -> list[str]:
    """Fills the gaps; returns who is still waiting. Those for whom somebody of the very same domain is there go
    first."""
    wanted = {at: _path_around(seats, at, blocks) for at in gaps}
    unseated = dict.fromkeys(waiting)
    for level in range(max((len(path) for path in blocks.domains.values()), default=0), -1, -1):
        inside: dict[Path, deque[str]] = {}
        for name in unseated:
            inside.setdefault(blocks.domains[name][:level], deque()).append(name)
        for at in gaps:
            if seats[at] is None and len(wanted[at]) >= level and (queue := inside.get(wanted[at][:level])):
                seats[at] = name = queue.popleft()
                del unseated[name]
    return list(unseated)


def _path_around(seats: Sequence[str | None], at: int, blocks: Blocks) -> Path:
    """The domain of the smallest group around a gap in which there is anybody."""
    for size in blocks.sizes:
        group = seats[at - at % size : at - at % size + size]
        if present := [blocks.domains[name] for name in group if name]:
            return common(present)
    return ()


# --- another order, near that of before


def _placed(groups: Sequence[_Group], within: int, seat: Mapping[str, int]) -> list[str]:
    """Each group in the place where most of its members were, and so in it; the rest in order. `seat`: the ranks of
    before, of which these groups had `within`."""
    if not groups:
        return []
    size = len(groups[0].members)
    votes = Counter(
        (at, seat[name] % within // size) for at, group in enumerate(groups) for name in group.members if name in seat
    )
    group_at: dict[int, int] = {}
    others = dict.fromkeys(range(len(groups)))
    for (at, position), _ in sorted(votes.items(), key=lambda vote: (-vote[1], vote[0])):
        if at in others and position not in group_at and position < len(groups):
            group_at[position] = at
            del others[at]
    rest = iter(others)
    ordered = [groups[group_at[position] if position in group_at else next(rest)] for position in range(len(groups))]
    return [name for group in ordered for name in (_placed(group.parts, size, seat) if group.parts else group.members)]
