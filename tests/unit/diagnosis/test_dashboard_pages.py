"""Pages of `concertina dashboard`: their size is bounded, and names and messages of jobs are only text in them."""

from __future__ import annotations

import itertools
import re
from typing import Any
from xml.etree import ElementTree as xml

import pytest

from builders.jobs import T0, spec
from concertina.api.loss_history import LossHistory, Point
from concertina.api.status import Condition, JobStatus, rfc3339
from concertina.diagnosis.diagnose import diagnose
from concertina.diagnosis.evidence import JobEvidence
from concertina.report.dashboard_page import PAGE_ROWS, DashboardView, job_page, jobs_page, policy, trouble_page
from concertina.report.document import paragraph
from concertina.terminal.job_table import NO_GROUP, RowOrder, ordered, row

EVIL = "</main><script>alert(1)</script>\"'&"


def job(name: str, labels: dict[str, str] | None = None) -> dict[str, Any]:
    meta = {"name": name, "namespace": "team", "creationTimestamp": rfc3339(T0), "labels": labels or {}}
    return {"metadata": meta, "status": {}}


def test_a_thousand_jobs_are_ten_pages() -> None:
    rows = ordered((row(job(f"j{number:04}")) for number in range(1000)), RowOrder.NAME)

    def names(page: int) -> list[str]:
        return re.findall(r"/jobs/team/(j\d+)", jobs_page(rows, DashboardView(False, page=page), T0, "n"))

    assert names(1) == [f"j{number:04}" for number in range(PAGE_ROWS)]
    assert names(10)[-1] == "j0999"
    assert names(99) == names(10), "the last one"
    assert len(jobs_page(rows, DashboardView(True), T0, "n")) < 100_000
    links = re.findall(r"page=(\d+)\">\d", jobs_page(rows, DashboardView(False, page=2), T0, "n"))
    assert links == [str(number) for number in range(1, 11) if number != 2]


def test_groups_stand_before_their_jobs_and_links_keep_the_rest_of_the_view() -> None:
    rows = ordered(map(row, [job("a", {"who": EVIL}), job("b"), job("c")]), RowOrder.NAME, "who")
    text = jobs_page(rows, DashboardView(True, by="who", order=RowOrder.COST), T0, "n")
    cells = re.findall(r"<td>(.*?)</td>", text)
    first = [cell for cell, following in itertools.pairwise(cells) if following == "team"]
    assert first == [NO_GROUP, "", EVIL.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")]
    assert "/?by=queue&amp;sort=cost&amp;page=1" in text
    assert "/?by=who&amp;sort=name&amp;page=1" in text
    assert jobs_page(rows, DashboardView(True, by=EVIL), T0, "n").count("<script") == 1


def test_what_is_out_of_date_says_so() -> None:
    assert "it is away. The page shows the last known state" in jobs_page(
        [row(job("a"))], DashboardView(False), T0, "n", "it is away."
    )


def test_what_a_job_says_is_text_and_the_script_is_ours_alone() -> None:
    ready = Condition(type="Ready", status="False", reason=EVIL, message=EVIL, last_transition_time=rfc3339(T0))
    history = LossHistory(2, (Point(int(T0), 1, 3.0, 3), Point(int(T0) + 60, 9, 1.0, 2)))
    seen = JobEvidence(spec(), JobStatus(conditions=(ready,), history=history.packed()), T0 + 60, T0)
    events = [{"type": "Warning", "reason": EVIL, "message": EVIL, "lastTimestamp": rfc3339(T0)}]
    text = job_page(f"team/{EVIL}", seen, diagnose(seen), (EVIL,), events, "n")
    assert text.count("<script") == text.count("</script>") == text.count("</main>") == 1
    assert text.count("&lt;script&gt;") >= 6
    assert text.count("<polyline") == 2, "world and loss, from the status"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("no code", "<p>no code</p>"),
        ("`a`", "<p><code>a</code></p>"),
        ("say `a` and `b`.", "<p>say <code>a</code> and <code>b</code>.</p>"),
        ("`open", "<p><code>open</code></p>"),
        ("`<b>`", "<p><code>&lt;b&gt;</code></p>"),
    ],
)
def test_commands_in_a_sentence_are_code(text: str, shown: str) -> None:
    parent = xml.Element("div")
    paragraph(parent, text)
    assert xml.tostring(parent[0], encoding="unicode", method="html") == shown


def test_a_page_of_trouble_is_text_too() -> None:
    assert trouble_page(EVIL, EVIL, "n").count("<script") == 1


@pytest.mark.parametrize("part", ["default-src 'none'", "script-src 'nonce-n'", "frame-ancestors 'none'"])
def test_the_policy_lets_one_script_live(part: str) -> None:
    assert part in policy("n").split("; ")
    assert "unsafe" not in policy("n")
