"""What a diagnosis goes by: the status now and some seconds ago, what agents and rank 0's log said meanwhile."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping

from concertina.api.model import StatusModel
from concertina.api.spec import JobSpec
from concertina.api.status import ENDED, JobStatus, unix_seconds
from concertina.diagnosis.problems import TRAINING
from concertina.durations import duration

LEAST_SECONDS = 5.0
"""Of training, below which shares say nothing."""
RECENT_SECONDS = 3600.0
"""For so long a failure is news."""


class AgentFigures(StatusModel):
    """What one agent's metrics said."""

    replica: str
    at: float
    """Unix seconds."""
    worker_bytes: float | None = None
    """Resident memory of its workers."""
    finite_loss: bool | None = None
    """None: it coordinates no round, or no loss was ever told."""
    storage_failures: float | None = None
    """None: it ships nothing."""


class StepLine(StatusModel):
    """A line of rank 0's log."""

    step: int
    seconds: float
    loss: float | None = None
    """None where it is not finite."""


@dataclasses.dataclass(frozen=True)
class Window:
    """Where the time of a while went."""

    seconds: Mapping[str, float]
    """By class of the goodput, as `Goodput.by_class`."""
    of: str
    """Which while, in words."""

    @property
    def total(self) -> float:
        return sum(self.seconds.values())

    @property
    def training(self) -> float:
        return sum(self.seconds.get(name, 0.0) for name in TRAINING)

    def share(self, name: str) -> float:
        """Of the time of training, 0 to 1."""
        return self.seconds.get(name, 0.0) / self.training if self.training >= LEAST_SECONDS else 0.0


@dataclasses.dataclass(frozen=True)
class JobEvidence:
    """Of one job."""

    spec: JobSpec | None
    """None where this version can't read it."""
    status: JobStatus
    at: float
    """Unix seconds: when the status was read."""
    created: float
    """Unix seconds."""
    live: bool = False
    """Whether it was read from a cluster; of a file nobody knows how old it is."""
    earlier: JobStatus | None = None
    agents: tuple[AgentFigures, ...] = ()
    """In order of time."""
    steps: tuple[StepLine, ...] = ()
    """The newest last."""

    @property
    def ended(self) -> bool:
        return any(map(self.status.is_true, ENDED))

    @property
    def trains(self) -> bool:
        return self.status.phase == "Training"

    def age(self, timestamp: str) -> float:
        """Seconds."""
        return max(0.0, self.at - unix_seconds(timestamp))

    @functools.cached_property
    def recent(self) -> Window | None:
        """Between the two readings; None where there are not two."""
        now, before = self.status.goodput, self.earlier.goodput if self.earlier else None
        if before is None or now.at is None or before.at is None or now.at == before.at:
            return None
        seconds = {name: max(0.0, spent - before.by_class[name]) for name, spent in now.by_class.items()}
        return Window(seconds, f"the last {duration(unix_seconds(now.at) - unix_seconds(before.at))}")

    @functools.cached_property
    def lifetime(self) -> Window:
        seconds = self.status.goodput.by_class
        return Window(seconds, f"{duration(sum(seconds.values()))} since the job was created")

    @functools.cached_property
    def window(self) -> Window:
        """The recent one where the job has trained in it: a problem that began late is seen there alone."""
        recent = self.recent
        return recent if recent is not None and recent.training >= LEAST_SECONDS else self.lifetime

    @property
    def hourly(self) -> float | None:
        """What the replicas that are there cost in an hour, at the price on demand."""
        price = self.spec.price if self.spec else None
        return None if price is None else price.replica_hour * self.status.replicas
