"""Order of members in the ring in which each copies the snapshots of the one before it.

Neighbours should be in different zones, or else on different nodes, as far as possible.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

Level = Callable[["MemberPlace"], str]


@dataclass(frozen=True)
class MemberPlace:
    """Location of a member."""

    node: str
    zone: str = ""
    """Zone of the node; empty if unknown: all unknown zones may be the same one."""


LEVELS: tuple[Level, ...] = (lambda place: place.zone, lambda place: f"{place.zone}/{place.node}")
"""Units that a failure may take at once, the widest first: a zone, then a node in it."""


def order(places: Mapping[str, MemberPlace], coordinator: str, last_order: Sequence[str] = ()) -> tuple[str, ...]:
    """Return a permutation of `places` that begins with the coordinator.

    As few neighbours as possible share a zone, and of such orders as few as possible share a node. `last_order`, the
    order of the previous round, stays if it is as good: a member that keeps its rank has that rank's state (decision
    "Ranks stand in a ring of zones and nodes").
    """
    unchanged, best = _unchanged_order(list(places), last_order), _spread(list(places), places, LEVELS)
    ring = unchanged if shared(unchanged, places) <= shared(best, places) else best
    first = ring.index(coordinator)
    return tuple(ring[first:] + ring[:first])


def shared(ring: Sequence[str], places: Mapping[str, MemberPlace]) -> tuple[int, ...]:
    """Return how many members have their copy in the same zone, and how many on the same node."""
    return tuple(sum(_same(ring, position, places, level) for position in range(len(ring))) for level in LEVELS)


def _same(ring: Sequence[str], position: int, places: Mapping[str, MemberPlace], level: Level) -> bool:
    """Return whether the member at a position and the one before it share the unit of a level."""
    return level(places[ring[position - 1]]) == level(places[ring[position]])


def _unchanged_order(names: Sequence[str], last_order: Sequence[str]) -> list[str]:
    """Return the previous order, with newcomers in the positions of members that are gone, and then at the end."""
    last_members, stays = set(last_order), set(names)
    newcomers = iter([name for name in names if name not in last_members])
    seats = (name if name in stays else next(newcomers, None) for name in last_order)
    return [*filter(None, seats), *newcomers]


def _spread(names: list[str], places: Mapping[str, MemberPlace], levels: Sequence[Level]) -> list[str]:
    """Return a ring in which as few neighbours as possible share the unit of the first level, then of the next."""
    if not levels:
        return names
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(levels[0](places[name]), []).append(name)
    by_size = sorted(groups.values(), key=len, reverse=True)
    largest, outside_largest = by_size[0], list(chain(*by_size[1:]))
    if len(largest) <= len(outside_largest):
        return _every_other(chain(*by_size), len(names))
    inner = _spread(largest, places, levels[1:])
    return _into_gaps(
        inner, outside_largest, lambda position: any(_same(inner, position, places, level) for level in levels[1:])
    )


def _every_other(names: Iterable[str], count: int) -> list[str]:
    """Return a ring in which neighbours in `names` are apart. No group has more than half of the members."""
    seats = [*range(0, count, 2), *range(1, count, 2)]
    return [name for _, name in sorted(zip(seats, names, strict=True))]


def _into_gaps(inner: list[str], fillers: list[str], bad: Callable[[int], bool]) -> list[str]:
    """Return the ring with one of `fillers` in each gap, first where neighbours are badly placed."""
    gaps = sorted(range(len(inner)), key=lambda position: not bad(position))[: len(fillers)]
    filling = dict(zip(sorted(gaps), fillers, strict=True))
    return [
        name for position, inside in enumerate(inner) for name in (filling.get(position), inside) if name is not None
    ]
