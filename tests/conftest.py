"""For all tests."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from builders.drills import FIGURES

# What its checks compare is shown, as if it were a test.
pytest.register_assert_rewrite("builders.strange")
# An example's time says more about the machine's load than about the code.
settings.register_profile("concertina", deadline=None)
settings.load_profile("concertina")
# Of a shell's background job SIGINT is ignored, and so by all that tests start: Ctrl-C could not be tested.
signal.signal(signal.SIGINT, signal.default_int_handler)


TIMES = Path(__file__).with_name("times.json")
"""Seconds of each test that takes more than LONG, as of when it was last written: CONCERTINA_TIMES=write make test."""
LONG, NEWS = 5.0, 2.0
"""A test is named that takes so many times as long as it is known to, or as LONG."""


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Tests that have become slow, and the figures of the drills that were played: seconds from the blow on."""
    _compare_times(terminalreporter)
    if lines := config.stash.get(FIGURES, []):
        terminalreporter.section("drills: seconds from the blow on")
        for line in lines:
            terminalreporter.write_line(line)


def _compare_times(terminalreporter: pytest.TerminalReporter) -> None:
    passed = [report for report in terminalreporter.stats.get("passed", ()) if report.when == "call"]
    known: dict[str, float] = json.loads(TIMES.read_text())
    if os.environ.get("CONCERTINA_TIMES") == "write":
        known |= {report.nodeid: round(report.duration, 1) for report in passed if report.duration > LONG}
        TIMES.write_text(json.dumps(dict(sorted(known.items())), indent=1) + "\n")
        return
    slow = [report for report in passed if report.duration > NEWS * max(LONG, known.get(report.nodeid, LONG))]
    if slow:
        terminalreporter.section(f"slower than {TIMES.name} says")
        for report in sorted(slow, key=lambda report: -report.duration):
            before = known.get(report.nodeid)
            was = f"was {before:.0f} s" if before else "is new"
            terminalreporter.write_line(f"{report.duration:6.1f} s, {was}: {report.nodeid}")


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Of a process that runs some of the tests beside others: its figures are told by the one that started it."""
    if (output := getattr(session.config, "workeroutput", None)) is not None:
        output["figures"] = session.config.stash.get(FIGURES, [])


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    node.config.stash.setdefault(FIGURES, []).extend(getattr(node, "workeroutput", {}).get("figures", []))
