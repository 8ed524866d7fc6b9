"""Plots as SVG elements, for a page that loads no other resources."""

from __future__ import annotations

import math
from collections.abc import Sequence
from xml.etree import ElementTree as xml

WIDTH, HEIGHT = 720, 200
LEFT, RIGHT, TOP, BOTTOM = 70, 12, 10, 34
MOST_POINTS = 1000
"""Maximum number of points in a line. A plot has fewer pixels in its width than this."""
Point = tuple[float, float]


def line(points: Sequence[Point], x_name: str, y_name: str, steps: bool = False) -> xml.Element:
    """Return a line plot.

    Args:
        points: Points with finite coordinates, in order of x.
        x_name: Name of the x axis.
        y_name: Name of the y axis.
        steps: Whether to draw horizontal steps, each at the value of the previous point.
    """
    points = _fewer(points)
    left, right = points[0][0], max(points[-1][0], points[0][0] + 1e-9)
    values = [y for _, y in points]
    low, high = (0.0 if steps else min(values)), max(values)
    high = high if high > low else low + 1.0

    def position(x: float, y: float) -> str:
        across = LEFT + (x - left) / (right - left) * (WIDTH - LEFT - RIGHT)
        return f"{across:.1f},{HEIGHT - BOTTOM - (y - low) / (high - low) * (HEIGHT - TOP - BOTTOM):.1f}"

    svg = xml.Element("svg", viewBox=f"0 0 {WIDTH} {HEIGHT}", role="img")
    xml.SubElement(svg, "title").text = f"{y_name} by {x_name}"
    middle = (low + high) / 2
    for value in (low, middle, high) if not steps or middle.is_integer() else (low, high):
        across, down = position(left, value).split(",")
        xml.SubElement(svg, "line", {"class": "grid", "x1": across, "x2": f"{WIDTH - RIGHT}", "y1": down, "y2": down})
        _text(svg, f"{LEFT - 6}", f"{float(down) + 4:.1f}", "end", f"{value:.4g}")
    for x_value, anchor in ((left, "start"), (right, "end")):
        _text(
            svg,
            position(x_value, low).split(",")[0],
            f"{HEIGHT - BOTTOM + 16}",
            anchor,
            f"{x_value:,.0f}" if x_value >= 100 else f"{x_value:.3g}",
        )
    _text(svg, f"{(LEFT + WIDTH) / 2}", f"{HEIGHT - 4}", "middle", x_name)
    positions = []
    for number, (x, y) in enumerate(points):
        if steps and number:
            positions.append(position(x, points[number - 1][1]))
        positions.append(position(x, y))
    xml.SubElement(svg, "polyline", {"class": "line", "points": " ".join(positions)})
    return svg


def bar(parts: Sequence[tuple[str, float]]) -> xml.Element:
    """Return a bar that is divided in proportion to the given values.

    The CSS class of each part is its name, and its tooltip shows its share.
    """
    total = sum(part for _, part in parts) or 1.0
    svg, begin = xml.Element("svg", viewBox=f"0 0 {WIDTH} 28", role="img"), 0.0
    for name, part in parts:
        width = part / total * WIDTH
        shown = {"class": f"part {name}", "x": f"{begin:.2f}", "width": f"{width:.2f}", "height": "28"}
        xml.SubElement(xml.SubElement(svg, "rect", shown), "title").text = f"{name} {part / total:.1%}"
        begin += width
    return svg


def _fewer(points: Sequence[Point]) -> Sequence[Point]:
    """Return at most about MOST_POINTS of the points: every n-th point and the last one."""
    stride = math.ceil(len(points) / MOST_POINTS)
    return points if stride <= 1 else [*points[:-1:stride], points[-1]]


def _text(parent: xml.Element, x: str, y: str, anchor: str, text: str) -> None:
    xml.SubElement(parent, "text", {"x": x, "y": y, "text-anchor": anchor}).text = text
