"""Plots as SVG elements, for a page that loads nothing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from xml.etree import ElementTree as xml

WIDTH, HEIGHT = 720, 200
LEFT, RIGHT, TOP, BOTTOM = 70, 12, 10, 34
MOST_POINTS = 1000
"""Of a line: more than there are pixels."""
Point = tuple[float, float]


def line(points: Sequence[Point], x_name: str, y_name: str, steps: bool = False) -> xml.Element:
    """`points` in order of x, finite. `steps`: a value holds until the next one."""
    points = _fewer(points)
    left, right = points[0][0], max(points[-1][0], points[0][0] + 1e-9)
    values = [y for _, y in points]
    low, high = (0.0 if steps else min(values)), max(values)
    high = high if high > low else low + 1.0

    def place(x: float, y: float) -> str:
        across = LEFT + (x - left) / (right - left) * (WIDTH - LEFT - RIGHT)
        return f"{across:.1f},{HEIGHT - BOTTOM - (y - low) / (high - low) * (HEIGHT - TOP - BOTTOM):.1f}"

    found = xml.Element("svg", viewBox=f"0 0 {WIDTH} {HEIGHT}", role="img")
    xml.SubElement(found, "title").text = f"{y_name} by {x_name}"
    middle = (low + high) / 2
    for value in (low, middle, high) if not steps or middle.is_integer() else (low, high):
        across, down = place(left, value).split(",")
        xml.SubElement(found, "line", {"class": "grid", "x1": across, "x2": f"{WIDTH - RIGHT}", "y1": down, "y2": down})
        _text(found, f"{LEFT - 6}", f"{float(down) + 4:.1f}", "end", f"{value:.4g}")
    for at, anchor in ((left, "start"), (right, "end")):
        _text(
            found,
            place(at, low).split(",")[0],
            f"{HEIGHT - BOTTOM + 16}",
            anchor,
            f"{at:,.0f}" if at >= 100 else f"{at:.3g}",
        )
    _text(found, f"{(LEFT + WIDTH) / 2}", f"{HEIGHT - 4}", "middle", x_name)
    places = []
    for number, (x, y) in enumerate(points):
        if steps and number:
            places.append(place(x, points[number - 1][1]))
        places.append(place(x, y))
    xml.SubElement(found, "polyline", {"class": "line", "points": " ".join(places)})
    return found


def bar(parts: Sequence[tuple[str, float]]) -> xml.Element:
    """One bar of all parts, in their order; each part's class is its name, its title says how much it is."""
    total = sum(part for _, part in parts) or 1.0
    found, begin = xml.Element("svg", viewBox=f"0 0 {WIDTH} 28", role="img"), 0.0
    for name, part in parts:
        width = part / total * WIDTH
        shown = {"class": f"part {name}", "x": f"{begin:.2f}", "width": f"{width:.2f}", "height": "28"}
        xml.SubElement(xml.SubElement(found, "rect", shown), "title").text = f"{name} {part / total:.1%}"
        begin += width
    return found


def _fewer(points: Sequence[Point]) -> Sequence[Point]:
    """Every n-th and the last, where there are too many."""
    every = math.ceil(len(points) / MOST_POINTS)
    return points if every <= 1 else [*points[:-1:every], points[-1]]


def _text(parent: xml.Element, x: str, y: str, anchor: str, text: str) -> None:
    xml.SubElement(parent, "text", {"x": x, "y": y, "text-anchor": anchor}).text = text
