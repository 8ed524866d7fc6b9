"""Log with one line for each fact, for programs or for people, with the id of the round's trace."""

from __future__ import annotations

import json
import re

import pytest

from concertina_protocol import log
from concertina_protocol.log import LogFormat, log_event
from concertina_protocol.traces import trace_id


def test_lines_of_one_job_say_which_it_is_and_how_far(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log, "_served", None)
    log_event("before", round=7)
    log.reached(7, 40)
    log.serve("uid-1", "team/a")
    for fields in ({"round": 7}, {"round": 0}, {}):
        log_event("after", **fields)
    log.reached(7, 41)
    for fields in ({}, {"round": 7, "rank": 1}, {"round": 8}, {"step": 3}):
        log_event("training", **fields)
    before, *lines = map(json.loads, capsys.readouterr().err.splitlines())
    assert before.keys() == {"t", "event", "round"}
    assert {line["job"] for line in lines} == {"team/a"}
    seven = trace_id("uid-1", 7)
    said = [(line.get("round"), line.get("trace"), line.get("step")) for line in lines]
    assert said == [
        *((7, seven, None), (0, None, None), (None, None, None)),
        *((7, seven, 41), (7, seven, 41), (8, trace_id("uid-1", 8), None), (7, seven, 3)),
    ]


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
