"""Loss and number of members over a whole run, with at most MOST_POINTS points.

When the history is full, the time between its points becomes longer.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

from concertina.api.packed import pack, unpack

MOST_POINTS = 60
"""Maximum number of points. The number must be even."""
FIRST_EVERY = 2
"""Seconds between points at the start of a run.

The value is doubled whenever there are more than MOST_POINTS points.
"""
MOST_CHARACTERS = 4096
"""Maximum length of the packed history in characters. A history with 60 points takes about 700."""


@dataclass(frozen=True)
class Point:
    at: int
    """Time of the point in Unix seconds."""
    step: int
    loss: float | None
    replicas: int


@dataclass(frozen=True)
class LossHistory:
    """Loss history of a job. The oldest point comes first, and points are at least `every` seconds apart."""

    every: int = FIRST_EVERY
    points: tuple[Point, ...] = ()

    def with_point(self, new: Point) -> LossHistory:
        """Return the history with a new point added.

        If the new point is too close in time to the last one, the point is dropped, and the same object is returned.
        """
        last_points = self.points
        if last_points and 0 <= new.at - last_points[-1].at < self.every:
            return self
        # If the clock was set back, drop points with a later time. The history need not wait until the clock reaches
        # that time.
        points, every = (*(point for point in last_points if point.at < new.at), new), self.every
        if len(points) == MOST_POINTS + 1:
            # Keep the later of two neighbours with the smaller number of members, so that a short loss of members stays
            # visible.
            first, *later_points = points
            pairs = zip(later_points[::2], later_points[1::2], strict=True)  # MOST_POINTS is even
            merged = (Point(b.at, b.step, b.loss, min(a.replicas, b.replicas)) for a, b in pairs)
            points, every = (first, *merged), 2 * every
        return LossHistory(every, points)

    def packed(self) -> str:
        """Return the history as compact text.

        The text lists all times first (as differences), then all steps, all losses and all numbers of replicas. Similar
        values are then next to each other and compress well.
        """
        times = [point.at for point in self.points]
        steps = [b - a for a, b in zip((0, *times), times, strict=False)]
        columns = [
            steps,
            *([getattr(point, name) for point in self.points] for name in ("step", "loss", "replicas")),
        ]
        return pack([self.every, *columns])


@functools.lru_cache(maxsize=2048)
def unpacked(text: str) -> LossHistory:
    """Return the history from its packed text; an empty history if the text is invalid.

    The result is cached by text.
    """
    try:
        every, *columns = unpack(text)
        timestamp, points = 0, []
        for gap, step, loss, replicas in zip(*columns, strict=True):
            timestamp += int(gap)
            finite = loss is not None and math.isfinite(loss)
            points.append(Point(timestamp, int(step), float(loss) if finite else None, int(replicas)))
        return LossHistory(max(FIRST_EVERY, int(every)), tuple(points[-MOST_POINTS:]))
    except (ValueError, TypeError, OverflowError):
        return LossHistory()
