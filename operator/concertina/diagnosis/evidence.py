"""Input of a diagnosis: two readings of the status, some seconds apart, the agents' metrics, and the log of rank 0."""

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
"""Shortest training time in seconds for which shares are meaningful."""
RECENT_SECONDS = 3600.0
"""Age in seconds up to which a failure counts as recent."""


class AgentFigures(StatusModel):
    """Values of one replica, such as its memory, from the metrics of its agent."""

    replica: str
    at: float
    """Unix time of the reading in seconds."""
    worker_bytes: float | None = None
    """Total resident memory of the agent's workers, in bytes."""
    finite_loss: bool | None = None
    """True if the last loss is finite; None if the agent is not the coordinator (rank 0), or if no loss was reported.
    """
    gpu_utilization: tuple[float, ...] = ()
    """Share of the time, from 0 to 1, in which each GPU of the replica ran a kernel."""
    storage_failures: float | None = None
    """Number of failed storage operations. None if the agent does not upload checkpoints."""


class StepLine(StatusModel):
    """Values of one training step, from a line in the log of rank 0."""

    step: int
    seconds: float
    loss: float | None = None
    """Loss of the step, or None if it is not finite."""


@dataclasses.dataclass(frozen=True)
class Window:
    """Time that a run spent in each class (such as productive or input) within a period."""

    seconds: Mapping[str, float]
    """Seconds by goodput class, as in `Goodput.by_class`."""
    of: str
    """Description of the period, for sentences."""

    @property
    def total(self) -> float:
        return sum(self.seconds.values())

    @property
    def training(self) -> float:
        return sum(self.seconds.get(name, 0.0) for name in TRAINING)

    def share(self, name: str) -> float:
        """Return the share, from 0 to 1, that the class `name` has in the training time."""
        return self.seconds.get(name, 0.0) / self.training if self.training >= LEAST_SECONDS else 0.0


@dataclasses.dataclass(frozen=True)
class JobEvidence:
    """Input of a diagnosis of one job: readings of its status, of its agents' metrics, and of its log."""

    spec: JobSpec | None
    """Spec of the job, or None if this version of concertina can't parse it."""
    status: JobStatus
    at: float
    """Unix time at which the status was read, in seconds."""
    created: float
    """Unix time of the job's creation in seconds."""
    live: bool = False
    """True if the job was read from a cluster.

    For a job that was read from a file, it is unknown how old the data are.
    """
    earlier: JobStatus | None = None
    agents: tuple[AgentFigures, ...] = ()
    """Values from the agents' metrics, in order of time."""
    steps: tuple[StepLine, ...] = ()
    """Log lines about steps, newest last."""

    @property
    def ended(self) -> bool:
        return any(map(self.status.is_true, ENDED))

    @property
    def trains(self) -> bool:
        return self.status.phase == "Training"

    def age(self, timestamp: str) -> float:
        """Return the seconds from `timestamp` to the time at which the status was last read."""
        return max(0.0, self.at - unix_seconds(timestamp))

    @functools.cached_property
    def recent(self) -> Window | None:
        """Period between the two readings of the status; None without two different readings."""
        latest, previous = self.status.goodput, self.earlier.goodput if self.earlier else None
        if previous is None or latest.at is None or previous.at is None or latest.at == previous.at:
            return None
        seconds = {name: max(0.0, spent - previous.by_class[name]) for name, spent in latest.by_class.items()}
        return Window(seconds, f"the last {duration(unix_seconds(latest.at) - unix_seconds(previous.at))}")

    @functools.cached_property
    def lifetime(self) -> Window:
        seconds = self.status.goodput.by_class
        return Window(seconds, f"{duration(sum(seconds.values()))} since the job was created")

    @functools.cached_property
    def window(self) -> Window:
        """Period for which the diagnosis is made.

        This is the time between the two readings of the status, because it shows problems that began recently. If the
        job did not train in that time, it is the job's lifetime.
        """
        recent = self.recent
        return recent if recent is not None and recent.training >= LEAST_SECONDS else self.lifetime

    @property
    def hourly(self) -> float | None:
        """Hourly cost of the current replicas at the on-demand price. None if the spec has no price."""
        price = self.spec.price if self.spec else None
        return None if price is None else price.replica_hour * self.status.replicas
