"""The id of a round's trace stays as the page says, for agents and operators of all versions, and is in the log."""

from __future__ import annotations

import json
import subprocess

import pytest

from concertina_protocol import log
from concertina_protocol.traces import trace_id


def test_it_is_what_the_page_computes() -> None:
    command = "printf 5ba7b810-9dad-11d1-80b4-00c04fd430c8/7 | sha256sum | cut -c -32"
    found = subprocess.run(command, shell=True, capture_output=True, text=True, check=True).stdout.strip()
    assert trace_id("5ba7b810-9dad-11d1-80b4-00c04fd430c8", 7) == found


def test_lines_of_one_job_say_it_where_they_name_a_round(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log, "_served", "")
    log.log_event("before", round=7)
    log.serve("uid-1")
    for fields in ({"round": 7}, {"round": 0}, {}):
        log.log_event("after", **fields)
    before, seven, zero, none = map(json.loads, capsys.readouterr().err.splitlines())
    assert seven["trace"] == trace_id("uid-1", 7)
    assert not [line for line in (before, zero, none) if "trace" in line]
