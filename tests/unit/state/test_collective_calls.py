"""Collectives in torch's flight recorder, as a worker reads them while its main thread waits in one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from builders.programs import SEARCH_PATH
from concertina_protocol import GroupCalls
from concertina_protocol.messages.collectives import MOST_GROUPS, MOST_OPERATIONS
from concertina_state.collective_calls import group_calls

HANG = """
import json, os, sys, threading, torch, torch.distributed as dist
from concertina_protocol.codec.typed_json import to_json
from concertina_state import collective_calls

rank, one = int(sys.argv[1]), torch.ones(1)
dist.init_process_group("gloo", init_method=f"file://{sys.argv[2]}", rank=rank, world_size=2)
pair = dist.new_group([0, 1], group_desc="pair")
for _ in range(3):
    dist.all_reduce(one)
dist.broadcast(one, 0, group=pair)
dist.barrier()

def told(message):
    print(json.dumps([rank, to_json(message.groups)]), flush=True)
    os._exit(0)

threading.Timer(1.0, collective_calls.answer, [told]).start()
if rank == 0:
    dist.all_reduce(one, group=pair)  # rank 1 never calls it
threading.Event().wait()
"""


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
    environment = {**os.environ, "PYTHONPATH": str(SEARCH_PATH)}
    commands = ([sys.executable, "-c", HANG, rank, str(tmp_path / "store")] for rank in "01")
    ranks = [subprocess.Popen(command, env=environment, stdout=subprocess.PIPE) for command in commands]
    lists = dict(json.loads(process.communicate(timeout=120)[0].splitlines()[-1]) for process in ranks)
    waiting, other = ({calls["title"]: calls for calls in lists[rank]} for rank in (0, 1))
    assert (waiting["pair"]["called"], waiting["pair"]["waits_for"]) == (2, 2)
    assert waiting["pair"]["operations"] == {"1": "broadcast", "2": "all_reduce"}
    assert waiting["pair"]["ranks"] == [0, 1, 1]
    assert (other["pair"]["called"], other["pair"]["waits_for"]) == (1, 0), "0 stands for None"
    assert waiting["pair"]["group"] == other["pair"]["group"]
    assert waiting["default_pg"] == other["default_pg"]


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
