"""The bundled trainer's configuration, `spec.trainer` of a TrainingJob. No torch here: the operator imports this.

In YAML the names are camelCase, in Python snake_case; a name that is not here is an error. Sizes are counted in
layers, elements, tokens or sequences, as each description says.
"""

from __future__ import annotations

import copy
import dataclasses
import enum
import hashlib
import json
import math
from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic.alias_generators import to_camel

from concertina_protocol.messages.ranges import MOST_RANGES, Ranges, united


@dataclasses.dataclass(frozen=True)
class Rule:
    """What several fields of a section must obey together, in the API server's language and in Python."""

    field: str
    """The one to name in the refusal."""
    cel: str
    holds: Callable[[Any], bool]
    message: str


class _Section(BaseModel):
    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        alias_generator=to_camel,
        populate_by_name=True,
        use_enum_values=False,
        json_schema_extra=lambda schema, section: section.add_rules(schema),
    )
    RULES: ClassVar[tuple[Rule, ...]] = ()

    @classmethod
    def add_rules(cls, schema: dict[str, Any]) -> None:
        """To the section's schema, for the CRD."""
        rules = [{"rule": rule.cel, "message": rule.message, "fieldPath": f".{rule.field}"} for rule in cls.RULES]
        if rules:
            schema["x-kubernetes-validations"] = rules

    @model_validator(mode="after")
    def _obeys(self) -> Self:
        for rule in self.RULES:
            if not rule.holds(self):
                raise ValueError(rule.message)
        return self


class Precision(enum.StrEnum):
    auto = "auto"
    bfloat16 = "bfloat16"
    float32 = "float32"


class Determinism(enum.StrEnum):
    order = "order"
    bitwise = "bitwise"


MOST_FIXED_MICROBATCHES = 16


class RouterScores(enum.StrEnum):
    softmax = "softmax"
    sigmoid = "sigmoid"


class ExpertsConfig(_Section):
    """A mixture of experts in the place of a layer's feed-forward: a router sends each token through some of them, and
    none is dropped."""

    count: int = Field(ge=2, le=1024, description="Experts of a layer that the router chooses from.")
    active_per_token: int = Field(default=2, ge=1, le=64, description="How many of them compute each token.")
    hidden_dim: int | None = Field(
        default=None,
        ge=8,
        le=1048576,
        multiple_of=8,
        description="Width of an expert. Absent: that of model.hiddenDim.",
    )
    shared: int = Field(
        default=0,
        ge=0,
        le=64,
        description="Experts beside those, which compute every token: one feed-forward layer as wide as all of them.",
    )
    first_dense: int = Field(
        default=0, ge=0, le=511, description="So many of the first layers have a plain feed-forward instead."
    )
    scores: RouterScores = Field(
        default=RouterScores.softmax,
        description="What the router makes of its logits. A token's experts are weighed by theirs, which are made to "
        "add up to 1.",
    )
    balance_loss: float = Field(
        default=0.01,
        ge=0.0,
        le=10.0,
        description="Factor of the loss that pulls the router towards the same load on all experts, in each sequence. "
        "The loss that is shown is without it. 0 is none.",
    )
    bias_rate: float | None = Field(
        default=None,
        ge=0.0,
        le=1.0,
        description="By how much a step raises the score by which an expert with less than the mean load is chosen, "
        "and lowers that of one with more (balancing without a loss). 0 leaves these biases as they are. Absent: there "
        "are none.",
    )

    RULES = (
        Rule(
            "activePerToken",
            "self.activePerToken <= self.count",
            lambda experts: experts.active_per_token <= experts.count,
            "activePerToken must not be above count",
        ),
    )


