"""Record of the demo's run: readings of the job's status, log lines, and actions of the demo."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from concertina.api.status import JobStatus
from concertina.terminal import show
from concertina_protocol.log_lines import StepDoneLine


@dataclass(frozen=True)
class StatusSample:
    """One reading of the job's status.

    Times are Unix times in seconds.
    """

    at: float
    step: int
    world: int
    round: int


@dataclass(frozen=True)
class LossPoint:
    """Loss of one step, from the trainer's log."""

    at: float
    step: int
    loss: float


@dataclass(frozen=True)
class Mark:
    """Action or event at one time of the demo, which the plot and the summary show."""

    at: float
    what: str
    text: str


@dataclass
class DemoHistory:
    """Record of the demo's run. Entries are added while the run is watched."""

    samples: list[StatusSample] = field(default_factory=list)
    losses: list[LossPoint] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)
    status: JobStatus = field(default_factory=JobStatus)
    """Most recently read status of the job."""

    def looked(self, status: JobStatus) -> None:
        """Record a reading of the job's status."""
        self.status = status
        world, step = status.world, status.progress.step if status.progress else 0
        at_work = world.replicas if show.word(status) in ("Training", "Draining") else 0
        self.samples.append(StatusSample(time.time(), step, at_work, world.round))

    def stepped(self, step: StepDoneLine) -> None:
        """Record a training step from a line of the trainer's log."""
        self.losses.append(LossPoint(time.time(), step.step, step.loss))

    def mark(self, at: float, what: str, text: str) -> None:
        """Record an action or event at a Unix time. `what` is its name, and `text` its description for the plot."""
        self.marks.append(Mark(at, what, text))

    def marked(self, what: str) -> float | None:
        """Return the time of the mark named `what`, or None if there is none."""
        return next((mark.at for mark in self.marks if mark.what == what), None)

    @property
    def replicas(self) -> int:
        """Number of replicas that were training at the last reading."""
        return self.samples[-1].world if self.samples else 0

    @property
    def percent(self) -> float:
        progress = self.status.progress
        return (progress.percent or 0.0) if progress else 0.0

    @property
    def ended(self) -> bool:
        """True if the demo's job is complete or has failed."""
        return show.ended(self.status) is not None

    def first_step_after(self, at: float) -> LossPoint | None:
        """Return the first new step that finished after a Unix time, or None.

        A step is new if its number is at least the highest step number recorded before that time.
        """
        known_step = max((point.step for point in self.losses if point.at <= at), default=0)
        later = [point for point in self.losses if point.at > at and point.step >= known_step]
        return min(later, key=lambda point: point.at, default=None)
