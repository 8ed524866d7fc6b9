"""The log of operator and agents: one JSON object a line on stderr, {"t": Unix seconds, "event": what, ...}; a
benchmark takes a recovery apart by them. Standard library only, Python 3.9+."""

from __future__ import annotations

import json
import sys
import time
from typing import Any

from concertina_protocol.traces import trace_id

_served = ""
"""The uid of the job that this process serves; empty where it serves several."""


def serve(uid: str) -> None:
    """From now on each line that names a round has its `trace`."""
    global _served
    _served = uid


def log_event(event: str, **fields: Any) -> None:
    """One line about something that was decided or done."""
    if _served and fields.get("round"):
        fields["trace"] = trace_id(_served, fields["round"])
    line = json.dumps({"t": round(time.time(), 4), "event": event, **fields}, separators=(",", ":"), default=str)
    sys.stderr.write(line + "\n")
    sys.stderr.flush()