class ModelConfig(_Section):
    """A Llama-style decoder: RMSNorm, rotary positions, grouped-query attention, SwiGLU."""

    layers: int = Field(default=4, ge=1, le=512, description="Number of decoder blocks.")
    dim: int = Field(default=128, ge=8, le=65536, multiple_of=8, description="Width of the residual stream.")
    heads: int = Field(
        default=4, ge=1, le=1024, description="Attention heads; dim must be an even multiple of their number."
    )
    kv_heads: int | None = Field(
        default=None,
        ge=1,
        le=1024,
        description="Key and value heads; heads must be a multiple of their number. Absent: as many as heads.",
    )
    hidden_dim: int | None = Field(
        default=None,
        ge=8,
        le=1048576,
        description="Width of the feed-forward layer. Absent: 8/3 of dim, rounded up to a multiple of 32.",
    )
    vocab_size: int = Field(
        default=256, ge=2, le=4194304, description="Number of different tokens; 256 is enough for bytes."
    )
    sequence_length: int = Field(default=256, ge=2, le=1048576, description="Tokens of a sequence.")
    tie_embeddings: bool = Field(default=True, description="Whether the output layer shares the embedding's weights.")
    rope_theta: float = Field(default=10000.0, ge=1.0, le=1e9, description="Base of the rotary position frequencies.")
    norm_epsilon: float = Field(
        default=1e-5,
        ge=1e-12,
        le=0.1,
        description="Added to the mean square in RMSNorm. A property of the model: take it from its config.json "
        "(rms_norm_eps).",
    )
    experts: ExpertsConfig | None = Field(
        default=None, description="A mixture of experts in each layer (docs/experts.md). Absent: the model is dense."
    )

    @property
    def resolved_kv_heads(self) -> int:
        return self.kv_heads or self.heads

    @property
    def resolved_hidden_dim(self) -> int:
        return self.hidden_dim or math.ceil(self.dim * 8 / 3 / 32) * 32

    @property
    def expert_dim(self) -> int:
        """Width of an expert, in a model that has some."""
        return (self.experts and self.experts.hidden_dim) or self.resolved_hidden_dim

    def routed(self, layer: int) -> bool:
        """Whether this layer, counted from 0, has experts."""
        return self.experts is not None and layer >= self.experts.first_dense

    @property
    def weights(self) -> int:
        """How many parameters the model has."""
        return self._weights(self.experts.count if self.experts else 0)

    @property
    def active_weights(self) -> int:
        """How many of them a token is multiplied by."""
        return self._weights(self.experts.active_per_token if self.experts else 0)

    def _weights(self, experts: int) -> int:
        """With so many of the experts that a router chooses from."""
        embeddings = (1 if self.tie_embeddings else 2) * self.vocab_size * self.dim
        dense = min(self.layers, self.experts.first_dense) if self.experts else self.layers
        blocks = dense * self.block_weights
        if self.experts:
            feed_forward = 3 * self.dim * self.expert_dim * (experts + self.experts.shared)
            routed = self.block_weights - 3 * self.dim * self.resolved_hidden_dim + feed_forward
            blocks += (self.layers - dense) * (routed + self.experts.count * self.dim)
        return embeddings + blocks + self.dim

    @property
    def block_weights(self) -> int:
        """Parameters of one decoder block, a dense one."""
        head = self.dim // self.heads
        attention = 2 * self.dim * self.dim + 2 * self.resolved_kv_heads * head * self.dim
        return attention + 3 * self.dim * self.resolved_hidden_dim + 2 * self.dim

    RULES = (
        Rule(
            "dim",
            "self.dim % (2 * self.heads) == 0",
            lambda model: model.dim % (2 * model.heads) == 0,
            "dim must be an even multiple of heads: each head's width must be even",
        ),
        Rule(
            "kvHeads",
            "!has(self.kvHeads) || self.heads % self.kvHeads == 0",
            lambda model: model.heads % model.resolved_kv_heads == 0,
            "heads must be a multiple of kvHeads",
        ),
        Rule(
            "experts.firstDense",
            "!has(self.experts) || self.experts.firstDense < self.layers",
            lambda model: model.experts is None or model.experts.first_dense < model.layers,
            "experts.firstDense must be below layers: else no layer has experts",
        ),
        Rule(
            "hiddenDim",
            "!has(self.experts) || has(self.experts.hiddenDim) || !has(self.hiddenDim) || self.hiddenDim % 8 == 0",
            lambda model: model.experts is None or model.expert_dim % 8 == 0,
            "the width of an expert must be a multiple of 8: set experts.hiddenDim, or another hiddenDim",
        ),
    )


