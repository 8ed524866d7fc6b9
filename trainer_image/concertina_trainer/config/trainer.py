"""spec.trainer: what the bundled trainer trains, on which data, for how long."""

from __future__ import annotations

import enum
import hashlib
import json
import math
from typing import Annotated

from pydantic import Field

from concertina_protocol.messages.ranges import MOST_RANGES, Ranges, united
from concertina_trainer.config.anomaly_config import AnomalyConfig
from concertina_trainer.config.data_config import Balancing, DataConfig, DocumentMode, EvaluationConfig
from concertina_trainer.config.memory_config import MemoryConfig, SnapshotConfig
from concertina_trainer.config.model_config import ModelConfig
from concertina_trainer.config.model_sizes import WITH_EXPERTS
from concertina_trainer.config.optimizer_config import OptimizerConfig, Schedule, StatePrecision
from concertina_trainer.config.section import Section, SectionRule


class Precision(enum.StrEnum):
    auto = "Auto"
    bfloat16 = "BFloat16"
    float32 = "Float32"


class Determinism(enum.StrEnum):
    order = "Order"
    bitwise = "Bitwise"


MOST_FIXED_MICROBATCHES = 16
DEFAULT_MICRO_BATCH_SIZE = 8
"""Micro-batch size for a device whose memory is not known, in sequences."""


Edge = Annotated[int, Field(ge=0, le=2**53)]  # JSON parsers may round larger numbers


class ReproductionConfig(Section):
    """Constraints on a run that trains a checkpoint again, to reproduce it.

    `concertina reproduce` writes this section.
    """

    last_step: int | None = Field(
        default=None,
        ge=1,
        le=1000000000,
        description="The run is complete after this step, on the schedule of steps. Absent: after the last of them.",
    )
    data_digest: str | None = Field(
        default=None,
        min_length=1,
        max_length=64,
        description="Other data than those of this digest are refused. Absent: whatever is there is trained on.",
    )
    skipped_samples: Annotated[
        list[Annotated[list[Edge], Field(min_length=2, max_length=2)]], Field(max_length=MOST_RANGES)
    ] = Field(
        default=[],
        description="Positions [begin, end) of the order of samples that are left out, as they were after something "
        "that looked wrong.",
    )

    @property
    def skipped(self) -> Ranges:
        return united((begin, end) for begin, end in self.skipped_samples)


