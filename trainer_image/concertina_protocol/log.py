"""The log of operator and agents: one JSON object a line on stderr, {"t": Unix seconds, "event": what, ...}; a
benchmark takes a recovery apart by them. Standard library only, Python 3.9+."""

from __future__ import annotations

import json
import sys
import time
from typing import Any


def log_event(event: str, **fields: Any) -> None:
    """One line about something that was decided or done."""
    line = json.dumps({"t": round(time.time(), 4), "event": event, **fields}, separators=(",", ":"), default=str)
    sys.stderr.write(line + "\n")
    sys.stderr.flush()
