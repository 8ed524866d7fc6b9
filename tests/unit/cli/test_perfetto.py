"""Traces of ranks whose profilers started at different times, converted to one clock."""

from __future__ import annotations

from typing import Any

from concertina.terminal.perfetto import RankTrace, merged

SECOND = 1_000_000_000


def traced(rank: int, begun: int, **record: Any) -> RankTrace:
    """Return a trace with a step of 5 ms. Its time 0 is `begun` (nanoseconds), 1000 microseconds before the step."""
    events = [
        {"ph": "M", "name": "process_name", "pid": 77, "tid": 0, "args": {"name": "python"}},
        {"ph": "X", "name": "step 1", "pid": 77, "tid": 77, "ts": 1000.5, "dur": 5000},
        {"ph": "X", "name": "kernel", "pid": 0, "tid": 7, "ts": 2000.5, "dur": 10},
        {"ph": "s", "name": "flow", "pid": 77, "tid": 77, "ts": 1001, "id": 3},
        {"ph": "X", "name": "PyTorch Profiler (0)", "pid": "Spans", "tid": "x", "ts": 0, "dur": 1},
    ]
    return RankTrace(rank, f"a-{rank}-0", {"baseTimeNanoseconds": begun, "traceEvents": events}, record)


def test_ranks_stand_beside_each_other_on_one_clock() -> None:
    trace = merged([traced(0, 10 * SECOND), traced(3, 10 * SECOND + 2_000_000)])
    steps = [event for event in trace["traceEvents"] if event["name"] == "step 1"]
    assert [round(event["ts"]) for event in steps] == [0, 2000]
    names = {event["pid"]: event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "process_name"}
    assert list(names.values()) == [
        "rank 0 (a-0-0)",
        "rank 0 (a-0-0) device 0",
        "rank 3 (a-3-0)",
        "rank 3 (a-3-0) device 0",
    ]
    assert len({event["pid"] for event in trace["traceEvents"]}) == 4
    assert len({event["id"] for event in trace["traceEvents"] if event["ph"] == "s"}) == 2
    assert all(isinstance(event["pid"], int) for event in trace["traceEvents"])


def test_collectives_of_the_flight_recorder() -> None:
    begun = 10 * SECOND
    entries = [
        {"profiling_name": "early", "time_created_ns": begun - SECOND},
        {"profiling_name": "gloo:all_reduce", "time_created_ns": begun + 2_000_500, "state": "scheduled"},
        {
            "profiling_name": "nccl:all_reduce",
            "time_created_ns": begun + 2_000_500,
            "time_discovered_started_ns": begun + 3_000_500,
            "time_discovered_completed_ns": begun + 4_000_500,
        },
    ]
    trace = merged([traced(0, begun, entries=entries)])
    rows = [event for event in trace["traceEvents"] if event.get("cat") == "collective"]
    assert [(row["name"], round(row["ts"]), round(row["dur"])) for row in rows] == [
        ("gloo:all_reduce", 1000, 0),
        ("nccl:all_reduce", 2000, 1000),
    ]
    assert trace["flightRecorder"]["0"]["entries"] == entries
