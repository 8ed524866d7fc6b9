"""Collectives that this process has called, from torch's flight recorder.

A round is a period in which a fixed set of replicas trains. The agent requests these collectives when a round hangs.
The main thread may then wait in a collective, so another thread reads the recorder. torch returns the record as JSON,
so nothing is unpickled.
"""

from __future__ import annotations

import contextlib
import json
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from concertina_protocol import GroupCalls, ProtocolError
from concertina_protocol.messages.collectives import MOST_GROUPS, MOST_OPERATIONS
from concertina_protocol.worker_channel import CallList, ChannelClosed, Message
from concertina_protocol.worker_channel.rounds import RoundLeft

NO_TITLE = ("undefined", "")
"""Descriptions that torch gives to a process group without a description of its own."""


def answer(send: Callable[[Message], None]) -> None:
    """Send the collectives of this process in a CallList, from a new thread.

    Nothing is sent in three cases: torch is missing, torch's flight recorder is off, or the round ends first.
    """
    threading.Thread(target=_answer, args=(send,), name="collectives", daemon=True).start()


def _answer(send: Callable[[Message], None]) -> None:
    with contextlib.suppress(ChannelClosed, RoundLeft, ProtocolError):
        record = flight_record() if "torch.distributed" in sys.modules else {}
        if record:
            send(CallList(group_calls(record, ranks_of_groups())))


def flight_record() -> dict[str, Any]:
    """Return the collectives in torch's flight recorder, or {} if it is off (TORCH_FR_BUFFER_SIZE is 0)."""
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_initialized():
        return {}
    from torch._C import _distributed_c10d as c10d

    backend = "nccl" if "nccl" in dist.get_backend() else "gloo"
    dump = getattr(c10d, "_dump_nccl_trace_json" if backend == "nccl" else "_dump_fr_trace_json", None)
    record = json.loads(dump()) if dump else {}
    return record if isinstance(record, dict) else {}


def ranks_of_groups() -> Mapping[str, tuple[int, ...]]:
    """Return the ranks of this process's groups, keyed by the names of the groups."""
    from torch.distributed import distributed_c10d

    world = distributed_c10d._world
    return {name: tuple(world.pg_group_ranks.get(group, ())) for group, name in list(world.pg_names.items())}


def group_calls(record: Mapping[str, Any], ranks: Mapping[str, Iterable[int]]) -> tuple[GroupCalls, ...]:
    """Return the collectives in a record of torch's flight recorder, by process group.

    Groups in which this rank waits come first, and then groups with the newest collectives.

    Args:
        record: The record, as `flight_record` returns it.
        ranks: Ranks of each process group, keyed by the group's name.
    """
    entries: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for entry in record.get("entries", ()):
        if not entry["is_p2p"]:
            entries.setdefault(tuple(entry["process_group"]), []).append(entry)
    newest_first = sorted(entries.items(), key=lambda group: -group[1][-1]["record_id"])
    groups = [_group(*names, own, tuple(ranks.get(names[0], ()))) for names, own in newest_first]
    groups.sort(key=lambda calls: calls.waits_for is None)
    return tuple(groups[:MOST_GROUPS])


def _group(name: str, title: str, entries: list[Mapping[str, Any]], ranks: tuple[int, ...]) -> GroupCalls:
    pending = [entry for entry in entries if not entry["retired"] and entry["state"] != "completed"]
    oldest = pending[0] if pending else None
    named = [*([oldest] if oldest else []), *entries[-MOST_OPERATIONS + 1 :]]
    return GroupCalls(
        name,
        "" if title in NO_TITLE else title,
        _spread(ranks),
        max(entry["collective_seq_id"] for entry in entries),
        oldest["collective_seq_id"] if oldest else None,
        {str(entry["collective_seq_id"]): _operation(entry["profiling_name"]) for entry in named},
    )


def _operation(name: str) -> str:
    """Return the name of an operation, such as all_reduce, from torch's name, such as gloo:all_reduce."""
    return name.partition(":")[2] or name


def _spread(ranks: tuple[int, ...]) -> tuple[int, ...]:
    """Return the first rank, the last rank and the distance of evenly spaced ranks, or () for other ranks."""
    if not ranks:
        return ()
    step = ranks[1] - ranks[0] if len(ranks) > 1 else 1
    return (ranks[0], ranks[-1], step) if step > 0 and ranks == tuple(range(ranks[0], ranks[-1] + 1, step)) else ()
