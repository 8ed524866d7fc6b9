"""Order of a round's members in a ring, in which each member stores a copy of the previous member's snapshots.

Neighbours should be in different zones, or at least on different nodes, so that a single failure can't destroy both
copies.

A round is a period in which a fixed set of replicas trains.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

Level = Callable[["MemberPlace"], str]


@dataclass(frozen=True)
class MemberPlace:
    """Node and zone in which a member of the round runs.

    A round is a period in which a fixed set of replicas trains.
    """

    node: str
    zone: str = ""
    """Zone of the node; empty if unknown. All unknown zones count as the same zone."""


LEVELS: tuple[Level, ...] = (lambda place: place.zone, lambda place: f"{place.zone}/{place.node}")
"""Units that can fail as a whole, the largest first: a zone, then a node."""


def order(places: Mapping[str, MemberPlace], coordinator: str, last_order: Sequence[str] = ()) -> tuple[str, ...]:
    """Return the members as a ring that begins with the coordinator.

    Each member's snapshots are copied to the next member. The function chooses an order in which as few neighbours as
    possible share a zone. Among such orders, it chooses one in which as few neighbours as possible share a node. If the
    order of the previous round (`last_order`) is equally good, the function chooses that order, because a member that
    keeps its rank already has the state of that rank (decision "Ranks are ordered in a ring of zones and nodes").
    """
    unchanged, best = _unchanged_order(list(places), last_order), _spread(list(places), places, LEVELS)
    ring = unchanged if shared(unchanged, places) <= shared(best, places) else best
    first = ring.index(coordinator)
    return tuple(ring[first:] + ring[:first])


def shared(ring: Sequence[str], places: Mapping[str, MemberPlace]) -> tuple[int, ...]:
    """Return how many members share their zone, and how many their node, with the copy of their snapshots."""
    return tuple(sum(_same(ring, position, places, level) for position in range(len(ring))) for level in LEVELS)


def _same(ring: Sequence[str], position: int, places: Mapping[str, MemberPlace], level: Level) -> bool:
    """Return whether the member at `position` of the ring shares its zone or its node with the previous member.

    Args:
        ring: Names of the members.
        position: Position in the ring.
        places: Zone and node of each member.
        level: Function that returns the zone or the node of a place.
    """
    return level(places[ring[position - 1]]) == level(places[ring[position]])


def _unchanged_order(names: Sequence[str], last_order: Sequence[str]) -> list[str]:
    """Return the members in the order of the previous round.

    New members take the positions of members of that round that are not in the new one. If there are more new members
    than such positions, the rest is added at the end.
    """
    last_members, stays = set(last_order), set(names)
    newcomers = iter([name for name in names if name not in last_members])
    seats = (name if name in stays else next(newcomers, None) for name in last_order)
    return [*filter(None, seats), *newcomers]


def _spread(names: list[str], places: Mapping[str, MemberPlace], levels: Sequence[Level]) -> list[str]:
    """Return a ring in which as few neighbours as possible share a zone. Among such rings, few share a node.

    Args:
        names: Names of the members.
        places: Zone and node of each member.
        levels: Functions that return a member's zone and node. The ring is optimized for the first function first.
    """
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
    """Return the names as a ring in which names that follow each other in `names` are not neighbours.

    If `names` is sorted by zone, and no zone has more than half of the names, no neighbours in the ring share a zone.

    Args:
        names: Names, sorted so that names that must be apart follow each other.
        count: Number of names.
    """
    seats = [*range(0, count, 2), *range(1, count, 2)]
    return [name for _, name in sorted(zip(seats, names, strict=True))]


def _into_gaps(inner: list[str], fillers: list[str], bad: Callable[[int], bool]) -> list[str]:
    """Return the ring `inner` with the names in `fillers` put between its members, at most one in each gap.

    Args:
        inner: Members in the order of the ring.
        fillers: Members in other zones or on other nodes.
        bad: Function that returns whether the member at a position shares a zone or node with the previous member. The
            gaps before such members are filled first.
    """
    gaps = sorted(range(len(inner)), key=lambda position: not bad(position))[: len(fillers)]
    filling = dict(zip(sorted(gaps), fillers, strict=True))
    return [
        name for position, inside in enumerate(inner) for name in (filling.get(position), inside) if name is not None
    ]
