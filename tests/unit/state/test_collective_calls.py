"""Collectives in torch's flight recorder, as a worker reads them while its main thread waits in one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from builders import hung_collective
from concertina_protocol import GroupCalls
from concertina_protocol.messages.collectives import MOST_GROUPS, MOST_OPERATIONS
from concertina_state.collective_calls import group_calls


def entry(number: int, *, group: str = "7", title: str = "undefined", pending: bool = False, **more: Any) -> Any:
    return {
        "record_id": number,
        "is_p2p": False,
        "process_group": [group, title],
        "collective_seq_id": number,
        "retired": not pending,
        "state": "scheduled",
        "profiling_name": "gloo:all_reduce",
        **more,
    }


def test_a_thread_lists_the_collectives_while_the_main_thread_waits_in_one(tmp_path: Path) -> None:
    hung_collective.check(*hung_collective.listed("gloo", tmp_path / "store", lambda rank: {}))


def test_the_oldest_collective_that_is_not_complete_is_named_beside_the_newest_ones() -> None:
    entries = [entry(1), entry(2, pending=True, profiling_name="nccl:_all_gather_base"), *map(entry, range(3, 40))]
    (calls,) = group_calls({"entries": entries}, {"7": (2, 4, 6)})
    assert (calls.group, calls.title, calls.ranks, calls.called, calls.waits_for) == ("7", "", (2, 6, 2), 39, 2)
    assert len(calls.operations) == MOST_OPERATIONS
    assert calls.operations["2"] == "_all_gather_base"


def test_messages_from_rank_to_rank_are_left_out() -> None:
    assert group_calls({"entries": [entry(1, is_p2p=True)]}, {}) == ()


@pytest.mark.parametrize("ranks", [(), (0, 1, 3), (3, 1)])
def test_ranks_without_a_common_distance_are_left_out(ranks: tuple[int, ...]) -> None:
    (calls,) = group_calls({"entries": [entry(1)]}, {"7": ranks})
    assert calls == GroupCalls("7", "", (), 1, None, {"1": "all_reduce"})


def test_groups_in_which_the_rank_waits_come_first_and_there_are_not_too_many() -> None:
    entries = [entry(number, group=str(number), pending=number == 3) for number in range(1, 2 * MOST_GROUPS)]
    groups = group_calls({"entries": entries}, {})
    assert len(groups) == MOST_GROUPS
    assert [calls.group for calls in groups[:2]] == ["3", str(2 * MOST_GROUPS - 1)]