class TrainerConfig(Section):
    """What the bundled trainer trains, on which data, for how long."""

    steps: int = Field(default=1000, ge=1, le=1000000000, description="Optimizer steps of the whole run.")
    seed: int = Field(
        default=0, ge=0, le=2147483647, description="Decides the initial weights and the order of the data."
    )
    model: ModelConfig = Field(
        default=ModelConfig(), description="The model: a decoder in the style of Llama, or one of your own."
    )
    data: DataConfig = Field(description="The training data.")
    global_batch_size: int = Field(
        default=32, ge=1, le=16777216, description="Sequences that one step consumes, whatever the number of workers."
    )
    micro_batch_size: int | None = Field(
        default=None,
        ge=1,
        le=65536,
        description="Most sequences that a worker computes at once. Absent: as many as a GPU needs to be busy, and "
        "fewer if they do not fit into its memory (docs/memory.md).",
    )
    optimizer: OptimizerConfig = Field(
        default=OptimizerConfig(), description="The optimizer and the schedule of its learning rate."
    )
    precision: Precision = Field(
        default=Precision.auto,
        description="Precision of matrix products: Auto is BFloat16 where the device has it, and Float32 elsewhere.",
    )
    gradient_precision: StatePrecision = Field(
        default=StatePrecision.float32,
        description="Precision in which gradients are added up over workers. BFloat16 halves the bytes of this "
        "communication, and rounds gradients; those of microbatches are still added up in Float32.",
    )
    determinism: Determinism = Field(
        default=Determinism.order,
        description="Order trains on the same samples in the same order with any number of workers. Bitwise also gives "
        "bitwise equal weights. It is slower and takes at most 16 microbatches.",
    )
    snapshot: SnapshotConfig = Field(
        default=SnapshotConfig(),
        description="Copies of the state in the memory of nodes, which training continues from after a failure.",
    )
    memory: MemoryConfig = Field(
        default=MemoryConfig(), description="Trades of computation for less of the devices' memory."
    )
    anomalies: AnomalyConfig = Field(default=AnomalyConfig(), description="Response to steps that look wrong.")
    evaluation: EvaluationConfig | None = Field(
        default=None,
        description="Measures the loss on documents that `concertina data build --validation` set aside. Absent: it "
        "is not measured.",
    )

    reproduction: ReproductionConfig | None = Field(
        default=None,
        description="For a run that trains a checkpoint again, as `concertina reproduce` writes it. Absent: it is held "
        "to nothing.",
    )

    @property
    def bitwise(self) -> bool:
        return self.determinism is Determinism.bitwise

    @property
    def least_micro_batch_size(self) -> int:
        """Smallest micro-batch size, in sequences, that the other fields allow."""
        return math.ceil(self.global_batch_size / MOST_FIXED_MICROBATCHES) if self.bitwise else 1

    @property
    def resolved_micro_batch_size(self) -> int:
        """Micro-batch size in sequences, with a default for a device whose memory is not known."""
        return self.micro_batch_size or max(DEFAULT_MICRO_BATCH_SIZE, self.least_micro_batch_size)

    @property
    def last_step(self) -> int:
        """Number of finished steps with which the run is complete."""
        return (self.reproduction and self.reproduction.last_step) or self.steps

    RULES = (
        SectionRule(
            "reproduction",
            "!has(self.reproduction) || !has(self.reproduction.lastStep) || self.reproduction.lastStep <= self.steps",
            lambda trainer: trainer.last_step <= trainer.steps,
            "reproduction.lastStep must not be beyond steps",
        ),
        SectionRule(
            "microBatchSize",
            "self.determinism != 'Bitwise' || !has(self.microBatchSize) || "
            f"self.globalBatchSize <= {MOST_FIXED_MICROBATCHES} * self.microBatchSize",
            lambda trainer: (
                not trainer.bitwise
                or trainer.micro_batch_size is None
                or trainer.global_batch_size <= MOST_FIXED_MICROBATCHES * trainer.micro_batch_size
            ),
            f"determinism Bitwise takes at most {MOST_FIXED_MICROBATCHES} microbatches: raise microBatchSize, or lower "
            "globalBatchSize",
        ),
        SectionRule(
            "data.documents",
            "self.determinism != 'Bitwise' || self.data.documents != 'Bucketed'",
            lambda trainer: not trainer.bitwise or trainer.data.documents is not DocumentMode.bucketed,
            "determinism Bitwise has microbatches of one shape: choose another data.documents",
        ),
        SectionRule(
            "determinism",
            "self.determinism != 'Bitwise' || !has(self.model.experts) && "
            f"!(has(self.model.size) && self.model.size in {list(WITH_EXPERTS)})",
            lambda trainer: not trainer.bitwise or trainer.model.experts is None,
            "determinism Bitwise knows no experts, whose products are of other shapes in another world: set "
            "determinism to Order, or remove model.experts",
        ),
        SectionRule(
            "evaluation",
            "!has(self.evaluation) || !self.evaluation.ema || has(self.optimizer.emaDecay)",
            lambda trainer: (
                trainer.evaluation is None or not trainer.evaluation.ema or trainer.optimizer.ema_decay is not None
            ),
            "evaluation.ema evaluates the average of weights: set optimizer.emaDecay, or remove evaluation.ema",
        ),
        SectionRule(
            "gradientPrecision",
            "self.determinism != 'Bitwise' || self.gradientPrecision == 'Float32'",
            lambda trainer: not trainer.bitwise or trainer.gradient_precision is StatePrecision.float32,
            "determinism Bitwise adds up gradients in Float32: set gradientPrecision to Float32, or determinism to "
            "Order",
        ),
        SectionRule(
            "data.balance",
            "self.data.balance != 'Speed' || self.determinism != 'Bitwise'",
            lambda trainer: trainer.data.balance is not Balancing.speed or not trainer.bitwise,
            "data.balance Speed makes microbatches of different sizes, and determinism Bitwise needs one shape: set "
            "balance to Even, or determinism to Order",
        ),
        SectionRule(
            "data.balance",
            "self.data.balance != 'Speed' || self.data.documents != 'Bucketed'",
            lambda trainer: (
                trainer.data.balance is not Balancing.speed or trainer.data.documents is not DocumentMode.bucketed
            ),
            "data.balance Speed counts sequences, and with data.documents Bucketed they differ in length: set balance "
            "to Even, or choose another documents",
        ),
    )

    def digest(self) -> str:
        """Return a digest of the settings that affect the numbers of a run.

        The data are not included, because they have a digest of their own, which depends on their contents.
        """
        without = {"data", "snapshot", "evaluation", "micro_batch_size", "memory", "reproduction"}
        settings = self.model_dump(mode="json", exclude=without)
        del settings["model"]["size"]
        if self.bitwise:
            settings["micro_batch_size"] = self.resolved_micro_batch_size
        settings["optimizer"] |= self.optimizer.hyperparameters
        settings["optimizer"]["weight_decay"] = self.optimizer.resolved_weight_decay
        settings["optimizer"]["warmup_steps"] = self.optimizer.resolved_warmup_steps(self.steps)
        if self.optimizer.schedule is Schedule.warmup_stable_decay:
            settings["optimizer"]["decay_steps"] = self.optimizer.resolved_decay_steps(self.steps)
        return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]
