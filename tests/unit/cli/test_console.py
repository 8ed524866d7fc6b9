"""Texts of a tenant on the reader's terminal."""

from __future__ import annotations

import io

import pytest
from rich.live import Live

from concertina.api.restarts import LastFailure
from concertina.api.status import JobStatus
from concertina.cli.logs import say
from concertina.terminal.console import HarmlessConsole
from concertina.terminal.show import detail

ATTACK = "\x1b[2J\x1b]0;OWNED\x07 all is well \x9b31m\r\u202eflipped"
SHOWN = "\ufffd[2J\ufffd]0;OWNED\ufffd all is well \ufffd31m\ufffd\ufffdflipped"


def terminal() -> tuple[HarmlessConsole, io.StringIO]:
    output = io.StringIO()
    return HarmlessConsole(file=output, force_terminal=True, markup=False, width=200, color_system="standard"), output


def test_a_script_s_last_lines_do_not_command_the_terminal() -> None:
    at = "2026-01-01T00:00:00Z"
    failure = LastFailure(at=at, round=1, reason="WorkerFailed", message="boom", last_lines=(ATTACK,))
    status = JobStatus(last_failure=failure).manifest()
    job = {"metadata": {"name": "demo", "namespace": "team"}, "spec": {"replicas": 1}, "status": status}
    console, output = terminal()
    console.print(detail(job))
    assert "\ufffd[2J\ufffd]0;OWNED all is well \ufffd31m\ufffdflipped" in output.getvalue(), "rich drops BEL and CR"
    assert "\x1b[1m" in output.getvalue(), "colours and bold stay"


def test_a_live_view_moves_the_cursor_and_a_text_in_it_does_not() -> None:
    console, output = terminal()
    with Live(console=console, auto_refresh=False) as live:
        live.update(ATTACK, refresh=True)
        live.update(ATTACK, refresh=True)
    assert "\x1b[2K" in output.getvalue(), "the view is drawn in place"
    assert "\x1b[2J" not in output.getvalue()


def test_a_sentence_beside_the_log_is_harmless(capsys: pytest.CaptureFixture[str]) -> None:
    say(ATTACK)
    assert capsys.readouterr().err == f"{SHOWN}\n"
