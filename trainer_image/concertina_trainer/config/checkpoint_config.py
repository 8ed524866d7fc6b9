"""spec.checkpoint: where checkpoints are, and how often they are made."""

from __future__ import annotations

import enum
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel


class DamageResponse(enum.StrEnum):
    """Response to a damaged checkpoint, whose bytes are not those that were written."""

    STOP = "Stop"
    USE_PREVIOUS = "UsePrevious"


class CheckpointConfig(BaseModel):
    """`spec.checkpoint` as the trainer reads it.

    Unknown fields are ignored, because the operator may be newer than the trainer and have more fields. The operator
    validates the spec that a user writes strictly (concertina.api.spec.Checkpoint).
    """

    model_config = ConfigDict(extra="ignore", frozen=True, alias_generator=to_camel, populate_by_name=True)

    uri: str = Field(
        min_length=1,
        max_length=1024,
        description="Folder of this job's checkpoints: s3://bucket/folder, gs://bucket/folder, az://container/folder "
        "or file:///folder. The job continues from the newest in it; no two live jobs share one.",
    )
    every_steps: int | None = Field(
        default=None, ge=1, le=1000000000, description="Steps between checkpoints. Absent: everySeconds alone decides."
    )
    every_seconds: Annotated[int, Field(ge=1, le=31536000)] | Literal["Auto"] = Field(
        default=600,
        description="Most seconds between checkpoints, or Auto for what loses the least time by how long saves take "
        "and how often replicas fail (status.checkpointInterval).",
        json_schema_extra={
            "x-kubernetes-int-or-string": True,
            "x-kubernetes-validations": [
                {
                    "rule": "type(self) == int ? self >= 1 && self <= 31536000 : self == 'Auto'",
                    "message": "must be Auto or a number of seconds from 1 to 31536000",
                }
            ],
        },
    )
    keep: int = Field(default=5, ge=1, le=1000, description="How many of the newest checkpoints are kept.")
    keep_every_steps: int | None = Field(
        default=None,
        ge=1,
        le=1000000000,
        description="Interval, in steps, of checkpoints that are kept for good. Absent: only the newest are kept.",
    )
    resume_from: str = Field(
        default="",
        max_length=1024,
        description="Another run's checkpoint, or its folder for the newest one, to continue from with its state: "
        "the same data and model. Or a folder of torch.distributed.checkpoint. It matters only while there is no "
        "checkpoint under uri.",
    )
    init_from: str = Field(
        default="",
        max_length=1024,
        description="Weights to begin with at step 0: another run's checkpoint or folder, safetensors with "
        "the names of a family of Hugging Face's models (docs/models.md), or a folder of torch.distributed.checkpoint. "
        "It matters only while there is no checkpoint under uri.",
    )
    on_damage: DamageResponse = Field(
        default=DamageResponse.STOP,
        description="Response when the newest checkpoint under uri is damaged: Stop fails the job and names the "
        "newest other one; UsePrevious continues from that one and trains the steps since again.",
    )
