"""One JSON object a line on stderr: {"t": Unix seconds, "event": what, ...}; a benchmark splits a recovery by them."""

from __future__ import annotations

import json
import sys
import time
from typing import Any


def log_event(event: str, **fields: Any) -> None:
    line = json.dumps({"t": round(time.time(), 4), "event": event, **fields}, separators=(",", ":"), default=str)
    sys.stderr.write(line + "\n")
    sys.stderr.flush()
