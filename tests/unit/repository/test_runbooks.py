"""Alerts and runbooks: each problem has an alert, and a page whose panels exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from monitoring.alerts import ALERTS
from monitoring.dashboards import DASHBOARDS

from concertina.diagnosis.problems import RUNBOOKS, Problem

ROOT = Path(__file__).parents[3]
PANEL = re.compile(r"[Pp]anel\s+\*\*([^*]+)\*\*")
BOARD = re.compile(r"\bof\s+(?:dashboard\s+)?`(\w+)`")


def page(problem: Problem) -> str:
    return (ROOT / RUNBOOKS / f"{problem}.md").read_text()


def named(text: str) -> list[tuple[str, str]]:
    """Return the panels that a page names, each with the dashboard that is named next."""
    return [
        (" ".join(panel[1].split()), board[1])
        for panel in PANEL.finditer(text)
        if (board := BOARD.search(text, panel.end()))
    ]


def test_each_problem_has_an_alert() -> None:
    assert sorted(alert.problem for alert in ALERTS) == sorted(Problem)


def test_there_are_no_other_pages() -> None:
    assert {path.stem for path in (ROOT / RUNBOOKS).glob("*.md")} == set(Problem)


@pytest.mark.parametrize("problem", Problem)
def test_its_page_says_what_it_means_what_to_look_at_and_what_to_do(problem: Problem) -> None:
    text = page(problem)
    assert re.findall(r"^#+ (.+)$", text, re.MULTILINE) == [problem, "Check", "Fix", "When the alert ends"]
    assert "`" in text.partition("## Check")[2].partition("## Fix")[0], "a command or a panel"


@pytest.mark.parametrize("problem", Problem)
def test_the_panels_that_it_names_are_there(problem: Problem) -> None:
    text = page(problem)
    panels = named(text)
    assert len(panels) == len(PANEL.findall(text)), "a panel without its dashboard"
    there = {(panel.title, board.name) for board in DASHBOARDS.values() for panel in board.panels}
    assert not set(panels) - there
    assert panels


def test_the_index_lists_each_with_its_severity() -> None:
    listed = re.findall(r"\(runbooks/(\w+)\.md\) \| (\w+) \|", (ROOT / "docs" / "monitoring.md").read_text())
    assert sorted(listed) == sorted((alert.problem.value, alert.severity.value) for alert in ALERTS)
