"""The log of operator and agents: one line a fact on stderr, as JSON {"t": Unix seconds, "event": what, ...}; a
benchmark takes a recovery apart by them. Standard library only, Python 3.9+."""

from __future__ import annotations

import datetime
import enum
import json
import re
import sys
import time
from collections.abc import Mapping
from typing import Any

from concertina_protocol.traces import trace_id

_PLAIN = re.compile(r"[^\s\"=\\]+")


class LogFormat(enum.Enum):
    JSON = "json"
    TEXT = "text"
    """For people: the time, what, and name=value; strings with spaces or quotes as in JSON."""


_format = LogFormat.JSON
_served = ""
"""The uid of the job that this process serves; empty where it serves several."""


def write_as(format: LogFormat) -> None:
    global _format
    _format = format


def serve(uid: str) -> None:
    """From now on each line that names a round has its `trace`."""
    global _served
    _served = uid


def log_event(event: str, **fields: Any) -> None:
    """One line about something that was decided or done."""
    if _served and fields.get("round"):
        fields["trace"] = trace_id(_served, fields["round"])
    sys.stderr.write((_text if _format is LogFormat.TEXT else _object)(event, fields) + "\n")
    sys.stderr.flush()


def _object(event: str, fields: Mapping[str, Any]) -> str:
    return _json({"t": round(time.time(), 4), "event": event, **fields})


def _json(value: object) -> str:
    return json.dumps(value, separators=(",", ":"), default=str)


def _text(event: str, fields: Mapping[str, Any]) -> str:
    at = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
    return " ".join([at, event, *(f"{name}={_word(value)}" for name, value in fields.items() if value is not None)])


def _word(value: object) -> str:
    return value if isinstance(value, str) and _PLAIN.fullmatch(value) else _json(value)
