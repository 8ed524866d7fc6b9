"""Pages of `concertina dashboard`: the list of jobs, one job, and error pages. A page refreshes itself."""

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
"""Script that refreshes the page.

The script pauses while the page is not visible or the user selects text. If the server does not respond, the old
content remains.
"""
SILENT = "concertina dashboard no longer answers. This page shows its last answer."
WIDE = "body { max-width: none; margin: 1.5em } form { display: inline }"


@dataclasses.dataclass(frozen=True)
class DashboardView:
    """Options of the dashboard's list of jobs: namespaces, grouping, order and page number."""

    all_namespaces: bool
    by: str = ""
    order: RowOrder = RowOrder.ATTENTION
    page: int = 1

    @property
    def address(self) -> str:
        return "/?" + urllib.parse.urlencode({"by": self.by, "sort": self.order.value, "page": self.page})


def policy(nonce: str) -> str:
    """Return the value of the Content-Security-Policy header.

    The policy allows only the style and the script with this nonce. The script may send requests only to this server.
    """
    return (
        f"default-src 'none'; style-src 'nonce-{nonce}'; script-src 'nonce-{nonce}'; connect-src 'self'; "
        "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
    )


def jobs_page(rows: Sequence[JobRow], view: DashboardView, now: float, nonce: str, trouble: str = "") -> str:
    """Return the page with the list of jobs.

    Args:
        rows: Sorted rows.
        view: Settings of the list.
        now: Unix time in seconds.
        nonce: Nonce of the style and of the script.
        trouble: Sentence that says why the rows may be out of date. Empty if they are current.
    """
    root, body, main = _refreshing_document("TrainingJobs", nonce, WIDE)
    body.insert(0, _navigation(view))
    body.insert(0, element("h1", "TrainingJobs"))
    if trouble:
        paragraph(main, f"{trouble} The page shows the last known state and retries every few seconds.", "warning")
    paragraph(main, summary(rows) if rows else "There are no TrainingJobs here.")
    pages = max(1, -(-len(rows) // PAGE_ROWS))
    shown = min(view.page, pages)
    if rows:
        first = [view.by.capitalize()] if view.by else []
        names = (*first, *(["Namespace"] if view.all_namespaces else []), *COLUMNS)
        table(main, names, _rows(rows[(shown - 1) * PAGE_ROWS : shown * PAGE_ROWS], view, now))
    if pages > 1:
        page_links = paragraph(main, "")
        for number in range(1, pages + 1):
            _add_link(page_links, f"{number}", dataclasses.replace(view, page=number), number == shown)
    return written(root)


def job_page(
    name: str,
    evidence: JobEvidence,
    diagnosis: Diagnosis,
    unseen: Sequence[str],
    events: Sequence[Raw],
    nonce: str,
) -> str:
    """Return the page of one job.

    Args:
        name: NAMESPACE/NAME of the job.
        evidence: Input of the diagnosis.
        diagnosis: Diagnosis of the job.
        unseen: Sentences about information that could not be read.
        events: Events about the job, in any order.
        nonce: Nonce of the style and of the script.
    """
    root, body, main = _refreshing_document(name, nonce)
    body.insert(0, element("a", "All jobs", href="/"))
    headline(main, name, evidence.status)
    if not diagnosis.findings:  # Each finding already says what to try next.
        paragraph(main, f"Next: {advice.next_step(name.partition('/')[2], evidence.status)}")
    chapters(main, evidence, diagnosis, unseen, events)
    return written(root)


def trouble_page(title: str, sentence: str, nonce: str) -> str:
    """Return an error page, which the browser shows in place of the requested page."""
    root, body, main = _refreshing_document(title, nonce)
    body.insert(0, element("a", "All jobs", href="/"))
    xml.SubElement(main, "h1").text = title
    paragraph(main, f"{sentence} The dashboard retries every few seconds.", "warning")
    return written(root)


def _refreshing_document(title: str, nonce: str, style: str = "") -> tuple[xml.Element, xml.Element, xml.Element]:
    """Return a new HTML document, its body, and the element in the body whose content the page's script refreshes."""
    root, head, body = document(title)
    head.append(element("style", STYLE + style, nonce=nonce))
    body.append(element("p", SILENT, class_="warning", id="silent", hidden="hidden"))
    main = xml.SubElement(body, "main")
    body.append(element("script", AGAIN, nonce=nonce))
    return root, body, main


def _navigation(view: DashboardView) -> xml.Element:
    """Return links that change the grouping and the order of the list."""
    navigation, first = xml.Element("nav"), dataclasses.replace(view, page=1)
    line = element("div", "Groups: ")
    navigation.append(line)
    for by in dict.fromkeys(("", "namespace", "queue", view.by)):
        _add_link(line, by or "none", dataclasses.replace(first, by=by), by == view.by)
    form = xml.SubElement(line, "form", action="/")
    xml.SubElement(form, "input", name="sort", value=view.order.value, type="hidden")
    xml.SubElement(form, "input", name="by", placeholder="or a label's key", size="16")
    line = element("div", "Order by: ")
    navigation.append(line)
    for order in RowOrder:
        _add_link(line, order.value, dataclasses.replace(first, order=order), order is view.order)
    return navigation


def _add_link(parent: xml.Element, text: str, view: DashboardView, is_current: bool) -> None:
    link = element("strong", text) if is_current else element("a", text, href=view.address)
    link.tail = "  "
    parent.append(link)


def _rows(rows: Sequence[JobRow], view: DashboardView, now: float) -> Iterator[Sequence[Cell]]:
    previous_group: str | None = None
    for row in rows:
        row_group = group(row, view.by)
        first = [row_group or NO_GROUP if row_group != previous_group else ""] if view.by else []
        previous_group = row_group
        _, *others = map(_cell, cells(row, now))
        name = element("a", row.name, href=f"/jobs/{row.namespace}/{row.name}")
        yield (*first, *([row.namespace] if view.all_namespaces else []), name, *others)


def _cell(cell: str | Text) -> Cell:
    return element("span", cell.plain, class_=str(cell.style)) if isinstance(cell, Text) else cell
