"""Which tool tracks the run, and under what name: `spec.tracking`, as the operator puts it into the pod."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping
from pathlib import Path
from typing import Optional

from concertina_protocol.codec.typed_json import parse_json
from concertina_protocol.tracking import spool


class Backend(str, enum.Enum):
    MLFLOW = "MLflow"
    WANDB = "WandB"
    TENSORBOARD = "TensorBoard"


@dataclasses.dataclass(frozen=True)
class Spec:
    """In the names of the manifest."""

    backend: str
    uri: Optional[str] = None  # noqa: UP045 (typed_json knows typing's form)
    experiment: Optional[str] = None  # noqa: UP045
    runName: Optional[str] = None  # noqa: UP045
    tags: Mapping[str, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class TrackingSettings:
    backend: Backend
    uri: str
    experiment: str
    run_name: str
    tags: Mapping[str, str]
    uid: str
    """Of the job: the run's identity."""
    job: str
    """namespace/name"""
    volume: Path

    @property
    def spool(self) -> Path:
        return spool.folder(self.volume)

    @property
    def run_id(self) -> str:
        """The same for all rounds, replicas and restarts of a job, and of no other job."""
        return self.uid


def read(environment: Mapping[str, str]) -> TrackingSettings:
    """Raises KeyError or ValueError where the environment is not the operator's."""
    spec = parse_json(Spec, environment["CONCERTINA_TRACKING"])
    job = environment["CONCERTINA_JOB"]
    namespace, _, name = job.rpartition("/")
    return TrackingSettings(
        backend=Backend(spec.backend),
        uri=spec.uri or "",
        experiment=spec.experiment or namespace or "default",
        run_name=spec.runName or name,
        tags=spec.tags,
        uid=environment["CONCERTINA_UID"],
        job=job,
        volume=Path(environment.get("CONCERTINA_VOLUME") or "/concertina"),
    )
