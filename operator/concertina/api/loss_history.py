"""History of a run: loss and members over time, with as few points as a screen shows, coarser as the run goes on."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

from concertina.api.packed import pack, unpack

MOST_POINTS = 60
"""Maximum number of points; an even number."""
FIRST_EVERY = 2
"""Seconds between points at first; doubled whenever there would be more than MOST_POINTS."""
MOST_CHARACTERS = 4096
"""Maximum length of all points, packed: 60 points take about 700 characters."""


@dataclass(frozen=True)
class Point:
    at: int
    """Unix seconds."""
    step: int
    loss: float | None
    replicas: int


@dataclass(frozen=True)
class LossHistory:
    """Loss history of a job; points are at least `every` seconds apart, the oldest first."""

    every: int = FIRST_EVERY
    points: tuple[Point, ...] = ()

    def with_point(self, new: Point) -> LossHistory:
        """Return the history with a new point; the same object if the point comes too soon after the last one."""
        last_points = self.points
        if last_points and 0 <= new.at - last_points[-1].at < self.every:
            return self
        # If a clock was set back, the history does not wait for the clock to reach the times of earlier points again.
        points, every = (*(point for point in last_points if point.at < new.at), new), self.every
        if len(points) == MOST_POINTS + 1:
            # Of two neighbours the later one stays, with the smaller world: a short loss of members stays visible.
            first, *later_points = points
            pairs = zip(later_points[::2], later_points[1::2], strict=True)  # MOST_POINTS is even
            merged = (Point(b.at, b.step, b.loss, min(a.replicas, b.replicas)) for a, b in pairs)
            points, every = (first, *merged), 2 * every
        return LossHistory(every, points)

    def packed(self) -> str:
        """Return the packed points.

        They are packed by column, with times as differences, because similar values side by side compress well.
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
    """Unpack a history; an empty one if the text can't be read.

    The history of a job is the same object until the text changes.
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
