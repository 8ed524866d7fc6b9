"""The log of operator and agents: one line a fact on stderr, as JSON {"t": Unix seconds, "event": what, ...}; a
benchmark takes a recovery apart by them. Standard library only, Python 3.9+."""

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
    """For people: the time, what, and name=value; strings with spaces or quotes as in JSON."""


@dataclasses.dataclass
class Served:
    """The one job that a process serves, and how far it is."""

    uid: str
    job: str
    """NAMESPACE/NAME"""
    round: int = 0
    """The newest that trains here; 0: none does."""
    step: int = 0
    """That it was last heard to have finished."""


_format = LogFormat.JSON
_served: Optional[Served] = None
"""None where this process serves several."""


def write_as(format: LogFormat) -> None:
    global _format
    _format = format


def serve(uid: str, job: str) -> None:
    """From now on each line names the job (NAMESPACE/NAME), and has the `trace` of the round that it names."""
    global _served
    _served = Served(uid, job)


def reached(round: int, step: int) -> None:
    """From now on each line of this round has the step, and one that names no round is of this one. Of each step."""
    if _served is not None:
        _served.round, _served.step = round, step


def log_event(event: str, **fields: Any) -> None:
    """One line about something that was decided or done."""
    if _served is not None:
        fields = {**fields, **_of(_served, fields)}
    sys.stderr.write((_text if _format is LogFormat.TEXT else _object)(event, fields) + "\n")
    sys.stderr.flush()


def _of(served: Served, fields: Mapping[str, Any]) -> Mapping[str, Any]:
    """What a line does not say by itself."""
    about: dict[str, Any] = {"job": served.job}
    round = fields.get("round", served.round)
    if round:
        about |= {"round": round, "trace": trace_id(served.uid, round)}
    if round == served.round and served.round and "step" not in fields:
        about["step"] = served.step
    return about


def _object(event: str, fields: Mapping[str, Any]) -> str:
    return _json({"t": round(time.time(), 4), "event": event, **fields})


def _json(value: object) -> str:
    return json.dumps(value, separators=(",", ":"), default=str)


def _text(event: str, fields: Mapping[str, Any]) -> str:
    at = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
    return " ".join([at, event, *(f"{name}={_word(value)}" for name, value in fields.items() if value is not None)])


def _word(value: object) -> str:
    return value if isinstance(value, str) and _PLAIN.fullmatch(value) else _json(value)
