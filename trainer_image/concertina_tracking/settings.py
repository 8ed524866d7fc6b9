"""Settings of the process that tracks the run.

The operator writes `spec.tracking` and the run's name into the pod's environment variables.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping
from pathlib import Path
from typing import Optional

from concertina_protocol.codec.typed_json import parse_json
from concertina_protocol.tracking import spool


class Backend(str, enum.Enum):
    """Tool that tracks runs."""

    MLFLOW = "MLflow"
    WANDB = "WandB"
    TENSORBOARD = "TensorBoard"


@dataclasses.dataclass(frozen=True)
class Spec:
    """Fields of `spec.tracking`, under the names that they have in the manifest."""

    backend: str
    uri: Optional[str] = None  # noqa: UP045 (typed_json knows typing's form)
    experiment: Optional[str] = None  # noqa: UP045
    runName: Optional[str] = None  # noqa: UP045
    tags: Mapping[str, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class TrackingSettings:
    """Settings of the tracking process, from the environment variables of the pod."""

    backend: Backend
    uri: str
    experiment: str
    run_name: str
    tags: Mapping[str, str]
    uid: str
    """UID of the job, which identifies the run."""
    job: str
    """Job as namespace/name."""
    volume: Path

    @property
    def spool(self) -> Path:
        """Folder with the records that are to be sent to the tool."""
        return spool.folder(self.volume)

    @property
    def run_id(self) -> str:
        """Id of the run, which is unique to the job and the same for all its rounds, replicas and restarts."""
        return self.uid


def read(environment: Mapping[str, str]) -> TrackingSettings:
    """Return the settings that the operator has set in the environment.

    Raises:
        KeyError: If a variable is missing.
        ValueError: If a variable has an invalid value.
    """
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