DATA_URI = r"^((s3|gs|az)://.+|file:///.+|/.+)$"
"""Where data can be: a regular expression of RE2 and of Python."""


class DocumentMode(enum.StrEnum):
    joined = "joined"
    masked = "masked"
    packed = "packed"
    bucketed = "bucketed"


class Balancing(enum.StrEnum):
    even = "even"
    speed = "speed"


class MixtureSource(_Section):
    """One of several data sets that are trained on together."""

    uri: str = Field(
        min_length=1, max_length=1024, pattern=DATA_URI, description="Folder of manifest.json and its shards."
    )
    weight: int = Field(
        ge=1, le=1000, description="Its share of the sequences is this number over the sum of all weights."
    )


class DataConfig(_Section):
    """Token shards and their manifest, as `concertina data build` writes them: of one folder, or of a mixture."""

    uri: str | None = Field(
        default=None,
        min_length=1,
        max_length=1024,
        pattern=DATA_URI,
        description="Folder that `concertina data build` wrote: an absolute path, file:///folder, "
        "s3://bucket/folder, gs://bucket/folder or az://container/folder. Absent: mixture names several.",
    )
    mixture: Annotated[list[MixtureSource], Field(max_length=32)] = Field(
        default=[],
        description="Several data sets that are trained on together, in exact proportions. One that is used up "
        "begins anew, in another order.",
    )
    documents: DocumentMode = Field(
        default=DocumentMode.joined,
        description="How documents become sequences: joined cuts through them, masked too but keeps them from seeing "
        "each other, packed puts whole ones together, bucketed gives each a sequence of its own. The "
        "last two need `concertina data pack`.",
    )
    balance: Balancing = Field(
        default=Balancing.even,
        description="even gives every worker the same part of a batch; speed gives slower ones less, down to half. "
        "Set speed where nodes differ.",
    )
    cache_mebibytes: int = Field(
        default=4096,
        ge=16,
        le=16777216,
        description="Most MiB of training data from object stores that a node keeps on its disk.",
    )

    @property
    def sources(self) -> list[MixtureSource]:
        return [MixtureSource(uri=self.uri, weight=1)] if self.uri is not None else self.mixture

    RULES = (
        Rule(
            "uri",
            "has(self.uri) != (has(self.mixture) && size(self.mixture) > 0)",
            lambda data: (data.uri is None) == bool(data.mixture),
            "give either uri, or mixture with one data set or more",
        ),
    )


