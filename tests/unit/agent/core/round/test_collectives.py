"""The collective of which a round hangs, as a table of what the flight recorders of the ranks have."""

from __future__ import annotations

import pytest

from concertina_agent.core.round.collectives import hung_collective
from concertina_agent.core.round.watchdog import suspects
from concertina_protocol import GroupCalls, Heartbeat, HungCollective

ALL = (0, 3, 1)


def calls(called: int, waits_for: int | None = None, name: str = "all_reduce", **more: object) -> GroupCalls:
    numbers = filter(None, {called, waits_for})
    fields = {"group": "9", "title": "world", "ranks": ALL, **more}
    return GroupCalls(**fields, called=called, waits_for=waits_for, operations=dict.fromkeys(map(str, numbers), name))  # type: ignore[arg-type]


def hung(**expected: object) -> HungCollective:
    fields = {"operation": "all_reduce", "number": 7, "group": "world", "waiting": 3, **expected}
    return HungCollective(**fields)  # type: ignore[arg-type]


WAITS = calls(7, 7)


@pytest.mark.parametrize(
    ("by_rank", "expected"),
    [
        ([(WAITS,), (WAITS,), (calls(6),), (WAITS,)], hung(missing=(2,), missing_count=1)),
        ([(WAITS,), (WAITS,), (), (WAITS,)], hung(missing=(2,), missing_count=1)),
        ([(WAITS,), (WAITS,), None, (WAITS,)], hung(silent=(2,))),
        ([(WAITS,)] * 4, hung(waiting=4)),
        ([(calls(9, 7),), (WAITS,), (calls(6),), (WAITS,)], hung(missing=(2,), missing_count=1)),
        (
            [(WAITS,), (WAITS,), (calls(7, 7, "broadcast"),), (WAITS,)],
            hung(missing=(2,), missing_count=1, instead="broadcast"),
        ),
        # Rank 1 has completed the collective already: what it has sent has not reached the others.
        ([(WAITS,), (calls(7),), (WAITS,), (WAITS,)], hung()),
        ([(calls(7),)] * 4, None),
        ([None] * 4, None),
        ([()] * 4, None),
    ],
)
def test_the_ranks_that_have_not_called_it_are_named(by_rank: list, expected: HungCollective | None) -> None:
    assert hung_collective(dict(enumerate(by_rank))) == expected


def test_of_two_groups_the_one_is_named_whose_missing_rank_waits_for_nothing() -> None:
    """Rank 3 misses the collective of all ranks, because it waits for rank 2 in the pair of both."""
    pair = {"group": "12", "title": "pair", "ranks": (2, 3, 1)}
    behind = (calls(6), calls(1, **pair))
    by_rank = {0: (WAITS,), 1: (WAITS,), 2: behind, 3: (calls(6), calls(2, 2, "all_gather", **pair))}
    assert hung_collective(by_rank) == HungCollective("all_gather", 2, "pair", 1, (2,), 1)


def test_groups_of_the_same_name_with_other_ranks_are_different_groups() -> None:
    one, other = {"ranks": (0, 1, 1)}, {"ranks": (2, 3, 1)}
    by_rank = {0: (calls(5, **one),), 1: (calls(5, **one),), 2: (calls(7, 7, **other),), 3: (calls(6, **other),)}
    assert hung_collective(by_rank) == hung(waiting=1, missing=(3,), missing_count=1)


def test_where_ranks_have_no_common_distance_those_that_report_the_group_are_its_members() -> None:
    odd = {"ranks": ()}
    assert hung_collective({0: (calls(7, 7, **odd),), 1: (calls(6, **odd),), 3: ()}) == hung(
        waiting=1, missing=(1,), missing_count=1
    )


def test_many_missing_ranks_are_counted() -> None:
    found = hung_collective({0: (calls(7, 7, ranks=(0, 99, 1)),), **dict.fromkeys(range(1, 100), ())})
    assert found is not None
    assert (found.missing, found.missing_count) == (tuple(range(1, 9)), 99)


def test_the_rank_that_has_not_called_it_is_the_suspect_where_stacks_do_not_tell() -> None:
    heartbeats = [Heartbeat(rank, 5, "computing", 0.0) for rank in range(4)]
    assert [found.rank for found in suspects(heartbeats, hung(missing=(2,), missing_count=1))] == [2]
    ahead = [*heartbeats[:2], Heartbeat(2, 6, "computing", 0.0), heartbeats[3]]
    assert [found.rank for found in suspects(ahead, hung(missing=(2,), missing_count=1))] == [0, 1, 3]


@pytest.mark.parametrize("ranks", [(), (0, 3), (0, 3, 0), (0, 3, -1), (0, 3, 1, 1)])
def test_without_a_valid_range_the_ranks_that_report_a_group_are_its_members(ranks: tuple[int, ...]) -> None:
    by_rank = {0: (calls(7, 7, ranks=ranks),), 1: (calls(6, ranks=ranks),), 2: ()}
    assert hung_collective(by_rank) == hung(waiting=1, missing=(1,), missing_count=1)


def test_a_huge_range_is_limited_to_the_ranks_of_the_round() -> None:
    of_all = {"ranks": (0, 10**12, 1)}
    by_rank = {0: (calls(7, 7, **of_all),), 1: (calls(6, **of_all),)}
    assert hung_collective(by_rank) == hung(waiting=1, missing=(1,), missing_count=1)
