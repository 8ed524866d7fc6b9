"""What happened in a run, as seen from outside: samples of its status, and marks of what was done to it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Sample:
    """One look at the job's status. Times are Unix seconds."""

    at: float
    step: int
    world: int
    round: int


@dataclass(frozen=True)
class LossPoint:
    """One line of the trainer's log."""

    at: float
    step: int
    loss: float


@dataclass(frozen=True)
class Mark:
    """Something that was done or that happened, for the plot and the summary."""

    at: float
    what: str
    text: str


@dataclass
class History:
    """Grows while the run is watched."""

    samples: list[Sample] = field(default_factory=list)
    losses: list[LossPoint] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)
    status: dict[str, Any] = field(default_factory=dict)
    """The last status seen."""

    def mark(self, at: float, what: str, text: str) -> None:
        """Remember something for the plot."""
        self.marks.append(Mark(at, what, text))

    def marked(self, what: str) -> float | None:
        """When `what` happened, None if it did not."""
        return next((mark.at for mark in self.marks if mark.what == what), None)

    def first_step_after(self, at: float) -> LossPoint | None:
        """The first finished step that was not yet known at that time."""
        before = max((point.step for point in self.losses if point.at <= at), default=0)
        later = [point for point in self.losses if point.at > at and point.step >= before]
        return min(later, key=lambda point: point.at, default=None)