class OptimizerConfig(_Section):
    """AdamW with a linear warm-up, and a cosine down to a tenth of learningRate at the last step, where nothing else is
    said."""

    learning_rate: float = Field(
        default=3e-4, ge=0.0, le=10.0, description="Highest learning rate, reached after the warm-up."
    )
    min_learning_rate_factor: float | None = Field(
        default=None,
        ge=0.0,
        le=1.0,
        description="Learning rate at the last step, as a part of learningRate. Absent: 0.1, or what minLearningRate "
        "says.",
    )
    min_learning_rate: float | None = Field(
        default=None,
        ge=0.0,
        le=10.0,
        description="Learning rate at the last step, whatever learningRate is. Rather set minLearningRateFactor, "
        "which goes before it.",
    )
    warmup_steps: int | None = Field(
        default=None,
        ge=0,
        le=1000000000,
        description="Steps in which the learning rate rises from 0. Absent: a tenth of all steps, but at most 100.",
    )
    weight_decay: float = Field(
        default=0.1, ge=0.0, le=10.0, description="Decoupled decay of matrices; norms have none."
    )
    betas: Annotated[list[Annotated[float, Field(ge=0.0, lt=1.0)]], Field(min_length=2, max_length=2)] = Field(
        default=[0.9, 0.95], description="AdamW's two averaging factors, for the gradient and its square."
    )
    epsilon: float = Field(default=1e-8, ge=1e-16, le=1.0, description="Added to the root of AdamW's second moment.")
    gradient_clip: float = Field(
        default=1.0,
        ge=0.0,
        le=1e9,
        description="Largest norm of the gradient; a larger one is scaled down to it. 0 is no limit.",
    )

    @property
    def resolved_min_learning_rate(self) -> float:
        if self.min_learning_rate_factor is None and self.min_learning_rate is not None:
            return self.min_learning_rate
        factor = 0.1 if self.min_learning_rate_factor is None else self.min_learning_rate_factor
        return factor * self.learning_rate

    def resolved_warmup_steps(self, steps: int) -> int:
        return min(100, steps // 10) if self.warmup_steps is None else self.warmup_steps

    def doubts(self, steps: int) -> list[str]:
        """What is odd about the rates, in sentences. No refusal: manifests that were stored when minLearningRate was
        3e-5 and warmupSteps 100 by default hold these as if somebody had set them."""
        found = []
        least, warmup = self.resolved_min_learning_rate, self.resolved_warmup_steps(steps)
        if least > self.learning_rate:
            found.append(
                f"optimizer.minLearningRate ({least:g}) is above learningRate ({self.learning_rate:g}), so the rate "
                "rises to it: set optimizer.minLearningRateFactor, which is a part of learningRate"
            )
        if warmup > steps:
            found.append(
                f"optimizer.warmupSteps ({warmup}) are more than steps ({steps}), so learningRate is never reached: "
                "set fewer"
            )
        return found


class SnapshotConfig(_Section):
    """Copies of the state in node memory: what a crash falls back to."""

    every_steps: int = Field(
        default=1,
        ge=1,
        le=1000000,
        description="Steps between snapshots: at most so many are trained again after a failure. It is stretched by "
        "itself where the network is too slow.",
    )


class Activations(enum.StrEnum):
    keep = "Keep"
    products = "KeepProducts"
    recompute = "Recompute"


class Resharding(enum.StrEnum):
    auto = "Auto"
    always = "Always"
    never = "Never"


RESHARD_ABOVE = 100_000_000
"""Parameters from which on a block's weights are freed between forward and backward: below, memory is no matter and
gathering them again is."""


class MemoryConfig(_Section):
    """What is done to need less of the devices' memory, for more computation or communication. The results are the
    same."""

    activations: Activations = Field(
        default=Activations.keep,
        description="What a block's backward finds of its forward: Keep everything; KeepProducts, the results of "
        "matrix products and attention, the rest is computed again; Recompute all from the block's input.",
    )
    reshard_after_forward: Resharding = Field(
        default=Resharding.auto,
        description="Whether a block's gathered weights are freed between forward and backward, and gradients cut "
        "after each microbatch (Always: ZeRO-3; Never: ZeRO-2 with fewer gatherings, and whole gradients). Auto frees "
        "them in models of more than 100 million weights.",
    )

    def frees_weights(self, weights: int, halves: bool) -> bool:
        """Whether blocks free their gathered weights between forward and backward. `weights`: of the whole model;
        `halves`: the backward is in two halves (zero bubble), between which torch's FSDP would lose gradients."""
        if self.reshard_after_forward is Resharding.auto:
            return weights > RESHARD_ABOVE and not halves
        return self.reshard_after_forward is Resharding.always


class EvaluationConfig(_Section):
    """The loss on documents that were set aside: those of `concertina data build --validation`."""

    every_steps: int = Field(
        default=500, ge=1, le=1000000000, description="Steps between evaluations; the last step is evaluated too."
    )
    sequences: int = Field(
        default=512,
        ge=1,
        le=16777216,
        description="How many of the sequences that were set aside are evaluated, always the same ones.",
    )


class AnomalyResponse(enum.StrEnum):
    ignore = "Ignore"
    skip = "Skip"
    roll_back = "RollBack"
    stop = "Stop"


class AnomalyConfig(_Section):
    """What follows from a step that looks wrong. Skip leaves its batch out; RollBack goes back to a durable checkpoint
    and leaves out all batches since; both record which samples."""

    non_finite: Literal[AnomalyResponse.skip, AnomalyResponse.roll_back, AnomalyResponse.stop] = Field(
        default=AnomalyResponse.stop,
        description="What follows when loss or gradient are not finite: Skip leaves the batch out, RollBack goes "
        "back to a checkpoint and leaves out all since, Stop tries the step once more and then fails the "
        "job.",
    )
    spike: AnomalyResponse = Field(
        default=AnomalyResponse.ignore,
        description="What follows when the loss jumps: Ignore, Skip and RollBack as in nonFinite, or Stop, which "
        "fails the job.",
    )
    spike_deviations: float = Field(
        default=8.0,
        ge=2.0,
        le=1000.0,
        description="A jump is a loss so many standard deviations above the mean of those before. Raise it for a "
        "noisy loss.",
    )
    rollback_steps: int = Field(
        default=100,
        ge=1,
        le=1000000,
        description="Steps before the one that looks wrong which RollBack undoes at least.",
    )

    corruption_check_steps: int = Field(
        default=100,
        ge=0,
        le=1000000,
        description="Steps between checks that the workers hold the same weights; where they differ, training goes "
        "back to the last check. 0 never checks.",
    )

    @property
    def reaches(self) -> tuple[int, ...]:
        """Steps that going back may undo, whatever the reason: one checkpoint is kept for each."""
        rolls_back = AnomalyResponse.roll_back in (self.non_finite, self.spike)
        return tuple(filter(None, (self.corruption_check_steps, self.rollback_steps if rolls_back else 0)))


Edge = Annotated[int, Field(ge=0, le=2**53)]  # larger numbers are not the same in all that reads JSON


class ReproductionConfig(_Section):
    """What a run is held to that trains a checkpoint again; `concertina reproduce` writes it."""

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
    left_out: Annotated[
        list[Annotated[list[Edge], Field(min_length=2, max_length=2)]], Field(max_length=MOST_RANGES)
    ] = Field(
        default=[],
        description="Positions [begin, end) of the order of samples that are left out, as they were after something "
        "that looked wrong.",
    )

    @property
    def skipped(self) -> Ranges:
        return united((begin, end) for begin, end in self.left_out)


class TrainerConfig(_Section):
    """What the bundled trainer trains, on what, for how long."""

    steps: int = Field(default=1000, ge=1, le=1000000000, description="Optimizer steps of the whole run.")
    seed: int = Field(
        default=0, ge=0, le=2147483647, description="Decides the initial weights and the order of the data."
    )
    model: ModelConfig = Field(default=ModelConfig(), description="The model, a decoder in the style of Llama.")
    data: DataConfig = Field(description="The training data.")
    global_batch_size: int = Field(
        default=32, ge=1, le=16777216, description="Sequences that one step consumes, whatever the number of workers."
    )
    micro_batch_size: int = Field(
        default=8,
        ge=1,
        le=65536,
        description="Most sequences that a worker computes at once; lower it where memory does not suffice.",
    )
    optimizer: OptimizerConfig = Field(
        default=OptimizerConfig(), description="AdamW and its schedule: a linear warm-up, then a cosine."
    )
    precision: Precision = Field(
        default=Precision.auto,
        description="Precision of matrix products: auto is bfloat16 where the device has it, and float32 elsewhere.",
    )
    determinism: Determinism = Field(
        default=Determinism.order,
        description="order trains on the same samples in the same order with any number of workers; bitwise has the "
        "same weights to the last bit too, more slowly and in at most 16 microbatches.",
    )
    snapshot: SnapshotConfig = Field(
        default=SnapshotConfig(),
        description="Copies of the state in the memory of nodes, which training goes on from after a failure.",
    )
    memory: MemoryConfig = Field(
        default=MemoryConfig(), description="What is done to need less of the devices' memory."
    )
    anomalies: AnomalyConfig = Field(default=AnomalyConfig(), description="What follows from steps that look wrong.")
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
    def last_step(self) -> int:
        """After which the run is complete."""
        return (self.reproduction and self.reproduction.last_step) or self.steps

    RULES = (
        Rule(
            "reproduction",
            "!has(self.reproduction) || !has(self.reproduction.lastStep) || self.reproduction.lastStep <= self.steps",
            lambda trainer: trainer.last_step <= trainer.steps,
            "reproduction.lastStep must not be beyond steps",
        ),
        Rule(
            "microBatchSize",
            f"self.determinism != 'bitwise' || self.globalBatchSize <= {MOST_FIXED_MICROBATCHES} * self.microBatchSize",
            lambda trainer: (
                not trainer.bitwise or trainer.global_batch_size <= MOST_FIXED_MICROBATCHES * trainer.micro_batch_size
            ),
            f"determinism bitwise takes at most {MOST_FIXED_MICROBATCHES} microbatches: raise microBatchSize, or lower "
            "globalBatchSize",
        ),
        Rule(
            "data.documents",
            "self.determinism != 'bitwise' || self.data.documents != 'bucketed'",
            lambda trainer: not trainer.bitwise or trainer.data.documents is not DocumentMode.bucketed,
            "determinism bitwise has microbatches of one shape: choose another data.documents",
        ),
        Rule(
            "determinism",
            "self.determinism != 'bitwise' || !has(self.model.experts)",
            lambda trainer: not trainer.bitwise or trainer.model.experts is None,
            "determinism bitwise knows no experts, whose products are of other shapes in another world: set "
            "determinism to order, or remove model.experts",
        ),
        Rule(
            "data.balance",
            "self.data.balance != 'speed' || self.determinism != 'bitwise'",
            lambda trainer: trainer.data.balance is not Balancing.speed or not trainer.bitwise,
            "data.balance speed makes microbatches of different sizes, and determinism bitwise needs one shape: set "
            "balance to even, or determinism to order",
        ),
        Rule(
            "data.balance",
            "self.data.balance != 'speed' || self.data.documents != 'bucketed'",
            lambda trainer: (
                trainer.data.balance is not Balancing.speed or trainer.data.documents is not DocumentMode.bucketed
            ),
            "data.balance speed counts sequences, and with data.documents bucketed they differ in length: set balance "
            "to even, or choose another documents",
        ),
    )

    def digest(self) -> str:
        """Digest of what decides the numbers of a run (the data has a digest of its own, by content)."""
        without = {"data", "snapshot", "evaluation", "micro_batch_size", "memory", "reproduction"}
        if self.bitwise:
            without.remove("micro_batch_size")
        kept = self.model_dump(mode="json", exclude=without)
        if self.model.experts is None:  # as before there were any
            del kept["model"]["experts"]
        # As numbers, however they are said: a run from before there was another way to say them goes on as the same.
        optimizer = kept["optimizer"]
        del optimizer["min_learning_rate_factor"]
        optimizer["min_learning_rate"] = self.optimizer.resolved_min_learning_rate
        optimizer["warmup_steps"] = self.optimizer.resolved_warmup_steps(self.steps)
        return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()[:16]


RETIRED: dict[tuple[str, ...], object] = {
    ("data", "fetchThreads"): 4,
    ("data", "patienceSeconds"): 600,
    ("logEverySteps",): 10,
}
"""Fields that older versions had, with the defaults that they had: nobody sets them any more."""


def of_any_version(values: Mapping[str, Any]) -> TrainerConfig:
    """A configuration as this or an older version wrote it, into a pod or a checkpoint. Raises ValidationError."""
    config = copy.deepcopy(dict(values))
    for *sections, field in RETIRED:
        section: Any = config
        for name in sections:
            section = section.get(name) if isinstance(section, dict) else None
        if isinstance(section, dict):
            section.pop(field, None)
    return TrainerConfig.model_validate(config)


class PipelineSchedule(enum.StrEnum):
    one_f_one_b = "1F1B"
    gpipe = "GPipe"
    interleaved = "Interleaved1F1B"
    zero_bubble = "InterleavedZeroBubble"

    @property
    def stages(self) -> int:
        """Of each rank."""
        return 2 if self in (PipelineSchedule.interleaved, PipelineSchedule.zero_bubble) else 1


class ParallelismConfig(BaseModel):
    """`spec.parallelism`: how many ranks each dimension takes. What is left of the world is data parallelism."""

    model_config = ConfigDict(extra="ignore", frozen=True, alias_generator=to_camel, populate_by_name=True)

    tensor: int = Field(default=1, ge=1, le=1024, description="Workers that share each layer (tensor parallelism).")
    pipeline: int = Field(
        default=1, ge=1, le=1024, description="Stages that the layers are divided into (pipeline parallelism)."
    )
    schedule: PipelineSchedule = Field(
        default=PipelineSchedule.one_f_one_b,
        description="Order in which the bundled trainer's stages compute. The interleaved ones have two stages a "
        "worker: less waiting, and more communication.",
    )
    context: int = Field(
        default=1, ge=1, le=1024, description="Workers that share each sequence (context parallelism)."
    )
    shard: int | None = Field(
        default=None,
        ge=1,
        le=65536,
        description="Groups of workers that hold one copy of weights and optimizer state between them; there are as "
        "many copies as fit (HSDP; 1 is plain data parallelism). Absent: one copy over all (FSDP).",
    )
    expert: int = Field(
        default=1,
        ge=1,
        le=1024,
        description="Workers that the experts of a layer are dealt out to (expert parallelism), among those that shard "
        "one copy: it divides shard and trainer.model.experts.count.",
    )

    @property
    def group(self) -> int:
        """Ranks that compute the same sequences."""
        return self.tensor * self.pipeline * self.context

    @property
    def stages_per_rank(self) -> int:
        return self.schedule.stages if self.pipeline > 1 else 1

    @property
    def block(self) -> int:
        """Ranks that only work together: a world is a whole number of blocks."""
        return self.group * (self.shard or self.expert)


class CheckpointConfig(BaseModel):
    """`spec.checkpoint`, as the trainer reads it: what a newer operator adds is none of its business. (What a person
    writes is read strictly, as concertina.api.spec.Checkpoint.)"""

    model_config = ConfigDict(extra="ignore", frozen=True, alias_generator=to_camel, populate_by_name=True)

    uri: str = Field(
        min_length=1,
        max_length=1024,
        description="Folder of this job's checkpoints: s3://bucket/folder, gs://bucket/folder, az://container/folder "
        "or file:///folder. The job goes on from the newest in it; no two live jobs share one.",
    )
    every_steps: int | None = Field(
        default=None, ge=1, le=1000000000, description="Steps between checkpoints. Absent: everySeconds alone decides."
    )
    every_seconds: Annotated[int, Field(ge=1, le=31536000)] | Literal["auto"] = Field(
        default=600,
        description="Most seconds between checkpoints, or auto for what loses the least time by how long saves take "
        "and how often replicas fail (status.checkpointInterval).",
        json_schema_extra={
            "x-kubernetes-int-or-string": True,
            "x-kubernetes-validations": [
                {
                    "rule": "type(self) == int ? self >= 1 && self <= 31536000 : self == 'auto'",
                    "message": "must be auto or a number of seconds from 1 to 31536000",
                }
            ],
        },
    )
    keep: int = Field(default=5, ge=1, le=1000, description="How many of the newest checkpoints are kept.")
    keep_every_steps: int | None = Field(
        default=None,
        ge=1,
        le=1000000000,
        description="Of every so many steps the first checkpoint is kept for good. Absent: only the newest are kept.",
    )
    resume_from: str = Field(
        default="",
        max_length=1024,
        description="Another run's checkpoint, or its folder for the newest one, to go on from with its whole state: "
        "the same data and model. It matters only while there is no checkpoint under uri.",
    )
    init_from: str = Field(
        default="",
        max_length=1024,
        description="Weights to begin with at step 0: another run's checkpoint or folder, or safetensors with "
        "Hugging Face's names for Llama. It matters only while there is no checkpoint under uri.",
    )
