"""Choice of the member from which a shard is pulled."""

from __future__ import annotations

import asyncio
import socket
import ssl
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

import concertina_protocol as p
from builders.until import until_async
from concertina_agent.core import events as e
from concertina_agent.files.snapshot_files import SnapshotFiles
from concertina_agent.net.wire import Connector
from concertina_agent.runtime.nursery import TaskGroup
from concertina_agent.transfers.copies import Peers, expected, nearest

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


@given(st.integers(1, 40), st.lists(st.integers(1, 8), min_size=1, max_size=12), st.data())
def test_what_even_parts_make_needed_is_expected(shards: int, workers: list[int], data: st.DataObject) -> None:
    """The state was written in as many even parts as it is now cut into. No other shards are expected."""
    firsts = [sum(workers[:i]) for i in range(len(workers))]
    members = tuple(p.Member(f"r{i}", "i", "h:1", firsts[i], count) for i, count in enumerate(workers))
    restore, world = p.Restore("Memory", 5, p.SnapshotId(1, 5, "digest", shards)), sum(workers)
    assign, me = p.Assign("uid", 2, "claim", members, "store", restore), data.draw(st.sampled_from(members))
    rows = range(me.first_rank * shards, (me.first_rank + me.workers) * shards)  # of world * shards, world to a shard
    assert set(expected(assign, me.replica, even=True)) == {row // world for row in rows}
    asked_first = expected(assign, me.replica, even=False)
    assert asked_first == (range(me.first_rank, me.first_rank + me.workers) if shards == world else range(0))
    assert expected(assign, "no member", even=True) == range(0)


def test_nobody_copies_for_a_round_that_is_over_whenever_it_ends(tmp_path: Path) -> None:
    """The neighbour's agent is just starting: its port refuses each connection, in some turn of the event loop."""

    async def scenario(port: int) -> None:
        connector = Connector(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), "uid")
        member = p.Member("r0", "i", f"127.0.0.1:{port}", 0, 8)
        for turns in range(20):
            tasks = TaskGroup()
            peers = Peers("uid", "r1", connector, SnapshotFiles(tmp_path), lambda event: None, tasks)
            peers.copy_from(e.CopyFrom(1, member, tuple(range(8))))
            for _ in range(turns):
                await asyncio.sleep(0)
            peers.stop(e.KillWorkers(2))
            what = f"the end of all copiers of a round that ended after {turns} turns"
            await until_async(lambda tasks=tasks: not len(tasks), what, lambda tasks=tasks: len(tasks), limit=20)

    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        asyncio.run(scenario(unused.getsockname()[1]))
