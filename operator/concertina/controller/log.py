"""Log records of libraries and of our own modules, in the form of `concertina_protocol.log`."""

from __future__ import annotations

import logging
from typing import Any

from concertina_protocol.log import log_event


class _Lines(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        fields: dict[str, Any] = {"level": record.levelname, "message": record.getMessage()}
        if record.exc_info:
            fields["traceback"] = logging.Formatter().formatException(record.exc_info)
        log_event("log", logger=record.name, **fields)


def configure(level: str = "INFO") -> None:
    root = logging.getLogger()
    root.handlers[:] = [_Lines()]
    root.setLevel(level)
