"""Curves of a job's loss and number of replicas over time. Each curve is one line of text. Pure."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable, Sequence

from concertina.api.loss_history import LossHistory, Point

BLOCKS = "▁▂▃▄▅▆▇█"
WIDTH = 60
"""Maximum number of columns. The time from the first point to the last is divided evenly among the columns."""
NOTHING = " "
"""Character for a column without a point: the job did not train in that period."""
LATE = 3
"""Longest gap between two points, as a multiple of the usual gap, in which the job still counts as training."""


def loss(history: LossHistory, width: int = WIDTH) -> str:
    """Return the curve of the loss as a line of text, scaled from its minimum to its maximum; empty without a loss."""
    return _line([_last(point.loss for point in column) for column in _columns(history.points, width)], low=None)


def world(history: LossHistory, width: int = WIDTH) -> str:
    """Return the curve of the number of replicas as a line of text, scaled from zero.

    Each column shows the smallest number of replicas in its period.
    """
    columns = _columns(history.points, width)
    return _line([min((point.replicas for point in column), default=None) for column in columns], low=0)


def _columns(points: Sequence[Point], width: int) -> list[list[Point]]:
    """Return the points of the history for each column of the curve.

    Each column stands for a period. If the gap between two points is not much longer than usual, copies of the earlier
    point fill the empty columns between them.
    """
    if not points:
        return []
    begin, span = points[0].at, points[-1].at - points[0].at
    usual = statistics.median([b.at - a.at for a, b in itertools.pairwise(points)] or [0])
    width = min(width, len(points))
    columns: list[list[Point]] = [[] for _ in range(width)]
    last_column = 0
    for before, point in itertools.pairwise((points[0], *points)):
        column = min(width - 1, (point.at - begin) * width // span) if span else 0
        if point.at - before.at <= LATE * usual:
            columns[last_column + 1 : column] = [[before] for _ in columns[last_column + 1 : column]]
        columns[column].append(point)
        last_column = column
    return columns


def _last(values: Iterable[float | None]) -> float | None:
    return next((value for value in reversed(list(values)) if value is not None), None)


def _line(values: Sequence[float | None], low: float | None) -> str:
    present = [value for value in values if value is not None]
    if not present:
        return ""
    least, most = min(present) if low is None else low, max(present)
    top = len(BLOCKS) - 1
    return "".join(
        NOTHING if value is None else BLOCKS[round((value - least) / (most - least) * top) if most > least else 0]
        for value in values
    )
