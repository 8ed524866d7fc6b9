"""The order of members. They stand in a ring, each copies the snapshots of the one before it: so neighbours are to be
in different zones, else on different nodes, as far as that is possible."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

Level = Callable[["MemberPlace"], str]


@dataclass(frozen=True)
class MemberPlace:
    """Where a member is."""

    node: str
    zone: str = ""
    """Empty where the node's zone is not known: all of these may be the same one."""


LEVELS: tuple[Level, ...] = (lambda place: place.zone, lambda place: f"{place.zone}/{place.node}")
"""What a failure may take at once, the widest first: a zone, a node in it."""


def order(places: Mapping[str, MemberPlace], coordinator: str, before: Sequence[str] = ()) -> tuple[str, ...]:
    """A permutation of `places` that begins with the coordinator. As few neighbours as possible share a zone, and as
    few of them a node. `before`, the order of the round before, stays where it is as good: who keeps a rank has its
    state (decision "Ranks stand in a ring of zones and nodes")."""
    unchanged, best = _kept(list(places), before), _spread(list(places), places, LEVELS)
    ring = unchanged if shared(unchanged, places) <= shared(best, places) else best
    first = ring.index(coordinator)
    return tuple(ring[first:] + ring[:first])


def shared(ring: Sequence[str], places: Mapping[str, MemberPlace]) -> tuple[int, ...]:
    """How many have their copy in the same zone, and how many on the same node."""
    return tuple(sum(_same(ring, at, places, level) for at in range(len(ring))) for level in LEVELS)


def _same(ring: Sequence[str], at: int, places: Mapping[str, MemberPlace], level: Level) -> bool:
    """Whether the one at this place and the one before it share that."""
    return level(places[ring[at - 1]]) == level(places[ring[at]])


def _kept(names: Sequence[str], before: Sequence[str]) -> list[str]:
    """The order of before, newcomers in the places of those who are gone and behind."""
    were, stays = set(before), set(names)
    newcomers = iter([name for name in names if name not in were])
    seats = (name if name in stays else next(newcomers, None) for name in before)
    return [*filter(None, seats), *newcomers]


def _spread(names: list[str], places: Mapping[str, MemberPlace], levels: Sequence[Level]) -> list[str]:
    """A ring with as few neighbours as possible that share what the first level names, then the next."""
    if not levels:
        return names
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(levels[0](places[name]), []).append(name)
    by_size = sorted(groups.values(), key=len, reverse=True)
    largest, others = by_size[0], list(chain(*by_size[1:]))
    if len(largest) <= len(others):
        return _every_other(chain(*by_size), len(names))
    inner = _spread(largest, places, levels[1:])
    return _into_gaps(inner, others, lambda at: any(_same(inner, at, places, level) for level in levels[1:]))


def _every_other(names: Iterable[str], count: int) -> list[str]:
    """Members that stand side by side in `names` (no group fills more than half) never do in the ring."""
    seats = [*range(0, count, 2), *range(1, count, 2)]
    return [name for _, name in sorted(zip(seats, names, strict=True))]


def _into_gaps(inner: list[str], others: list[str], bad: Callable[[int], bool]) -> list[str]:
    """One of the others (they are fewer) in each gap of the ring, first where neighbours are badly placed."""
    gaps = sorted(range(len(inner)), key=lambda at: not bad(at))[: len(others)]
    filling = dict(zip(sorted(gaps), others, strict=True))
    return [name for at, inside in enumerate(inner) for name in (filling.get(at), inside) if name is not None]
