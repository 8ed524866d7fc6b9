"""Log of the operator and the agents: one line for each event, on stderr.

A line is JSON, {"t": Unix seconds, "event": name, ...}. A benchmark uses these lines to break down the time of a
recovery. The module uses the standard library only and supports Python 3.9 and later.
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

    Strings with spaces or quotes are written as in JSON.
    """


@dataclasses.dataclass
class Served:
    """The one job that a process serves, and its progress."""

    uid: str
    job: str
    """NAMESPACE/NAME"""
    round: int = 0
    """Newest round that trains here, or 0 if none does."""
    step: int = 0
    """Last step that is known to be finished."""


_format = LogFormat.JSON
_served: Optional[Served] = None
"""The job that this process serves, or None if it serves several."""


def write_as(format: LogFormat) -> None:
    """Set the format of all further lines."""
    global _format
    _format = format


def serve(uid: str, job: str) -> None:
    """Add the job (NAMESPACE/NAME) to each further line, and the `trace` of the round that the line names."""
    global _served
    _served = Served(uid, job)


def reached(round: int, step: int) -> None:
    """Record the current round and step, which is done for each step.

    Each further line of this round has the step, and a line that names no round belongs to this round.
    """
    if _served is not None:
        _served.round, _served.step = round, step


def log_event(event: str, **fields: Any) -> None:
    """Write one line about a decision or an action."""
    if _served is not None:
        fields = {**fields, **_context_fields(_served, fields)}
    sys.stderr.write((_text_line if _format is LogFormat.TEXT else _json_line)(event, fields) + "\n")
    sys.stderr.flush()


def _context_fields(served: Served, fields: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the fields that the job adds to a line with these fields."""
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
