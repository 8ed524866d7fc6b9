"""The pages of `concertina dashboard`: all jobs, a job, and what went wrong instead. They ask for themselves again."""

from __future__ import annotations

import dataclasses
import urllib.parse
from collections.abc import Iterator, Sequence
from xml.etree import ElementTree as xml

from rich.text import Text

from concertina.diagnosis.diagnose import Diagnosis
from concertina.diagnosis.evidence import JobEvidence
from concertina.kube.resources import Raw
from concertina.report.document import STYLE, Cell, document, element, paragraph, table, written
from concertina.report.page import chapters, headline
from concertina.terminal import advice
from concertina.terminal.job_table import COLUMNS, NO_GROUP, JobRow, RowOrder, cells, group, summary

PAGE_ROWS = 100
AGAIN = """
const again = async () => {
  try {
    if (document.hidden || getSelection().type === "Range") return;
    const answer = await fetch(location.href);
    const fresh = new DOMParser().parseFromString(await answer.text(), "text/html");
    document.querySelector("main").replaceWith(fresh.querySelector("main"));
    document.getElementById("silent").hidden = true;
  } catch {
    document.getElementById("silent").hidden = false;
  } finally {
    setTimeout(again, 5000);
  }
};
setTimeout(again, 5000);
"""
"""Not while the page is out of sight, or a text is being selected. What was there stays when nobody answers."""
SILENT = "concertina dashboard does not answer any more: this is what it said last."
WIDE = "body { max-width: none; margin: 1.5em } form { display: inline }"


@dataclasses.dataclass(frozen=True)
class DashboardView:
    """Which jobs are shown, and how."""

    all_namespaces: bool
    by: str = ""
    order: RowOrder = RowOrder.ATTENTION
    page: int = 1

    @property
    def address(self) -> str:
        return "/?" + urllib.parse.urlencode({"by": self.by, "sort": self.order.value, "page": self.page})


def policy(nonce: str) -> str:
    """For the header: one style and one script, which may ask this server, are all that comes alive."""
    return (
        f"default-src 'none'; style-src 'nonce-{nonce}'; script-src 'nonce-{nonce}'; connect-src 'self'; "
        "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
    )


def jobs_page(rows: Sequence[JobRow], view: DashboardView, now: float, nonce: str, trouble: str = "") -> str:
    """`rows` in their order; `now`: Unix seconds; `trouble`: why they may be out of date, in a sentence."""
    root, body, main = _living("TrainingJobs", nonce, WIDE)
    body.insert(0, _ways(view))
    body.insert(0, element("h1", "TrainingJobs"))
    if trouble:
        paragraph(main, f"{trouble} Below is what was known before; it is asked again every few seconds.", "warning")
    paragraph(main, summary(rows) if rows else "There are no TrainingJobs here.")
    pages = max(1, -(-len(rows) // PAGE_ROWS))
    shown = min(view.page, pages)
    if rows:
        first = [view.by.capitalize()] if view.by else []
        names = (*first, *(["Namespace"] if view.all_namespaces else []), *COLUMNS)
        table(main, names, _rows(rows[(shown - 1) * PAGE_ROWS : shown * PAGE_ROWS], view, now))
    if pages > 1:
        ways = paragraph(main, "")
        for number in range(1, pages + 1):
            _way(ways, f"{number}", dataclasses.replace(view, page=number), number == shown)
    return written(root)


def job_page(
    name: str,
    seen: JobEvidence,
    found: Diagnosis,
    unseen: Sequence[str],
    events: Sequence[Raw],
    nonce: str,
) -> str:
    """`name`: NAMESPACE/NAME; the others as for `page.page`."""
    root, body, main = _living(name, nonce)
    body.insert(0, element("a", "All jobs", href="/"))
    headline(main, name, seen.status)
    if not found.findings:  # each says what comes next
        paragraph(main, f"Next: {advice.next_step(name.partition('/')[2], seen.status)}")
    chapters(main, seen, found, unseen, events)
    return written(root)


def trouble_page(title: str, sentence: str, nonce: str) -> str:
    """Instead of another page."""
    root, body, main = _living(title, nonce)
    body.insert(0, element("a", "All jobs", href="/"))
    xml.SubElement(main, "h1").text = title
    paragraph(main, f"{sentence} It is asked again every few seconds.", "warning")
    return written(root)


def _living(title: str, nonce: str, style: str = "") -> tuple[xml.Element, xml.Element, xml.Element]:
    """A document, its body, and of that what is put anew again and again."""
    root, head, body = document(title)
    head.append(element("style", STYLE + style, nonce=nonce))
    body.append(element("p", SILENT, class_="warning", id="silent", hidden="hidden"))
    main = xml.SubElement(body, "main")
    body.append(element("script", AGAIN, nonce=nonce))
    return root, body, main


def _ways(view: DashboardView) -> xml.Element:
    """To the same list in another order or other groups."""
    found, first = xml.Element("nav"), dataclasses.replace(view, page=1)
    line = element("div", "Groups: ")
    found.append(line)
    for by in dict.fromkeys(("", "namespace", "queue", view.by)):
        _way(line, by or "none", dataclasses.replace(first, by=by), by == view.by)
    form = xml.SubElement(line, "form", action="/")
    xml.SubElement(form, "input", name="sort", value=view.order.value, type="hidden")
    xml.SubElement(form, "input", name="by", placeholder="or a label's key", size="16")
    line = element("div", "Order by: ")
    found.append(line)
    for order in RowOrder:
        _way(line, order.value, dataclasses.replace(first, order=order), order is view.order)
    return found


def _way(parent: xml.Element, text: str, view: DashboardView, here: bool) -> None:
    way = element("strong", text) if here else element("a", text, href=view.address)
    way.tail = "  "
    parent.append(way)


def _rows(rows: Sequence[JobRow], view: DashboardView, now: float) -> Iterator[Sequence[Cell]]:
    before: str | None = None
    for row in rows:
        here = group(row, view.by)
        first = [here or NO_GROUP if here != before else ""] if view.by else []
        before = here
        _, *others = map(_cell, cells(row, now))
        name = element("a", row.name, href=f"/jobs/{row.namespace}/{row.name}")
        yield (*first, *([row.namespace] if view.all_namespaces else []), name, *others)


def _cell(cell: str | Text) -> Cell:
    return element("span", cell.plain, class_=str(cell.style)) if isinstance(cell, Text) else cell
