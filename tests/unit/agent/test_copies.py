"""Whom a shard is pulled from."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

import concertina_protocol as p
from concertina_agent.transfers.copies import nearest

PLACES = st.tuples(st.sampled_from(["n0", "n1", "n2"]), st.sampled_from(["", "a", "b"]))


@given(st.lists(PLACES, min_size=1, max_size=9), st.data())
def test_the_nearest_holder_is_asked_first(places: list[tuple[str, str]], data: st.DataObject) -> None:
    members = tuple(p.Member(f"r{i}", "i", f"h:{i}", i, 1, *place) for i, place in enumerate(places))
    names = [member.replica for member in members]
    outside = p.Member("outside", "i", "h:9", 0, 0, *data.draw(PLACES))
    holders = tuple(data.draw(st.lists(st.sampled_from([*names, "outside", "left"]), unique=True)))
    restore = p.Restore("Memory", 5, p.SnapshotId(1, 5, "digest", 4), {"3": holders})
    assign = p.Assign("uid", 2, "claim", members, "store", restore, outside=(outside,))
    me = data.draw(st.sampled_from(members))

    found = nearest(assign, me.replica, 3)
    assert {member.replica for member in found} == set(holders) - {me.replica, "left"}
    distances = [0 if other.node == me.node else 1 if other.zone == me.zone else 2 for other in found]
    assert distances == sorted(distances)
    assert nearest(assign, me.replica, 0) == [], "nobody holds it"
