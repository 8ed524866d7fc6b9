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
    float16 = "Float16"
    float8 = "Float8"
    float32 = "Float32"


class Determinism(enum.StrEnum):
    order = "Order"
    bitwise = "Bitwise"


class Compile(enum.StrEnum):
    blocks = "Blocks"
    never = "Never"


MOST_FIXED_MICROBATCHES = 16
DEFAULT_MICRO_BATCH_SIZE = 8
"""Micro-batch size for a device whose memory is not known, in sequences."""


Edge = Annotated[int, Field(ge=0, le=2**53)]  # JSON parsers may round larger numbers


class ReproductionConfig(Section):
    """Conditions of a run that repeats the training of a checkpoint, to reproduce it.

    `concertina reproduce` writes this section.
    """

    last_step: int | None = Field(
        default=None,
        ge=1,
        le=1000000000,
        description="Step after which the run is complete. The learning rate still follows the schedule of "
        "steps. Absent: the last step.",
    )
    data_digest: str | None = Field(
        default=None,
        min_length=1,
        max_length=64,
        description="Digest of the data that the run must train on. Data with another digest are refused. "
        "Absent: any data.",
    )
    skipped_samples: Annotated[
        list[Annotated[list[Edge], Field(min_length=2, max_length=2)]], Field(max_length=MOST_RANGES)
    ] = Field(
        default=[],
        description="Positions [begin, end) in the order of samples that are left out, because the "
        "original run left them out after an anomaly.",
    )

    @property
    def skipped(self) -> Ranges:
        return united((begin, end) for begin, end in self.skipped_samples)


COMPILE_RULES = (
    SectionRule(
        "compile",
        "!has(self.compile) || self.compile != 'Blocks' || !has(self.model.entrypoint) && !has(self.model.hf)",
        lambda trainer: trainer.compile is not Compile.blocks or trainer.model.custom is None,
        "compile Blocks compiles the blocks of the bundled decoder only: remove compile, or model.entrypoint and hf",
    ),
    SectionRule(
        "compile",
        "!has(self.compile) || self.compile != 'Blocks' || self.determinism != 'Bitwise'",
        lambda trainer: trainer.compile is not Compile.blocks or not trainer.bitwise,
        "compile Blocks may add up numbers in another order in another world, and determinism Bitwise must not: remove "
        "compile, or set determinism to Order",
    ),
    SectionRule(
        "compile",
        "!has(self.compile) || self.compile != 'Blocks' || self.data.documents != 'Bucketed'",
        lambda trainer: trainer.compile is not Compile.blocks or trainer.data.documents is not DocumentMode.bucketed,
        "compile Blocks compiles for one length of sequences, and data.documents Bucketed has many: remove compile, or "
        "choose another documents",
    ),
    SectionRule(
        "compile",
        "!has(self.compile) || self.compile != 'Blocks' || self.data.balance != 'Speed'",
        lambda trainer: trainer.compile is not Compile.blocks or trainer.data.balance is not Balancing.speed,
        "compile Blocks compiles for one size of microbatches, and data.balance Speed changes it: remove compile, or "
        "set balance to Even",
    ),
)


