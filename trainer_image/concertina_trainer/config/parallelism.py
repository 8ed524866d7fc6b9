"""spec.parallelism: the number of workers in each dimension."""

from __future__ import annotations

import enum
import math

from pydantic import BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel


class PipelineSchedule(enum.StrEnum):
    one_f_one_b = "OneForwardOneBackward"
    gpipe = "GPipe"
    interleaved = "Interleaved1F1B"
    zero_bubble = "InterleavedZeroBubble"

    @property
    def stages(self) -> int:
        """Number of pipeline stages on each rank."""
        return 2 if self in (PipelineSchedule.interleaved, PipelineSchedule.zero_bubble) else 1


class ParallelismConfig(BaseModel):
    """`spec.parallelism`: the number of ranks in each dimension. The remaining dimension is data parallelism."""

    model_config = ConfigDict(extra="ignore", frozen=True, alias_generator=to_camel, populate_by_name=True)

    tensor: int = Field(default=1, ge=1, le=1024, description="Workers that share each layer (tensor parallelism).")
    pipeline: int = Field(
        default=1, ge=1, le=1024, description="Stages that the layers are divided into (pipeline parallelism)."
    )
    schedule: PipelineSchedule = Field(
        default=PipelineSchedule.one_f_one_b,
        description="Pipeline schedule of the bundled trainer. Interleaved schedules give each worker two "
        "stages: workers wait less and communicate more.",
    )
    context: int = Field(
        default=1, ge=1, le=1024, description="Workers that share each sequence (context parallelism)."
    )
    shard: int | None = Field(
        default=None,
        ge=1,
        le=65536,
        description="Number of workers among which one copy of weights and optimizer state is sharded. The "
        "job has as many copies as fit (HSDP). 1 is plain data parallelism. Absent: one copy "
        "over all workers (FSDP).",
    )
    expert: int = Field(
        default=1,
        ge=1,
        le=1024,
        description="Number of workers among which the experts of a layer are divided (expert "
        "parallelism). They belong to one pipeline stage and to one copy of the weights. It "
        "must divide shard x context x tensor and trainer.model.experts.count.",
    )

    async_tensor: bool = Field(
        default=False,
        description="Whether the bundled trainer overlaps the communication of tensor parallelism with "
        "matrix products (async TP). All GPUs of a group must be in one replica and able to "
        "access each other's memory. It has not been run on GPUs yet.",
    )

    @property
    def group(self) -> int:
        """Number of ranks that compute the same sequences."""
        return self.tensor * self.pipeline * self.context

    @property
    def stages_per_rank(self) -> int:
        return self.schedule.stages if self.pipeline > 1 else 1

    @property
    def backward_in_halves(self) -> bool:
        """True if the pipeline schedule splits the backward pass into two halves (zero bubble).

        Gathered weights must not be freed between the halves, because torch's FSDP would lose gradients.
        """
        return self.pipeline > 1 and self.schedule is PipelineSchedule.zero_bubble

    @property
    def expert_shards(self) -> int:
        """Number of positions in the shard dimension (FSDP) that an expert group spans.

        An expert group consists of ranks of the same context and tensor group. If these are too few, the expert group
        also includes ranks at other positions in the shard dimension.
        """
        return self.expert // math.gcd(self.expert, self.context * self.tensor)

    @property
    def block(self) -> int:
        """Number of ranks in a block: the smallest number of ranks that can train in this layout.

        The number of ranks of a job is always a multiple of this number.
        """
        return self.group * (self.shard or self.expert_shards)
