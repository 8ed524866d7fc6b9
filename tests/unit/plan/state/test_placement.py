"""Order of members: laws of a ring whose neighbours share as little as possible."""

from __future__ import annotations

from collections import Counter
from itertools import permutations

from hypothesis import given, settings
from hypothesis import strategies as st

from concertina.plan.state.member_placement import MemberPlace, order, shared

ZONES = st.sampled_from(["", "a", "b", "c"])


@st.composite
def members(draw: st.DrawFn, most: int = 24) -> dict[str, MemberPlace]:
    """Generate members on a few nodes, each in one zone."""
    zones = draw(st.lists(ZONES, min_size=1, max_size=8))
    nodes = draw(st.lists(st.integers(0, len(zones) - 1), min_size=1, max_size=most))
    return {f"demo-{i}-0": MemberPlace(f"node-{node}", zones[node]) for i, node in enumerate(nodes)}


@given(members(), st.data())
def test_a_permutation_with_the_coordinator_first(places: dict[str, MemberPlace], data: st.DataObject) -> None:
    coordinator = data.draw(st.sampled_from(sorted(places)))
    before = data.draw(st.permutations([*places, "gone-0-0", "gone-1-0"]))
    ring = order(places, coordinator, before)
    assert ring[0] == coordinator
    assert sorted(ring) == sorted(places)
    assert ring == order(places, coordinator, before), "the same again"


@given(members())
def test_no_neighbours_share_a_zone_where_none_has_more_than_half(places: dict[str, MemberPlace]) -> None:
    """As few neighbours as possible share a zone or a node: only the members of a majority beyond half."""
    ring, count = order(places, next(iter(places))), len(places)
    in_zone = max(Counter(place.zone for place in places.values()).values())
    on_node = max(Counter(place.node for place in places.values()).values())
    assert shared(ring, places) == (max(0, 2 * in_zone - count), max(0, 2 * on_node - count))


@settings(max_examples=30)
@given(members(most=7))
def test_nobody_finds_a_better_order(places: dict[str, MemberPlace]) -> None:
    first, *others = places
    best = min(shared([first, *ring], places) for ring in permutations(others))
    assert shared(order(places, first), places) == best


@given(members(), st.data())
def test_the_order_of_before_stays_where_it_is_as_good(places: dict[str, MemberPlace], data: st.DataObject) -> None:
    before = order(places, next(iter(places)))
    gone = data.draw(st.sampled_from(before))
    left = {name: place for name, place in places.items() if name != gone}
    coordinator = data.draw(st.sampled_from(sorted(left))) if left else "new-0-0"
    replaced = {("new-0-0" if name == gone else name): place for name, place in places.items()}
    seats = ["new-0-0" if name == gone else name for name in before]
    assert order(replaced, coordinator, before) == from_coordinator(seats, coordinator), (
        "a newcomer takes the place of who is gone"
    )
    remaining = [name for name in before if name != gone]
    if left and shared(remaining, left) <= shared(order(left, coordinator), left):
        assert order(left, coordinator, before) == from_coordinator(remaining, coordinator)


def from_coordinator(ring: list[str], coordinator: str) -> tuple[str, ...]:
    first = ring.index(coordinator)
    return (*ring[first:], *ring[:first])