class TrainerConfig(Section):
    """What the bundled trainer trains, on which data, for how long."""

    steps: int = Field(default=1000, ge=1, le=1000000000, description="Number of optimizer steps of the whole run.")
    seed: int = Field(
        default=0, ge=0, le=2147483647, description="Seed of the initial weights and of the order of the data."
    )
    model: ModelConfig = Field(
        default=ModelConfig(), description="The model: a Llama-style decoder, or your own model."
    )
    data: DataConfig = Field(description="The training data.")
    global_batch_size: int = Field(
        default=32, ge=1, le=16777216, description="Number of sequences in each step, whatever the number of workers."
    )
    micro_batch_size: int | None = Field(
        default=None,
        ge=1,
        le=65536,
        description="Largest number of sequences that a worker computes at once. Absent: as many as keep a "
        "GPU busy, or fewer if those do not fit into its memory (docs/memory.md).",
    )
    optimizer: OptimizerConfig = Field(
        default=OptimizerConfig(), description="The optimizer and the learning rate schedule."
    )
    precision: Precision = Field(
        default=Precision.auto,
        description="Precision of matrix products. Auto is BFloat16 on devices that support it, and Float32 on others. "
        "Float16 (with loss scaling) is for older GPUs, and Float8 for GPUs since Hopper (docs/speed.md).",
    )
    compile: Compile | None = Field(
        default=None,
        description="Parts of the model to compile with torch.compile. Blocks compiles each block of the decoder, and "
        "Never compiles nothing. Absent: Blocks on GPUs, if the model and the data allow it (docs/speed.md).",
    )
    gradient_precision: StatePrecision = Field(
        default=StatePrecision.float32,
        description="Precision in which gradients are added up over workers. BFloat16 halves the bytes of this "
        "communication, and rounds gradients; those of microbatches are still added up in Float32.",
    )
    determinism: Determinism = Field(
        default=Determinism.order,
        description="Order trains on the same samples in the same order with any number of workers. "
        "Bitwise also gives bitwise equal weights. Bitwise is slower and allows at most 16 "
        "microbatches.",
    )
    snapshot: SnapshotConfig = Field(
        default=SnapshotConfig(),
        description="Copies of the training state in the memory of nodes. Training continues from them "
        "after a failure.",
    )
    memory: MemoryConfig = Field(
        default=MemoryConfig(), description="Settings that use less device memory at the price of more computation."
    )
    anomalies: AnomalyConfig = Field(
        default=AnomalyConfig(),
        description="Response to steps that look wrong: a "
        "loss that jumps or is not finite, or "
        "weights that differ between workers.",
    )
    evaluation: EvaluationConfig | None = Field(
        default=None,
        description="Evaluation on documents that are not used for training. Absent: no evaluation.",
    )

    reproduction: ReproductionConfig | None = Field(
        default=None,
        description="Conditions of a run that repeats the training of a checkpoint, as `concertina "
        "reproduce` writes them. Absent: no conditions.",
    )

    @property
    def bitwise(self) -> bool:
        return self.determinism is Determinism.bitwise

    @property
    def least_micro_batch_size(self) -> int:
        """Smallest micro-batch size, in sequences, that the other fields of this section allow."""
        return math.ceil(self.global_batch_size / MOST_FIXED_MICROBATCHES) if self.bitwise else 1

    @property
    def resolved_micro_batch_size(self) -> int:
        """Micro-batch size in sequences, with a default for a device whose memory is not known."""
        return self.micro_batch_size or max(DEFAULT_MICRO_BATCH_SIZE, self.least_micro_batch_size)

    @property
    def last_step(self) -> int:
        """Number of the step after which the run is complete."""
        return (self.reproduction and self.reproduction.last_step) or self.steps

    RULES = (
        *COMPILE_RULES,
        SectionRule(
            "precision",
            "self.precision != 'Float8' || !has(self.model.entrypoint) && !has(self.model.hf) && !has(self.model.lora)",
            lambda trainer: (
                trainer.precision is not Precision.float8
                or (trainer.model.custom is None and trainer.model.lora is None)
            ),
            "precision Float8 multiplies the weights of the bundled decoder, and supports neither lora nor entrypoint "
            "nor hf: set precision to BFloat16, or remove model.lora, model.entrypoint or model.hf",
        ),
        SectionRule(
            "reproduction",
            "!has(self.reproduction) || !has(self.reproduction.lastStep) || self.reproduction.lastStep <= self.steps",
            lambda trainer: trainer.last_step <= trainer.steps,
            "reproduction.lastStep must not exceed steps",
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
            f"determinism Bitwise allows at most {MOST_FIXED_MICROBATCHES} microbatches: raise "
            "microBatchSize, or lower globalBatchSize",
        ),
        SectionRule(
            "data.documents",
            "self.determinism != 'Bitwise' || self.data.documents != 'Bucketed'",
            lambda trainer: not trainer.bitwise or trainer.data.documents is not DocumentMode.bucketed,
            "determinism Bitwise needs microbatches of one shape, and data.documents Bucketed makes "
            "different ones: choose another value of data.documents",
        ),
        SectionRule(
            "determinism",
            "self.determinism != 'Bitwise' || !has(self.model.experts) && "
            f"!(has(self.model.size) && self.model.size in {list(WITH_EXPERTS)})",
            lambda trainer: not trainer.bitwise or trainer.model.experts is None,
            "determinism Bitwise does not support experts, because the shapes of their matrix products "
            "depend on the number of workers: set determinism to Order, or remove model.experts",
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
            "determinism Bitwise needs microbatches of one size, and data.balance Speed makes different "
            "ones: set balance to Even, or determinism to Order",
        ),
        SectionRule(
            "data.balance",
            "self.data.balance != 'Speed' || self.data.documents != 'Bucketed'",
            lambda trainer: (
                trainer.data.balance is not Balancing.speed or trainer.data.documents is not DocumentMode.bucketed
            ),
            "data.balance Speed divides a batch by the number of sequences, and with data.documents "
            "Bucketed sequences differ in length: set balance to Even, or choose another value of "
            "documents",
        ),
    )

    def digest(self) -> str:
        """Return a digest of the settings that affect the numerical results of a run.

        The data are not included, because they have a digest of their own, which depends on their contents.
        """
        without = {"data", "snapshot", "evaluation", "micro_batch_size", "memory", "compile", "reproduction"}
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


def compile_obstacle(config: TrainerConfig) -> str:
    """Return the reason why the model's blocks can't be compiled, or an empty string if they can be."""
    compiled = config.model_copy(update={"compile": Compile.blocks})
    return next((rule.message for rule in COMPILE_RULES if not rule.holds(compiled)), "")
