"""Rules on the degrees of parallelism that a model, its data and the number of ranks allow.

Messages name the nearest degrees that are allowed. The operator imports this module, so it does not import torch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from concertina_trainer.config.data_config import Balancing, DocumentMode
from concertina_trainer.config.memory_config import Resharding
from concertina_trainer.config.model_config import BLOCK, FrozenDtype
from concertina_trainer.config.model_sizes import EXPERTS, WITH_EXPERTS, value_of_size
from concertina_trainer.config.optimizer_config import StatePrecision
from concertina_trainer.config.parallelism import ParallelismConfig, PipelineSchedule
from concertina_trainer.config.trainer import Precision, TrainerConfig

DEGREES = ("tensor", "pipeline", "context", "expert")
"""Degrees of parallelism for which a message names the nearest allowed values."""
RESHARD_ABOVE = 100_000_000
"""Number of parameters above which blocks free their gathered weights between the forward and the backward pass.

This number decides only if the device's memory is not known. In smaller models, freeing weights saves little memory,
and gathering the weights again takes time.
"""
FLOAT8_MULTIPLE = 16
"""Number that must divide the widths of matrices that CUDA multiplies in float8."""
MOST_DEGREE = 1024
"""Maximum degree of one dimension of parallelism, as in ParallelismConfig."""


@dataclasses.dataclass(frozen=True)
class LayoutRule:
    """Rule on the sections trainer and parallelism of a job's spec.

    A rule is stated twice: in CEL for the API server, and in Python for the trainer.
    """

    field: str
    """Path in the spec of the field that the user has to change if the rule is violated."""
    cel: str
    """Rule in CEL. `self` is the spec, whose trainer section is present."""
    holds: Callable[[TrainerConfig, ParallelismConfig], bool]
    message: str
    without_parallelism: bool = False
    """True if the rule also applies to a spec without the section parallelism.

    Such a spec always satisfies all other rules.
    """


_TENSOR = "(has(self.parallelism) ? self.parallelism.tensor : 1)"
_GROUP = "self.parallelism.tensor * self.parallelism.pipeline * self.parallelism.context"
_MODEL = "self.trainer.model"


def _of_model(field: str, otherwise: str) -> str:
    """Return a CEL expression for the value of a field of the model.

    If the job uses a named size, the size may set the field. `otherwise` is the expression for a job without a named
    size.
    """
    return f"(has({_MODEL}.size) ? {value_of_size(field, f'{_MODEL}.size')} : {otherwise})"


_HEADS = _of_model("heads", f"{_MODEL}.heads")
_KV_HEADS = _of_model("kvHeads", f"has({_MODEL}.kvHeads) ? {_MODEL}.kvHeads : {_MODEL}.heads")
_LAYERS = _of_model("layers", f"{_MODEL}.layers")
_HIDDEN = _of_model("hiddenDim", f"has({_MODEL}.hiddenDim) ? {_MODEL}.hiddenDim : ({_MODEL}.dim + 11) / 12 * 32")
_DIM = _of_model("dim", f"{_MODEL}.dim")
_HEAD_DIM = f"(has({_MODEL}.headDim) ? {_MODEL}.headDim : {_DIM} / {_HEADS})"
_LENGTH = f"(has({_MODEL}.sequenceLength) ? {_MODEL}.sequenceLength : {_of_model('sequenceLength', '256')})"
_HAS_EXPERTS = f"(has({_MODEL}.experts) || has({_MODEL}.size) && {_MODEL}.size in {list(WITH_EXPERTS)})"
_EXPERT_COUNT = f"(has({_MODEL}.experts) ? {_MODEL}.experts.count : {EXPERTS['count']})"
_EXPERT = f"(has({_MODEL}.experts.hiddenDim) ? {_MODEL}.experts.hiddenDim : {_HIDDEN})"
_NO_HALVES = f"self.parallelism.schedule != '{PipelineSchedule.zero_bubble.value}'"
_TWICE = [schedule.value for schedule in PipelineSchedule if schedule.stages == 2]


def _divides_sequence(trainer: TrainerConfig, parallelism: ParallelismConfig) -> bool:
    return parallelism.context == 1 or trainer.model.sequence_length % (2 * parallelism.context) == 0


def _divides_shared(trainer: TrainerConfig, parallelism: ParallelismConfig) -> bool:
    return trainer.model.shared_width % parallelism.tensor == 0


def _has_whole_blocks(trainer: TrainerConfig, parallelism: ParallelismConfig) -> bool:
    """Return whether each worker has whole blocks of quantized weights (a block is the elements with one scale)."""
    model = trainer.model
    if model.lora is None or not model.lora.frozen_dtype.quantized:
        return True
    widths = (model.heads * model.resolved_head_dim, model.resolved_hidden_dim)
    return model.dim % BLOCK == 0 and not any(int(width) % (parallelism.tensor * BLOCK) for width in widths)


def _has_widths_for_float8(trainer: TrainerConfig, parallelism: ParallelismConfig) -> bool:
    model = trainer.model
    key_dim = model.resolved_kv_heads * model.resolved_head_dim
    widths = (model.dim, key_dim, model.resolved_hidden_dim, model.shared_width)
    return trainer.precision is not Precision.float8 or not any(int(width) % FLOAT8_MULTIPLE for width in widths)


def _whole(dimension: str) -> LayoutRule:
    """Return the rule that a custom model must have degree 1 in one dimension of parallelism."""
    return LayoutRule(
        f"parallelism.{dimension}",
        f"!has(self.trainer.model.entrypoint) && !has(self.trainer.model.hf) || self.parallelism.{dimension} == 1",
        lambda trainer, parallelism: trainer.model.custom is None or getattr(parallelism, dimension) == 1,
        f"{dimension} divides the bundled decoder, and the model of trainer.model.entrypoint or hf does not support "
        f"it: remove parallelism.{dimension}",
    )


def _of_sizes(rule: LayoutRule) -> LayoutRule:
    """Return the rule, changed so that it accepts a spec in which `trainer.model.from` is set.

    The sizes of such a model are in another file, so the trainer checks the rule after it has read that file. Rules on
    tensor parallelism also accept a spec with `trainer.model.hf`. For such a model, the trainer checks the widths of
    the weights.
    """
    described = "has(self.trainer.model.from)"
    if rule.field == "parallelism.tensor":
        described += " || has(self.trainer.model.hf)"

    def holds(trainer: TrainerConfig, parallelism: ParallelismConfig) -> bool:
        model = trainer.model
        is_described = model.from_ is not None or (rule.field == "parallelism.tensor" and model.hf is not None)
        return is_described or rule.holds(trainer, parallelism)

    return dataclasses.replace(rule, cel=f"{described} || ({rule.cel})", holds=holds)


_RULES = (
    LayoutRule(
        "parallelism.tensor",
        "!has(self.trainer.model.entrypoint) || self.parallelism.tensor == 1",
        lambda trainer, parallelism: trainer.model.entrypoint is None or parallelism.tensor == 1,
        "tensor divides the bundled decoder and models of trainer.model.hf, and the model of trainer.model.entrypoint "
        "does not support it: remove parallelism.tensor",
    ),
    *map(_whole, ("pipeline", "context")),
    LayoutRule(
        "parallelism.tensor",
        f"{_HEADS} % self.parallelism.tensor == 0",
        lambda trainer, parallelism: trainer.model.heads % parallelism.tensor == 0,
        "tensor must divide trainer.model.heads, because each worker of the group computes whole heads",
    ),
    LayoutRule(
        "parallelism.tensor",
        f"{_KV_HEADS} % self.parallelism.tensor == 0",
        lambda trainer, parallelism: trainer.model.kv_heads is None or trainer.model.kv_heads % parallelism.tensor == 0,
        "tensor must divide trainer.model.kvHeads, because each worker of the group computes whole heads",
    ),
    LayoutRule(
        "parallelism.tensor",
        f"{_HIDDEN} % self.parallelism.tensor == 0",
        lambda trainer, parallelism: trainer.model.resolved_hidden_dim % parallelism.tensor == 0,
        "tensor must divide trainer.model.hiddenDim, or the width that follows from dim if hiddenDim is absent",
    ),
    LayoutRule(
        "parallelism.context",
        f"self.parallelism.context == 1 || {_LENGTH} % (2 * self.parallelism.context) == 0",
        _divides_sequence,
        "trainer.model.sequenceLength must be a multiple of twice context, because each worker of the "
        "group computes two pieces of a sequence",
    ),
    LayoutRule(
        "parallelism.tensor",
        f"has({_MODEL}.hf) || {_LENGTH} / self.parallelism.context % self.parallelism.tensor == 0",
        lambda trainer, parallelism: (
            trainer.model.hf is not None
            or trainer.model.sequence_length // parallelism.context % parallelism.tensor == 0
        ),
        "tensor must divide trainer.model.sequenceLength / context, because the group also divides the "
        "sequence between layers",
    ),
    LayoutRule(
        "parallelism.pipeline",
        f"{_LAYERS} >= self.parallelism.pipeline * (self.parallelism.schedule in {_TWICE} ? 2 : 1)",
        lambda trainer, parallelism: trainer.model.layers >= parallelism.pipeline * parallelism.schedule.stages,
        "pipeline needs at least one layer of trainer.model.layers for each stage, and interleaved "
        "schedules have two stages for each worker",
    ),
    LayoutRule(
        "trainer.memory.reshardAfterForward",
        "!has(self.trainer.memory.reshardAfterForward) || "
        f"self.trainer.memory.reshardAfterForward != 'Always' || self.parallelism.pipeline == 1 || {_NO_HALVES}",
        lambda trainer, parallelism: (
            trainer.memory.reshard_after_forward is not Resharding.always or not parallelism.backward_in_halves
        ),
        "schedule InterleavedZeroBubble keeps gathered weights until both halves of the backward pass are "
        "done: set reshardAfterForward to Never, remove it, or choose another parallelism.schedule",
    ),
    LayoutRule(
        "parallelism.asyncTensor",
        f"!self.parallelism.asyncTensor || self.parallelism.pipeline == 1 || {_NO_HALVES}",
        lambda trainer, parallelism: not (parallelism.async_tensor and parallelism.backward_in_halves),
        "asyncTensor computes the gradients of a product's input and weight together, and schedule "
        "InterleavedZeroBubble needs them separately: choose another parallelism.schedule, or remove "
        "asyncTensor",
    ),
    LayoutRule(
        "parallelism.asyncTensor",
        "!self.parallelism.asyncTensor || !has(self.trainer.model.hf)",
        lambda trainer, parallelism: not parallelism.async_tensor or trainer.model.hf is None,
        "asyncTensor overlaps the matrix products of the bundled decoder only: remove asyncTensor or trainer.model.hf",
    ),
    LayoutRule(
        "parallelism.asyncTensor",
        "!self.parallelism.asyncTensor || !has(self.trainer.model.lora)",
        lambda trainer, parallelism: not parallelism.async_tensor or trainer.model.lora is None,
        "asyncTensor does not support the adapters of trainer.model.lora: remove asyncTensor or trainer.model.lora",
    ),
    LayoutRule(
        "parallelism.tensor",
        "!has(self.trainer.model.lora) || "
        f"!(self.trainer.model.lora.frozenDtype in {[dtype.value for dtype in FrozenDtype if dtype.quantized]}) || "
        f"{_DIM} % {BLOCK} == 0 && {_HEADS} * {_HEAD_DIM} % ({_TENSOR} * {BLOCK}) == 0 && "
        f"{_HIDDEN} % ({_TENSOR} * {BLOCK}) == 0",
        _has_whole_blocks,
        f"a quantized frozenDtype of trainer.model.lora has a scale for each {BLOCK} columns of a matrix, and no two "
        f"workers may have a part of these: {BLOCK} must divide trainer.model.dim, and tensor x {BLOCK} must divide "
        "heads x headDim and hiddenDim",
        without_parallelism=True,
    ),
    LayoutRule(
        "parallelism.expert",
        f"self.parallelism.expert == 1 || {_HAS_EXPERTS}",
        lambda trainer, parallelism: parallelism.expert == 1 or trainer.model.experts is not None,
        "expert divides the experts of a layer among workers, and trainer.model.experts is absent: add "
        "experts, or remove parallelism.expert",
    ),
    LayoutRule(
        "parallelism.expert",
        f"!{_HAS_EXPERTS} || {_EXPERT_COUNT} % self.parallelism.expert == 0",
        lambda trainer, parallelism: (
            trainer.model.experts is None or trainer.model.experts.count % parallelism.expert == 0
        ),
        "expert must divide trainer.model.experts.count, because each worker of the group has the same "
        "number of experts",
    ),
    LayoutRule(
        "parallelism.expert",
        "!has(self.parallelism.shard) || self.parallelism.shard * self.parallelism.context * self.parallelism.tensor % "
        "self.parallelism.expert == 0",
        lambda trainer, parallelism: parallelism.shard is None or parallelism.shard % parallelism.expert_shards == 0,
        "expert must divide shard x context x tensor, because the experts are divided among the workers of "
        "a stage that share one copy of the weights",
    ),
    LayoutRule(
        "parallelism.tensor",
        f"!has(self.trainer.model.experts) || self.trainer.model.experts.shared * {_EXPERT} % "
        "self.parallelism.tensor == 0",
        _divides_shared,
        "tensor must divide the width of the shared experts, which is shared x hiddenDim of trainer.model.experts",
    ),
    LayoutRule(
        "trainer.data.documents",
        f"{_GROUP} == 1 || self.trainer.data.documents != 'Bucketed'",
        lambda trainer, parallelism: parallelism.group == 1 or trainer.data.documents is not DocumentMode.bucketed,
        "data.documents Bucketed makes microbatches of different lengths, and tensor, pipeline and context "
        "parallelism need equal lengths: choose another value of data.documents",
    ),
    LayoutRule(
        "trainer.data.balance",
        f"{_GROUP} == 1 || self.trainer.data.balance != 'Speed'",
        lambda trainer, parallelism: parallelism.group == 1 or trainer.data.balance is not Balancing.speed,
        "data.balance Speed gives each worker its own number of sequences, and the workers of a tensor, "
        "pipeline or context group compute the same sequences: set balance to Even",
    ),
    LayoutRule(
        "trainer.precision",
        "self.trainer.precision != 'Float8' || self.parallelism.tensor == 1",
        lambda trainer, parallelism: trainer.precision is not Precision.float8 or parallelism.tensor == 1,
        "precision Float8 has a scale for each row of a matrix, and tensor parallelism divides rows, which changes the "
        "scales: set precision to BFloat16, or remove parallelism.tensor",
    ),
    LayoutRule(
        "trainer.precision",
        "self.trainer.precision != 'Float8' || "
        f"{_DIM} % {FLOAT8_MULTIPLE} == 0 && {_KV_HEADS} * {_HEAD_DIM} % {FLOAT8_MULTIPLE} == 0 && "
        f"{_HIDDEN} % {FLOAT8_MULTIPLE} == 0 && (!has(self.trainer.model.experts) || "
        f"self.trainer.model.experts.shared * {_EXPERT} % {FLOAT8_MULTIPLE} == 0)",
        _has_widths_for_float8,
        f"precision Float8 multiplies matrices whose widths are multiples of {FLOAT8_MULTIPLE}: change "
        "trainer.model.dim, hiddenDim, kvHeads x headDim or the width of the shared experts, or set precision to "
        "BFloat16",
        without_parallelism=True,
    ),
    LayoutRule(
        "trainer.gradientPrecision",
        "self.trainer.gradientPrecision == 'Float32' || self.parallelism.pipeline == 1",
        lambda trainer, parallelism: trainer.gradient_precision is StatePrecision.float32 or parallelism.pipeline == 1,
        "BFloat16 would also round the sums of microbatches in a pipeline: set gradientPrecision to Float32, or remove "
        "parallelism.pipeline",
    ),
    LayoutRule(
        "trainer.determinism",
        f"self.trainer.determinism != 'Bitwise' || {_GROUP} == 1 && !has(self.parallelism.shard)",
        lambda trainer, parallelism: not trainer.bitwise or (parallelism.group == 1 and parallelism.shard is None),
        "determinism Bitwise needs one order of summation over all workers, so it supports no parallelism: "
        "set determinism to Order, or remove parallelism",
    ),
)


OF_SIZES = ("model.heads", "model.kvHeads", "model.hiddenDim", "model.layers", "model.experts")
RULES = tuple(
    _of_sizes(rule) if any(f"self.trainer.{name}" in rule.cel for name in OF_SIZES) else rule for rule in _RULES
)


def refusal(rule: LayoutRule, trainer: TrainerConfig, parallelism: ParallelismConfig) -> str:
    """Return why the rule refuses this layout, and the nearest degrees that all rules allow."""
    dimension = rule.field.removeprefix("parallelism.")
    if dimension not in DEGREES:
        return rule.message
    requested_degree = getattr(parallelism, dimension)

    def allowed(degree: int) -> bool:
        candidate = parallelism.model_copy(update={dimension: degree})
        return all(
            rule_of_field.holds(trainer, candidate) for rule_of_field in RULES if rule_of_field.field == rule.field
        )

    return (
        f"{rule.message}; {dimension} is {requested_degree}{_instead(_nearest(requested_degree, allowed, MOST_DEGREE))}"
    )


def problems(trainer: TrainerConfig, parallelism: ParallelismConfig, world: int | None = None) -> tuple[str, ...]:
    """Return a sentence for each reason why the bundled trainer can't train in this layout.

    `world` is the number of ranks, or None if it is not known.

    If it can train in this layout, the result is empty.
    """
    sentences = [
        f"{rule.field}: {refusal(rule, trainer, parallelism)}" for rule in RULES if not rule.holds(trainer, parallelism)
    ]
    if world is not None and world % parallelism.block:
        nearest = nearest_sizes(world, parallelism.block)
        sentences.append(
            f"parallelism: {world} workers are not a multiple of the block of {parallelism.block} "
            f"workers{_instead(nearest)}"
        )
    return tuple(sentences)


def frees_weights(trainer: TrainerConfig, parallelism: ParallelismConfig, weights: int | None = None) -> bool:
    """Return whether blocks free their gathered weights between the forward and the backward pass.

    `weights` is the number of parameters of a custom model.
    """
    if trainer.memory.resharding is None:
        return (weights or trainer.model.weights) > RESHARD_ABOVE and not parallelism.backward_in_halves
    return trainer.memory.resharding is Resharding.always


def reduces_each(trainer: TrainerConfig, parallelism: ParallelismConfig, weights: int | None = None) -> bool:
    """Return whether the gradients of each microbatch are reduced over ranks immediately after the microbatch.

    Otherwise, each rank first sums the unsharded gradients of all its microbatches. The result is True in two cases. In
    the first case, blocks free their gathered weights to save memory, so there is no memory for unsharded gradients
    either. In the second case, gradients have the dtype bfloat16, in which FSDP would round each addition of the sum.
    """
    if parallelism.pipeline > 1:
        return False
    rounded = trainer.gradient_precision is StatePrecision.bfloat16
    return rounded or frees_weights(trainer, parallelism, weights)


def nearest_sizes(size: int, step: int) -> tuple[int, ...]:
    """Return the positive multiples of `step` that are nearest to `size`.

    The result is the greatest positive multiple of at most `size`, if there is one, and the next greater multiple.
    """
    below = size - size % step
    return tuple(near for near in (below, below + step) if near)


def _nearest(requested_degree: int, allowed: Callable[[int], bool], most: int) -> tuple[int, ...]:
    """Return the nearest allowed degree below `requested_degree` and the nearest one above it, if they exist."""
    below = next((degree for degree in range(requested_degree - 1, 0, -1) if allowed(degree)), None)
    above = next((degree for degree in range(requested_degree + 1, most + 1) if allowed(degree)), None)
    return tuple(degree for degree in (below, above) if degree is not None)


def _instead(nearest: tuple[int, ...]) -> str:
    return f": the nearest that fit: {' and '.join(map(str, nearest))}" if nearest else ""
