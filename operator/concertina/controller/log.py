"""The operator's log: one JSON object a line on stderr. `t` is Unix seconds, so that a recovery can be taken apart."""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import Any


def log_event(event: str, job: str = "", **fields: Any) -> None:
    """One line about something that was decided or done."""
    line: dict[str, Any] = {"t": round(time.time(), 6), "event": event}
    if job:
        line["job"] = job
    print(json.dumps({**line, **fields}, default=str), file=sys.stderr, flush=True)


class _Lines(logging.Handler):
    """Log records of libraries and of our own modules, in the same form."""

    def emit(self, record: logging.LogRecord) -> None:
        fields: dict[str, Any] = {"level": record.levelname, "message": record.getMessage()}
        if record.exc_info:
            fields["traceback"] = logging.Formatter().formatException(record.exc_info)
        log_event("log", logger=record.name, **fields)


def configure(level: str = "INFO") -> None:
    root = logging.getLogger()
    root.handlers[:] = [_Lines()]
    root.setLevel(level)
