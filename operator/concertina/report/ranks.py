"""Diagram of ranks on nodes, as one SVG file that loads no other resources."""

from __future__ import annotations

from xml.etree import ElementTree as xml

from concertina.planning.layout import ParallelLayout
from concertina_trainer.degrees import Dimension

CELL, GAP, TOP, MOST_NODES, MOST_PER_NODE, NODES_IN_ROW = 24, 10, 58, 64, 16, 8
SHARES = ("#1565c0", "#2e7d32", "#ef6c00", "#6a1b9a", "#0277bd", "#c62828", "#5d4037", "#00838f")
"""Colours of data-parallel groups. With more groups than colours, colours are reused."""
STYLE = """
text { font: 11px system-ui, sans-serif; fill: #222 }
.small { font-size: 9px; fill: #fff } .head { font-size: 14px }
"""


def picture(name: str, layout: ParallelLayout) -> str:
    """Return the diagram as SVG.

    A square is a rank, and a frame around squares is a replica on its node. Ranks with the same colour compute the same
    sequences. The number of drawn nodes is limited, and a line of text gives the number of the others.
    """
    nodes = layout.size // layout.per_node
    shown, across = min(nodes, MOST_NODES), min(nodes, NODES_IN_ROW)
    cells = min(layout.per_node, MOST_PER_NODE)
    columns = min(cells, 4)
    wide, high = columns * CELL + GAP, -(-cells // columns) * CELL + GAP + 14
    width = max(560, across * (wide + GAP) + GAP)
    height = TOP + -(-shown // across) * (high + GAP) + 24
    root = xml.Element(
        "svg", {"xmlns": "http://www.w3.org/2000/svg", "viewBox": f"0 0 {width} {height}", "role": "img"}
    )
    xml.SubElement(root, "title").text = f"Ranks of {name} on nodes"
    xml.SubElement(root, "style").text = STYLE
    _text(root, GAP, 20, f"{name}: {layout.size} ranks on {nodes} nodes", "head")
    _text(root, GAP, 40, str(layout.degrees))
    for node in range(shown):
        x = GAP + node % across * (wide + GAP)
        y = TOP + node // across * (high + GAP)
        frame = {"x": f"{x}", "y": f"{y}", "width": f"{wide}", "height": f"{high}", "fill": "none", "stroke": "#bbb"}
        xml.SubElement(root, "rect", frame)
        _text(root, x + 5, y + 12, f"node {node}")
        for i in range(cells):
            _rank(root, x + 5 + i % columns * CELL, y + 16 + i // columns * CELL, node * layout.per_node + i, layout)
    omitted = [f"{nodes - shown} more nodes"] if nodes > shown else []
    omitted += [f"{layout.per_node - cells} more ranks on each"] if layout.per_node > cells else []
    _text(root, GAP, height - 8, "; ".join([*omitted, "a colour: ranks that compute the same sequences"]))
    return xml.tostring(root, encoding="unicode") + "\n"


def _rank(root: xml.Element, x: int, y: int, rank: int, layout: ParallelLayout) -> None:
    coordinates = layout.degrees.place(rank)
    group = rank // layout.parallelism.group
    square = {
        "x": f"{x}", "y": f"{y}", "width": f"{CELL - 2}", "height": f"{CELL - 2}", "fill": SHARES[group % len(SHARES)],
        "fill-opacity": f"{1 - 0.5 * coordinates.pipeline / max(1, layout.parallelism.pipeline):.2f}",
    }  # fmt: skip
    position = ", ".join(
        f"{dimension} {coordinates.degree(dimension)}" for dimension in Dimension if layout.degree(dimension) > 1
    )
    if layout.parallelism.expert > 1:
        position += f", expert {layout.expert_place(rank)}"
    xml.SubElement(xml.SubElement(root, "rect", square), "title").text = f"rank {rank}: {position}"
    _text(root, x + (CELL - 2) // 2, y + 14, f"{rank}", "small", middle=True)


def _text(parent: xml.Element, x: int, y: int, text: str, style: str = "", middle: bool = False) -> None:
    attributes = {"x": f"{x}", "y": f"{y}"} | ({"class": style} if style else {})
    xml.SubElement(parent, "text", attributes | ({"text-anchor": "middle"} if middle else {})).text = text
