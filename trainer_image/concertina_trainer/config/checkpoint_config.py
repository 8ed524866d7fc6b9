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
        description="Folder of this job's checkpoints: s3://bucket/folder, gs://bucket/folder, "
        "az://container/folder or file:///folder. The job continues from the newest checkpoint "
        "in this folder. Two running jobs can't share a folder.",
    )
    every_steps: int | None = Field(
        default=None, ge=1, le=1000000000, description="Steps between checkpoints. Absent: only everySeconds applies."
    )
    every_seconds: Annotated[int, Field(ge=1, le=31536000)] | Literal["Auto"] = Field(
        default=600,
        description="Longest time between checkpoints, in seconds. Auto chooses the interval that loses "
        "the least time, from the measured duration of saves and the rate of failures "
        "(status.checkpointInterval).",
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
    keep: int = Field(default=5, ge=1, le=1000, description="Number of newest checkpoints that are kept.")
    keep_every_steps: int | None = Field(
        default=None,
        ge=1,
        le=1000000000,
        description="Interval, in steps, of checkpoints that are kept forever. Absent: only the newest are kept.",
    )
    keep_best: bool = Field(
        default=False,
        description="Also keeps the checkpoint with the lowest loss of trainer.evaluation, and makes a checkpoint "
        "after each evaluation with a new lowest loss.",
    )
    resume_from: str = Field(
        default="",
        max_length=1024,
        description="Checkpoint of another run to continue from with its training state, or the folder of "
        "that run for its newest checkpoint, or a folder of torch.distributed.checkpoint. This job needs the "
        "same data and model. Ignored once there is a checkpoint under uri.",
    )
    init_from: str = Field(
        default="",
        max_length=1024,
        description="Weights to start from at step 0: the checkpoint or the folder of another run, a folder of "
        "torch.distributed.checkpoint, or safetensors files of a supported Hugging Face model family "
        "(docs/models.md). Ignored once there is a checkpoint under uri.",
    )
    on_damage: DamageResponse = Field(
        default=DamageResponse.STOP,
        description="Response when the newest checkpoint under uri is damaged: Stop fails the job and "
        "names the newest undamaged checkpoint. UsePrevious continues from that checkpoint and "
        "repeats the steps since then.",
    )
