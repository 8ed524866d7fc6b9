"""One line a fact, for programs or for people, with the id of the round's trace."""

from __future__ import annotations

import json
import re

import pytest

from concertina_protocol import log
from concertina_protocol.log import LogFormat, log_event
from concertina_protocol.traces import trace_id


def test_lines_of_one_job_say_it_where_they_name_a_round(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log, "_served", "")
    log_event("before", round=7)
    log.serve("uid-1")
    for fields in ({"round": 7}, {"round": 0}, {}):
        log_event("after", **fields)
    before, seven, zero, none = map(json.loads, capsys.readouterr().err.splitlines())
    assert seven["trace"] == trace_id("uid-1", 7)
    assert not [line for line in (before, zero, none) if "trace" in line]


def test_text_is_one_line_with_names_and_values(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log, "_format", LogFormat.JSON)
    log.write_as(LogFormat.TEXT)
    log_event(
        "pod created", job="a/b", round=3, why='it\nwas "so"', empty="", equal="a=b", nothing=None, both=["a", "b"]
    )
    time, _, rest = capsys.readouterr().err.removesuffix("\n").partition(" ")
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z", time)
    assert rest == r"""pod created job=a/b round=3 why="it\nwas \"so\"" empty="" equal="a=b" both=["a","b"]"""
