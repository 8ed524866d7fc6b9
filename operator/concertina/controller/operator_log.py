"""Conversion of Python log records to the log format of `concertina_protocol.log`."""

from __future__ import annotations

import enum
import logging
from typing import Any

from concertina_protocol.log import LogFormat, log_event, write_as


class LogLevel(enum.Enum):
    """Levels of Python's log records. Records below the configured level are not written."""

    DEBUG = "DEBUG"
    INFO = "INFO"
    WARNING = "WARNING"
    ERROR = "ERROR"


class _LogLines(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        fields: dict[str, Any] = {"level": record.levelname, "message": record.getMessage()}
        if record.exc_info:
            fields["traceback"] = logging.Formatter().formatException(record.exc_info)
        log_event("log", logger=record.name, **fields)


def configure(level: LogLevel, format: LogFormat) -> None:
    """Configure the operator's log.

    Args:
        level: Lowest level of Python's log records that are written. The operator's decisions and actions are always
            logged.
        format: Format of the log lines.
    """
    write_as(format)
    root = logging.getLogger()
    root.handlers[:] = [_LogLines()]
    root.setLevel(level.value)
