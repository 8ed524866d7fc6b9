"""Merge the traces of several ranks into one file for https://ui.perfetto.dev and chrome://tracing. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

TraceEvent = dict[str, Any]
_COLLECTIVES = 1 << 30
"""Thread id for the row of collectives, which come from the flight recorder. No real thread has this id."""


@dataclass(frozen=True)
class RankTrace:
    """Trace of one rank, in the formats of torch's profiler and flight recorder."""

    rank: int
    replica: str
    trace: dict[str, Any]
    flight_record: dict[str, Any] = field(default_factory=dict)

    @property
    def base(self) -> int:
        """Unix time, in nanoseconds, at which the trace's clock is zero.

        Times of events are in microseconds since then.
        """
        return int(self.trace.get("baseTimeNanoseconds") or 0)

    @property
    def events(self) -> Iterable[TraceEvent]:
        """Events of processes and devices. The profiler's own events are left out; their pid is not a number."""
        return (event for event in self.trace.get("traceEvents", ()) if isinstance(event.get("pid"), int))

    @property
    def begin(self) -> int:
        """Unix time, in nanoseconds, of the first event in the rank's trace."""
        return self.base + int(1000 * min((event["ts"] for event in self.events if event.get("ph") == "X"), default=0))


def merged(traces: Sequence[RankTrace]) -> dict[str, Any]:
    """Return one trace with the events of all ranks on a common time axis.

    The events of different ranks are aligned by the clocks of their nodes, and are only as exact as these. In the
    result, each rank and each of its devices is a process. The complete flight records are included too.
    """
    origin = min((rank_trace.begin for rank_trace in traces), default=0)
    events: list[TraceEvent] = []
    for rank_trace in traces:
        events += _events(rank_trace, origin)
        events += _collectives(rank_trace, origin)
    records = {str(rank_trace.rank): rank_trace.flight_record for rank_trace in traces if rank_trace.flight_record}
    return {"traceEvents": events, "displayTimeUnit": "ms", "flightRecorder": records}


def _events(rank_trace: RankTrace, origin: int) -> Iterable[TraceEvent]:
    pids: dict[int, int] = {}
    for event in rank_trace.events:
        has_pid = event["pid"] in pids
        pid = pids.setdefault(event["pid"], _pid(rank_trace.rank, len(pids)))
        if not has_pid:
            yield from _process_names(rank_trace, pid, len(pids) - 1)
        moved = {**event, "pid": pid}
        if event.get("ph") == "M" and event.get("name") in ("process_name", "process_sort_index"):
            continue
        if "ts" in event:
            moved["ts"] = event["ts"] - (origin - rank_trace.base) / 1000
        if isinstance(event.get("id"), int):  # Perfetto draws arrows between events with the same id.
            moved["id"] = f"{rank_trace.rank}-{event['id']}"
        yield moved


def _pid(rank: int, number: int) -> int:
    return rank * 100 + number + 1


def _process_names(rank_trace: RankTrace, pid: int, number: int) -> Iterable[TraceEvent]:
    """Yield the metadata events that name the process `pid`: the rank's worker (`number` 0) or one of its devices."""
    name = f"rank {rank_trace.rank} ({rank_trace.replica})" + (f" device {number - 1}" if number else "")
    yield {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": name}}
    yield {"ph": "M", "name": "process_sort_index", "pid": pid, "tid": 0, "args": {"sort_index": pid}}


def _collectives(rank_trace: RankTrace, origin: int) -> Iterable[TraceEvent]:
    """Yield trace events for the collectives in a rank's flight record, as one row of the trace.

    Collectives from before the start of the trace are left out.
    """
    pid = _pid(rank_trace.rank, 0)
    rows = [
        entry
        for entry in rank_trace.flight_record.get("entries", ())
        if int(entry.get("time_created_ns") or 0) >= rank_trace.begin
    ]
    if rows:
        args = {"name": "collectives (flight recorder)"}
        yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": _COLLECTIVES, "args": args}
    for entry in rows:
        start_ns = int(entry.get("time_discovered_started_ns") or entry["time_created_ns"])
        end_ns = int(entry.get("time_discovered_completed_ns") or start_ns)
        fields = ("state", "process_group", "collective_seq_id", "input_sizes", "output_sizes", "input_dtypes")
        yield {
            "ph": "X", "cat": "collective", "name": str(entry.get("profiling_name") or "collective"), "pid": pid,
            "tid": _COLLECTIVES, "ts": (start_ns - origin) / 1000, "dur": max(0, end_ns - start_ns) / 1000,
            "args": {name: entry[name] for name in fields if name in entry},
        }  # fmt: skip
