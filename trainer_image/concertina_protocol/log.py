"""Log of the operator and of agents: one line per event, on stderr.

By default, a line is JSON: {"t": Unix seconds, "event": name, ...}. Benchmarks use these lines to find out how a
recovery spends its time. The module uses the standard library only and supports Python 3.9 and later.
"""

from __future__ import annotations

import dataclasses
import datetime
import enum
import json
import re
import sys
import time
from collections.abc import Mapping
from typing import Any, Optional

from concertina_protocol.traces import trace_id

_PLAIN = re.compile(r"[^\s\"=\\]+")


class LogFormat(enum.Enum):
    JSON = "json"
    TEXT = "text"
    """Format for people: the time, the event and name=value pairs.

    A string with spaces or quotes is written as JSON.
    """


@dataclasses.dataclass
class Served:
    """Job about which this process writes log lines, with the job's progress.

    An agent serves one job, and the operator serves several.
    """

    uid: str
    job: str
    """Name of the job as NAMESPACE/NAME."""
    round: int = 0
    """Newest round that has begun training in this process's replica, or 0 for none."""
    step: int = 0
    """Last step that is known to be finished."""


_format = LogFormat.JSON
_served: Optional[Served] = None
"""Job that this process serves, or None if it serves several jobs."""


def write_as(format: LogFormat) -> None:
    """Set the format of the log lines that this process writes from now on."""
    global _format
    _format = format


def serve(uid: str, job: str) -> None:
    """Set the job for the log lines that follow. Lines about a round also get the id of the round's trace.

    `job` is NAMESPACE/NAME.
    """
    global _served
    _served = Served(uid, job)


def reached(round: int, step: int) -> None:
    """Record the present round and step, so that later log lines about this round contain the step.

    Call this function after each step. If a log line does not name a round, the line is about the present round.
    """
    if _served is not None:
        _served.round, _served.step = round, step


def log_event(event: str, **fields: Any) -> None:
    """Write a log line about `event`. The keyword arguments are the fields of the line."""
    if _served is not None:
        fields = {**fields, **_context_fields(_served, fields)}
    sys.stderr.write((_text_line if _format is LogFormat.TEXT else _json_line)(event, fields) + "\n")
    sys.stderr.flush()


def _context_fields(served: Served, fields: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the fields to add to a log line: the job, and the round's number, trace id and step.

    `fields` are the fields that the line has already.
    """
    context: dict[str, Any] = {"job": served.job}
    round = fields.get("round", served.round)
    if round:
        context |= {"round": round, "trace": trace_id(served.uid, round)}
    if round == served.round and served.round and "step" not in fields:
        context["step"] = served.step
    return context


def _json_line(event: str, fields: Mapping[str, Any]) -> str:
    return _json({"t": round(time.time(), 4), "event": event, **fields})


def _json(value: object) -> str:
    return json.dumps(value, separators=(",", ":"), default=str)


def _text_line(event: str, fields: Mapping[str, Any]) -> str:
    timestamp = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
    return " ".join(
        [timestamp, event, *(f"{name}={_word(value)}" for name, value in fields.items() if value is not None)]
    )


def _word(value: object) -> str:
    return value if isinstance(value, str) and _PLAIN.fullmatch(value) else _json(value)
