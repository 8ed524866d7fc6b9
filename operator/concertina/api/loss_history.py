"""The course of a run: loss and members over time, as few points as a screen shows, ever coarser as the run goes on."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

from concertina.api.packed import pack, unpack

MOST_POINTS = 60
"""An even number."""
FIRST_EVERY = 2
"""Seconds between points at first; twice as long whenever there would be more than MOST_POINTS."""
MOST_CHARACTERS = 4096
"""Of all points, packed: 60 take about 700."""


@dataclass(frozen=True)
class Point:
    at: int
    """Unix seconds."""
    step: int
    loss: float | None
    replicas: int


@dataclass(frozen=True)
class LossHistory:
    """Points are at least `every` seconds apart, the oldest first."""

    every: int = FIRST_EVERY
    points: tuple[Point, ...] = ()

    def with_point(self, new: Point) -> LossHistory:
        """The very same object where it comes too soon after the last one."""
        before = self.points
        if before and 0 <= new.at - before[-1].at < self.every:
            return self
        # Where a clock was set back, what it had said before is not waited for.
        points, every = (*(point for point in before if point.at < new.at), new), self.every
        if len(points) == MOST_POINTS + 1:
            # Of two neighbours the later one stays, with the smaller world: a short loss of members stays in sight.
            first, *others = points
            pairs = zip(others[::2], others[1::2], strict=True)  # MOST_POINTS is even
            merged = (Point(b.at, b.step, b.loss, min(a.replicas, b.replicas)) for a, b in pairs)
            points, every = (first, *merged), 2 * every
        return LossHistory(every, points)

    def packed(self) -> str:
        """By column, times as differences: what is alike stands together."""
        times = [point.at for point in self.points]
        steps = [b - a for a, b in zip((0, *times), times, strict=False)]
        columns = [
            steps,
            *([getattr(point, name) for point in self.points] for name in ("step", "loss", "replicas")),
        ]
        return pack([self.every, *columns])


@functools.lru_cache(maxsize=2048)
def unpacked(text: str) -> LossHistory:
    """An empty one where that can't be read. A job's is the same object until it has another."""
    try:
        every, *columns = unpack(text)
        at, points = 0, []
        for gap, step, loss, replicas in zip(*columns, strict=True):
            at += int(gap)
            finite = loss is not None and math.isfinite(loss)
            points.append(Point(at, int(step), float(loss) if finite else None, int(replicas)))
        return LossHistory(max(FIRST_EVERY, int(every)), tuple(points[-MOST_POINTS:]))
    except (ValueError, TypeError, OverflowError):
        return LossHistory()
