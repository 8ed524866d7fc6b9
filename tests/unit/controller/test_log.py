"""Settings of the operator's log; an invalid one is named."""

from __future__ import annotations

import logging

import pytest

from concertina.controller import operator_log as operator_log
from concertina.controller.operator_log import LogLevel
from concertina.controller.settings import OperatorSettingsError, from_environment
from concertina_protocol import log
from concertina_protocol.log import LogFormat

SETTINGS = {"CONCERTINA_NAMESPACE": "n", "CONCERTINA_MASTER_KEY_SECRET": "s", "CONCERTINA_IMAGE_AGENT": "i"}


def test_records_of_libraries_are_lines_too(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", root.handlers[:])
    monkeypatch.setattr(root, "level", root.level)
    monkeypatch.setattr(log, "_format", LogFormat.JSON)
    operator_log.configure(LogLevel.WARNING, LogFormat.TEXT)
    logging.getLogger("a.library").info("not told")
    try:
        raise ValueError("two\nlines")
    except ValueError:
        logging.getLogger("a.library").exception("it failed")
    (line,) = capsys.readouterr().err.splitlines()
    assert ' log logger=a.library level=ERROR message="it failed" traceback="Traceback' in line


def test_words_are_taken_in_any_case_and_others_are_refused() -> None:
    read_settings = from_environment({**SETTINGS, "CONCERTINA_LOG_LEVEL": "debug", "CONCERTINA_LOG_FORMAT": "Text"})
    assert (read_settings.log_level, read_settings.log_format) == (LogLevel.DEBUG, LogFormat.TEXT)
    default = from_environment(SETTINGS)
    assert (default.log_level, default.log_format) == (LogLevel.INFO, LogFormat.JSON)
    with pytest.raises(OperatorSettingsError, match=r"CONCERTINA_LOG_FORMAT is 'xml'; it must be one of json, text"):
        from_environment({**SETTINGS, "CONCERTINA_LOG_FORMAT": "xml"})
