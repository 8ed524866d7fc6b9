"""A pytest plugin that writes a line of JSON to the file of GPU_CASES as each test begins and ends.

The file says how far pytest came when it was killed.
"""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # The runner imports VARIABLE, even without pytest.
    import pytest

VARIABLE = "GPU_CASES"


def _write(line: dict[str, Any]) -> None:
    with open(os.environ[VARIABLE], "a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def pytest_runtest_logstart(nodeid: str) -> None:
    _write({"name": nodeid, "outcome": "started"})


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Report a test once: its call, or the part before or after it that did not pass."""
    if report.when != "call" and report.passed:
        return
    line: dict[str, Any] = {"name": report.nodeid, "outcome": report.outcome, "seconds": round(report.duration, 2)}
    if report.skipped:
        line["reason"] = report.longrepr[2].removeprefix("Skipped: ")
    elif report.failed:
        line["error"] = report.longreprtext
    if report.user_properties:
        line["figures"] = dict(report.user_properties)
    _write(line)
