"""Traces of several ranks as one file that https://ui.perfetto.dev and chrome://tracing read. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

TraceEvent = dict[str, Any]
_COLLECTIVES = 1 << 30
"""A thread id that no thread has: the row of the flight recorder."""


@dataclass(frozen=True)
class RankTrace:
    """What one rank has written, as torch's profiler and flight recorder have it."""

    rank: int
    replica: str
    trace: dict[str, Any]
    flight_record: dict[str, Any] = field(default_factory=dict)

    @property
    def base(self) -> int:
        """Unix nanoseconds of the trace's time 0; its events are in microseconds after that."""
        return int(self.trace.get("baseTimeNanoseconds") or 0)

    @property
    def events(self) -> Iterable[TraceEvent]:
        """Those of processes and devices; the profiler's own marks have words as pid."""
        return (event for event in self.trace.get("traceEvents", ()) if isinstance(event.get("pid"), int))

    @property
    def begin(self) -> int:
        """Unix nanoseconds of the first event."""
        return self.base + int(1000 * min((event["ts"] for event in self.events if event.get("ph") == "X"), default=0))


def merged(traces: Sequence[RankTrace]) -> dict[str, Any]:
    """On one clock (as far as the nodes' clocks agree), a process for each rank and each of its devices. The flight
    records are in it whole, too."""
    origin = min((each.begin for each in traces), default=0)
    events: list[TraceEvent] = []
    for each in traces:
        events += _events(each, origin)
        events += _collectives(each, origin)
    records = {str(each.rank): each.flight_record for each in traces if each.flight_record}
    return {"traceEvents": events, "displayTimeUnit": "ms", "flightRecorder": records}


def _events(of: RankTrace, origin: int) -> Iterable[TraceEvent]:
    pids: dict[int, int] = {}
    for event in of.events:
        known = event["pid"] in pids
        pid = pids.setdefault(event["pid"], _pid(of.rank, len(pids)))
        if not known:
            yield from _named(of, pid, len(pids) - 1)
        moved = {**event, "pid": pid}
        if event.get("ph") == "M" and event.get("name") in ("process_name", "process_sort_index"):
            continue
        if "ts" in event:
            moved["ts"] = event["ts"] - (origin - of.base) / 1000
        if isinstance(event.get("id"), int):  # arrows join what has the same one
            moved["id"] = f"{of.rank}-{event['id']}"
        yield moved


def _pid(rank: int, number: int) -> int:
    return rank * 100 + number + 1


def _named(of: RankTrace, pid: int, number: int) -> Iterable[TraceEvent]:
    """The first process is the worker itself, the others are its devices."""
    name = f"rank {of.rank} ({of.replica})" + (f" device {number - 1}" if number else "")
    yield {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": name}}
    yield {"ph": "M", "name": "process_sort_index", "pid": pid, "tid": 0, "args": {"sort_index": pid}}


def _collectives(of: RankTrace, origin: int) -> Iterable[TraceEvent]:
    """From the flight recorder, as a row of the rank's own: those of the time of the trace."""
    pid = _pid(of.rank, 0)
    rows = [
        entry for entry in of.flight_record.get("entries", ()) if int(entry.get("time_created_ns") or 0) >= of.begin
    ]
    if rows:
        args = {"name": "collectives (flight recorder)"}
        yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": _COLLECTIVES, "args": args}
    for entry in rows:
        begun = int(entry.get("time_discovered_started_ns") or entry["time_created_ns"])
        ended = int(entry.get("time_discovered_completed_ns") or begun)
        told = ("state", "process_group", "collective_seq_id", "input_sizes", "output_sizes", "input_dtypes")
        yield {
            "ph": "X", "cat": "collective", "name": str(entry.get("profiling_name") or "collective"), "pid": pid,
            "tid": _COLLECTIVES, "ts": (begun - origin) / 1000, "dur": max(0, ended - begun) / 1000,
            "args": {name: entry[name] for name in told if name in entry},
        }  # fmt: skip
