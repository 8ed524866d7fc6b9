"""A run's course in one line of text each. Pure."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable, Sequence

from concertina.api.loss_history import LossHistory, Point

BLOCKS = "▁▂▃▄▅▆▇█"
WIDTH = 60
"""Columns; each is an equal part of the time from the first point to the last."""
NOTHING = " "
"""In a column whose time no point was told in: it did not train then."""
LATE = 3
"""Times the usual gap between points: one that is longer was no training."""


def loss(history: LossHistory, width: int = WIDTH) -> str:
    """From the lowest loss to the highest; without any, nothing."""
    return _line([_last(point.loss for point in column) for column in _columns(history.points, width)], low=None)


def world(history: LossHistory, width: int = WIDTH) -> str:
    """Members, from none on; of a column the fewest."""
    columns = _columns(history.points, width)
    return _line([min((point.replicas for point in column), default=None) for column in columns], low=0)


def _columns(points: Sequence[Point], width: int) -> list[list[Point]]:
    """What was told in each part of the time; where a point is only a little late, the one before still holds."""
    if not points:
        return []
    begin, span = points[0].at, points[-1].at - points[0].at
    usual = statistics.median([b.at - a.at for a, b in itertools.pairwise(points)] or [0])
    width = min(width, len(points))
    columns: list[list[Point]] = [[] for _ in range(width)]
    at_last = 0
    for before, point in itertools.pairwise((points[0], *points)):
        at = min(width - 1, (point.at - begin) * width // span) if span else 0
        if point.at - before.at <= LATE * usual:
            columns[at_last + 1 : at] = [[before] for _ in columns[at_last + 1 : at]]
        columns[at].append(point)
        at_last = at
    return columns


def _last(values: Iterable[float | None]) -> float | None:
    return next((value for value in reversed(list(values)) if value is not None), None)


def _line(values: Sequence[float | None], low: float | None) -> str:
    known = [value for value in values if value is not None]
    if not known:
        return ""
    least, most = min(known) if low is None else low, max(known)
    top = len(BLOCKS) - 1
    return "".join(
        NOTHING if value is None else BLOCKS[round((value - least) / (most - least) * top) if most > least else 0]
        for value in values
    )
