"""Elements of HTML pages. ElementTree writes all text, so all text is escaped."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from xml.etree import ElementTree as xml

COLOURS = {
    "productive": "#2e7d32", "communication": "#81c784", "straggler": "#f9a825", "input": "#ef6c00",
    "checkpoint": "#6a1b9a", "evaluation": "#0277bd", "compile": "#4dd0e1", "unknown": "#cfd8dc",
    "startup": "#90a4ae",
    "recovery": "#c62828", "replayed": "#e57373", "waiting": "#b0bec5", "stalled": "#5d4037", "suspended": "#eceff1",
}  # fmt: skip
"""Colour for each goodput class."""
STYLE = """
:root { color-scheme: light dark; --paper: #fff; --ink: #222; --soft: #666; --line: #ddd; --curve: #1565c0;
  --green: #2e7d32; --yellow: #9a6700; --red: #c62828 }
@media (prefers-color-scheme: dark) { :root { --paper: #15181c; --ink: #dde1e6; --soft: #98a1ab; --line: #363c44;
  --curve: #64b5f6; --green: #66bb6a; --yellow: #e0b040; --red: #ef7070 } }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 64em; margin: 1.5em auto; padding: 0 1em;
  color: var(--ink); background: var(--paper); overflow-wrap: anywhere }
h1 { font-size: 1.4em; margin: .2em 0 } h2 { font-size: 1.1em; margin: 2em 0 .4em } a { color: var(--curve) }
.scroll { overflow-x: auto } table { border-collapse: collapse; font-variant-numeric: tabular-nums }
th { font-weight: 600; color: var(--soft) }
td, th { text-align: left; vertical-align: top; padding: .2em 1.2em .2em 0; white-space: nowrap }
td:last-child { white-space: normal; min-width: 12em }
svg { width: 100%; display: block } .scroll svg { min-width: 34em } svg text { font-size: 11px; fill: var(--soft) }
code { font-size: .95em; background: var(--line); border-radius: 3px; padding: 0 .25em }
progress { width: 100%; height: .7em; accent-color: var(--green) }
.line { fill: none; stroke: var(--curve); stroke-width: 1.5 } .grid { stroke: var(--line) }
.critical, .warning { border-left: 4px solid var(--red); padding-left: .8em; margin: .8em 0 }
.warning { border-color: var(--yellow) } .critical p, .warning p { margin: .2em 0 }
.swatch { display: inline-block; width: .8em; height: .8em; margin-right: .4em }
.green { color: var(--green) } .yellow { color: var(--yellow) } .red { color: var(--red) } .dim { color: var(--soft) }
""" + "".join(f".{name} {{ fill: {colour}; background: {colour} }}\n" for name, colour in COLOURS.items())  # fmt: skip
Cell = str | xml.Element


def document(title: str) -> tuple[xml.Element, xml.Element, xml.Element]:
    """Return a new HTML document, its head element and its body element."""
    root = xml.Element("html", lang="en")
    head = xml.SubElement(root, "head")
    xml.SubElement(head, "meta", charset="utf-8")
    xml.SubElement(head, "meta", name="viewport", content="width=device-width, initial-scale=1")
    xml.SubElement(head, "title").text = title
    return root, head, xml.SubElement(root, "body")


def written(root: xml.Element) -> str:
    return "<!doctype html>\n" + xml.tostring(root, encoding="unicode", method="html")


def section(parent: xml.Element, title: str) -> xml.Element:
    node = xml.SubElement(parent, "section")
    xml.SubElement(node, "h2").text = title
    return node


def paragraph(parent: xml.Element, text: str, kind: str = "") -> xml.Element:
    node = xml.SubElement(parent, "p", {"class": kind} if kind else {})
    _write(node, text)
    return node


def table(parent: xml.Element, head: Sequence[str], rows: Iterable[Sequence[Cell]]) -> None:
    """Add a table to an element. A table that is wider than the window has its own scroll bar."""
    node = xml.SubElement(xml.SubElement(parent, "div", {"class": "scroll"}), "table")
    for kind, cells in (("th", head), *(("td", row) for row in rows)):
        if cells:
            row = xml.SubElement(node, "tr")
            for cell in cells:
                cell_node = xml.SubElement(row, kind)
                if isinstance(cell, str):
                    cell_node.text = cell
                else:
                    cell_node.append(cell)


def bullets(parent: xml.Element, sentences: Iterable[str]) -> None:
    node = xml.SubElement(parent, "ul")
    for sentence in sentences:
        _write(xml.SubElement(node, "li"), sentence)


def _write(node: xml.Element, text: str) -> None:
    """Set the text of an element. Text between backticks becomes a `code` element."""
    node.text, *others = text.split("`")
    for code, after in zip(others[::2], [*others[1::2], ""], strict=False):
        xml.SubElement(node, "code").text = code
        node[-1].tail = after


def element(kind: str, text: str, **attributes: str) -> xml.Element:
    """Return a new element without a parent.

    Args:
        kind: Tag of the element.
        text: Text of the element.
        **attributes: Attributes of the element. `class_` is written as `class`.
    """
    node = xml.Element(kind, {name.rstrip("_"): value for name, value in attributes.items()})
    node.text = text
    return node
