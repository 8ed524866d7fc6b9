"""spec.trainer.model: the model to train."""

from __future__ import annotations

import enum
import json
import math
from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import Field, model_validator
from pydantic.alias_generators import to_camel

from concertina_trainer.config.model_sizes import EXPERTS, OF_DATA, SIZES, WITH_EXPERTS, ModelSize, value_of_size
from concertina_trainer.config.positions_config import RopeScalingConfig, RotaryPairs
from concertina_trainer.config.section import ENTRYPOINT, Section, SectionRule
from concertina_trainer.config.window_config import WindowConfig


class Activation(enum.StrEnum):
    silu = "Silu"
    gelu_tanh = "GeluTanh"


class RouterScores(enum.StrEnum):
    softmax = "Softmax"
    sigmoid = "Sigmoid"


class ClampedSwigluConfig(Section):
    """Experts and router of gpt-oss.

    The experts compute a clamped variant of SwiGLU. Their matrices and the router's matrix have biases.
    """

    limit: float = Field(
        default=7.0,
        gt=0.0,
        le=65536.0,
        description="Limit of both factors before they are multiplied: the gate is at most limit, and the other factor "
        "is between -limit and limit.",
    )
    alpha: float = Field(
        default=1.702, gt=0.0, le=65536.0, description="Factor of the gate within the sigmoid function."
    )


class ExpertsConfig(Section):
    """Mixture of experts in place of a layer's feed-forward.

    A router sends each token to some of the experts. No token is dropped.
    """

    count: int = Field(ge=2, le=1024, description="Number of routed experts in a layer.")
    active_per_token: int = Field(
        default=2, ge=1, le=64, description="Number of experts that the router chooses for each token."
    )
    hidden_dim: int | None = Field(
        default=None,
        ge=8,
        le=1048576,
        multiple_of=8,
        description="Hidden width of an expert. Absent: model.hiddenDim.",
    )
    shared: int = Field(
        default=0,
        ge=0,
        le=64,
        description="Number of shared experts, which compute every token in addition to the routed ones. "
        "They are one feed-forward layer with their combined width.",
    )
    shared_gate: bool = Field(
        default=False,
        description="Whether the output of the shared experts is multiplied by a learned factor between 0 and 1 for "
        "each token (Qwen 2).",
    )
    first_dense: int = Field(
        default=0,
        ge=0,
        le=511,
        description="Number of layers at the beginning of the model that have a "
        "dense feed-forward layer instead of experts.",
    )
    scores: RouterScores = Field(
        default=RouterScores.softmax,
        description="Function that turns the router's logits into scores. The scores weight the outputs of "
        "a token's experts.",
    )
    normalize_shares: bool = Field(
        default=True, description="Whether the scores of a token's experts are normalized to add up to 1."
    )
    share_scale: float = Field(
        default=1.0,
        gt=0.0,
        le=1000.0,
        description="Factor of the scores that weight the outputs of a token's experts, after normalization (GLM 4.5).",
    )
    balance_loss: float = Field(
        default=0.01,
        ge=0.0,
        le=10.0,
        description="Factor of the auxiliary loss that balances the load of the experts, for each "
        "sequence. The reported loss does not include it. 0 turns it off.",
    )
    bias_rate: float | None = Field(
        default=None,
        ge=0.0,
        le=1.0,
        description="Change of an expert's routing bias in each step. The bias balances load without a "
        "loss term: it rises for an expert below the mean load and falls for an expert above "
        "it. 0 keeps the biases constant. Absent: there are no biases.",
    )
    clamped_swiglu: ClampedSwigluConfig | None = Field(
        default=None,
        description="Experts and router with biases and a clamped activation, as in gpt-oss. Absent: they have no "
        "biases, and model.activation applies.",
    )

    RULES = (
        SectionRule(
            "clampedSwiglu",
            "!has(self.clampedSwiglu) || self.shared == 0",
            lambda experts: experts.clamped_swiglu is None or experts.shared == 0,
            "clampedSwiglu does not apply to shared experts: set shared to 0, or remove clampedSwiglu",
        ),
        SectionRule(
            "sharedGate",
            "!self.sharedGate || self.shared > 0",
            lambda experts: not experts.shared_gate or experts.shared > 0,
            "sharedGate multiplies the output of the shared experts: set shared to 1 or more, or remove sharedGate",
        ),
        SectionRule(
            "activePerToken",
            "self.activePerToken <= self.count",
            lambda experts: experts.active_per_token <= experts.count,
            "activePerToken must not exceed count",
        ),
    )


class Projection(enum.StrEnum):
    """Matrix of a decoder block."""

    query = "Query"
    key = "Key"
    value = "Value"
    output = "Output"
    gate = "Gate"
    up = "Up"
    down = "Down"


FEED_FORWARD = (Projection.gate, Projection.up, Projection.down)
"""Matrices of a feed-forward layer, and of each expert."""


class FrozenDtype(enum.StrEnum):
    """Dtype in which frozen weights are kept in memory."""

    bfloat16 = "BFloat16"
    float32 = "Float32"
    int8 = "Int8"
    normal_float4 = "NormalFloat4"

    @property
    def quantized(self) -> bool:
        """True if the frozen weights of layers with adapters are kept in 8-bit integers or 4-bit codes."""
        return self in (FrozenDtype.int8, FrozenDtype.normal_float4)


BLOCK = 64
"""Number of consecutive elements, in a row of a quantized weight, that share one scale."""
NORMAL_FLOAT = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
"""Values of the 16 codes of NormalFloat4, in float32: quantiles of the normal distribution (arXiv 2305.14314)."""


class LoraConfig(Section):
    """Low-rank adapters (LoRA).

    All weights of the model are frozen. Two small matrices are trained for each adapted weight.
    """

    rank: int = Field(
        default=16,
        ge=1,
        le=4096,
        description="Rank of the adapters: the number of rows of the first matrix and of columns of the second.",
    )
    alpha: float = Field(
        default=32.0,
        gt=0.0,
        le=1e6,
        description="Scale of the adapters. The product of the two matrices, "
        "times alpha / rank, is added to the weight.",
    )
    targets: list[Projection] = Field(
        default=list(Projection),
        min_length=1,
        max_length=len(Projection),
        description="Matrices of each block that have adapters. Gate, Up and Down also mean those of each expert.",
    )
    dropout: float = Field(
        default=0.0,
        ge=0.0,
        lt=1.0,
        description="Probability with which an element of an adapter's input is dropped in training. The other "
        "elements are divided by 1 - dropout.",
    )
    frozen_dtype: FrozenDtype = Field(
        default=FrozenDtype.bfloat16,
        description="Dtype in which frozen weights are kept, not that of the computation. Int8 and NormalFloat4 "
        "quantize the matrices with adapters, and need safetensors files in checkpoint.initFrom.",
    )

    @property
    def scale(self) -> float:
        return self.alpha / self.rank

    @property
    def training_scale(self) -> float:
        """Scale of the adapters in training, adjusted for dropout, which scales the remaining elements up."""
        return self.scale / (1 - self.dropout)


def _no_default(schema: dict[str, Any]) -> None:
    """Remove the default from the field's schema in the CRD.

    With a default in the schema, the API server would fill in the default even if the job's named size has a different
    value.
    """
    schema.pop("default")


HF_ENTRYPOINT = "concertina_trainer.model.hf:spec"
"""ModelSpec of the models of transformers. Its options are the fields of config.json."""


class ModelConfig(Section):
    """Llama-style decoder (RMSNorm, rotary positions, grouped-query attention, SwiGLU), or a custom model."""

    entrypoint: str | None = Field(
        default=None,
        max_length=256,
        pattern=ENTRYPOINT,
        description="Your own model, as package.module:spec: a ModelSpec in the image of the container "
        "trainer (docs/own-models.md). With it, only options and sequenceLength apply. Absent: "
        "the bundled decoder.",
    )
    options: dict[str, Any] | None = Field(
        default=None, description="Options of the model that entrypoint names, with any fields."
    )

    hf: str | None = Field(
        default=None,
        min_length=1,
        max_length=1024,
        pattern=r"^\S+$",
        description="Folder with the config.json of a causal language model that transformers computes, instead of the "
        "bundled decoder: a path in the pods, or a URI. With it, only sequenceLength applies. It is slower, and has "
        "fewer kinds of parallelism (docs/models.md).",
    )
    from_: str | None = Field(
        default=None,
        alias="from",
        min_length=1,
        max_length=1024,
        pattern=r"^\S+$",
        description="Folder with the config.json of a Hugging Face model: a path in the pods, or a URI. "
        "All other fields except sequenceLength and lora are read from it. Weights are not "
        "read from this folder, but from checkpoint.initFrom.",
    )
    size: ModelSize | None = Field(
        default=None,
        description="Named size of the decoder, with the dimensions of a published model (docs/memory.md). "
        "With it, set only vocabSize, sequenceLength, lora and the balancing of experts. "
        "Absent: the fields below.",
    )
    layers: int = Field(default=4, ge=1, le=512, description="Number of decoder blocks.")
    dim: int = Field(default=128, ge=8, le=65536, multiple_of=8, description="Width of the residual stream.")
    heads: int = Field(default=4, ge=1, le=1024, description="Attention heads.")
    kv_heads: int | None = Field(
        default=None,
        ge=1,
        le=1024,
        description="Number of key and value heads. heads must be a multiple of it. Absent: the same as heads.",
    )
    head_dim: int | None = Field(
        default=None,
        ge=2,
        le=4096,
        multiple_of=2,
        description="Width of an attention head. Absent: dim / heads, which must be even.",
    )
    hidden_dim: int | None = Field(
        default=None,
        ge=8,
        le=1048576,
        description="Width of the feed-forward layer. Absent: 8/3 of dim, rounded up to a multiple of 32.",
    )
    vocab_size: int = Field(
        default=256,
        ge=2,
        le=4194304,
        description="Number of different tokens. Absent: the vocabulary of size, or 256 without size, "
        "which is enough for bytes.",
        json_schema_extra=_no_default,
    )
    sequence_length: int = Field(
        default=256,
        ge=2,
        le=1048576,
        description="Length of a sequence, in tokens or frames. Absent: the length that size has, or 256 without size.",
        json_schema_extra=_no_default,
    )
    tie_embeddings: bool = Field(default=True, description="Whether the output layer shares the embedding's weights.")
    rope_theta: float = Field(default=10000.0, ge=1.0, le=1e9, description="Base of the rotary position frequencies.")
    rope_scaling: RopeScalingConfig | None = Field(
        default=None, description="Scaling of the rotary position frequencies. Absent: they are not scaled."
    )
    rotary_share: float = Field(
        default=1.0,
        gt=0.0,
        le=1.0,
        description="Share of each head's elements that is rotated, from the beginning of the head.",
    )
    rotary_pairs: RotaryPairs = Field(
        default=RotaryPairs.halves,
        description="Elements that are rotated together. Halves pairs the first half of a head with the "
        "second. Adjacent pairs each element with its neighbor.",
    )
    window: WindowConfig | None = Field(
        default=None,
        description="Number of tokens that a token attends to (Mistral, Gemma). Absent: all previous tokens.",
    )
    qkv_bias: bool = Field(default=False, description="Whether a bias is added to queries, keys and values (Qwen 2).")
    output_bias: bool = Field(
        default=False, description="Whether a bias is added to the output of attention (gpt-oss)."
    )
    attention_sinks: bool = Field(
        default=False,
        description="Whether each head has a learned score that takes part in the softmax of the attention scores, "
        "without a value (gpt-oss).",
    )
    qk_norm: bool = Field(
        default=False,
        description="Whether the queries and keys of each head pass an RMSNorm before the rotation (Qwen 3).",
    )
    query_scale: int | None = Field(
        default=None,
        ge=1,
        le=65536,
        description="Attention scores are divided by the square root of this number (Gemma). Absent: the "
        "width of a head.",
    )
    attention_soft_cap: float | None = Field(
        default=None,
        gt=0.0,
        le=65536.0,
        description="Bound c of attention scores s, which become c tanh(s / c) (Gemma 2). Absent: no bound.",
    )
    logit_soft_cap: float | None = Field(
        default=None,
        gt=0.0,
        le=65536.0,
        description="Bound c of logits l, which become c tanh(l / c) (Gemma 2). Absent: no bound.",
    )
    activation: Activation = Field(
        default=Activation.silu,
        description="Activation function of the feed-forward layer's gate: Silu, or GeluTanh, the tanh "
        "approximation of GELU.",
    )
    embedding_scale: bool = Field(
        default=False, description="Whether embeddings are multiplied by the square root of dim (Gemma)."
    )
    post_norms: bool = Field(
        default=False,
        description="Whether the outputs of attention and of the feed-forward layer pass another norm "
        "before they are added to the residual stream (Gemma 2, GLM 4).",
    )
    norm_offset: bool = Field(
        default=False, description="Whether norms multiply by 1 + weight instead of weight (Gemma)."
    )
    norm_epsilon: float = Field(
        default=1e-5,
        ge=1e-12,
        le=0.1,
        description="Epsilon that RMSNorm adds to the mean square. It is a property of the model: take it "
        "from its config.json (rms_norm_eps).",
    )
    experts: ExpertsConfig | None = Field(
        default=None, description="Mixture of experts in each layer (docs/experts.md). Absent: the model is dense."
    )
    lora: LoraConfig | None = Field(
        default=None,
        description="Trains low-rank adapters, and freezes the weights of checkpoint.initFrom "
        "(docs/lora.md). Absent: all weights are trained.",
    )

    @model_validator(mode="before")
    @classmethod
    def _sized(cls, data: Any) -> Any:
        """Return the section's data with values for the fields that a named size determines.

        The API server has already filled in defaults, so a field with its default value is treated as not set.
        """
        if not isinstance(data, Mapping) or data.get("size") not in list(ModelSize):  # it may not be hashable
            return data
        defaults = {to_camel(name): field.default for name, field in cls.model_fields.items()}
        given = {to_camel(name): value for name, value in data.items()}
        for name, value in SIZES[data["size"]].items():
            if given.get(name) is None or (name not in OF_DATA and given[name] == defaults[name]):
                given[name] = value
        return given

    @property
    def custom(self) -> str | None:
        """Entrypoint of the ModelSpec that replaces the bundled decoder, or None if the bundled decoder is used."""
        return HF_ENTRYPOINT if self.hf else self.entrypoint

    @property
    def named(self) -> str:
        """Name of the model in messages, if the model is not the bundled decoder."""
        return str(self.hf or self.entrypoint)

    @property
    def resolved_kv_heads(self) -> int:
        return self.kv_heads or self.heads

    @property
    def resolved_head_dim(self) -> int:
        return self.head_dim or self.dim // self.heads

    @property
    def rotary_dim(self) -> int:
        """Number of elements of each head that are rotated."""
        return int(self.resolved_head_dim * self.rotary_share)

    @property
    def query_dim(self) -> int:
        """Number of elements of a token's queries, over all heads."""
        return self.heads * self.resolved_head_dim

    @property
    def key_dim(self) -> int:
        """Number of elements of a token's keys, over all key heads."""
        return self.resolved_kv_heads * self.resolved_head_dim

    @property
    def resolved_hidden_dim(self) -> int:
        return self.hidden_dim or math.ceil(self.dim * 8 / 3 / 32) * 32

    @property
    def expert_dim(self) -> int:
        """Hidden width of one expert's feed-forward, in a model with experts."""
        return (self.experts and self.experts.hidden_dim) or self.resolved_hidden_dim

    @property
    def shared_width(self) -> int:
        """Combined hidden width of the shared experts of a layer, or 0 without shared experts."""
        return self.experts.shared * self.expert_dim if self.experts else 0

    @property
    def token_width(self) -> int:
        """Sum of the hidden widths of all feed-forward networks that process a token in one layer.

        In a model with experts, these networks are the experts chosen for the token, and the shared experts.
        """
        if self.experts is None:
            return self.resolved_hidden_dim
        return (self.experts.active_per_token + self.experts.shared) * self.expert_dim

    def window_of(self, layer: int) -> WindowConfig | None:
        """Return the attention window of a layer, counted from 0, or None if the layer has full attention."""
        every = self.window and self.window.full_every
        return None if every and (layer + 1) % every == 0 else self.window

    def routed(self, layer: int) -> bool:
        """Return whether layer number `layer`, counted from 0, has experts."""
        return self.experts is not None and layer >= self.experts.first_dense

    @property
    def routed_layers(self) -> int:
        """Number of layers with experts."""
        return self.layers - self.experts.first_dense if self.experts else 0

    @property
    def weights(self) -> int:
        """Number of parameters of the model."""
        return self._weights(self.experts.count if self.experts else 0)

    @property
    def multiplied_weights(self) -> int:
        """Number of elements of all matrices by which each token is multiplied.

        The number excludes norms, experts that the router does not choose, and an embedding that is only a table of
        rows.
        """
        active = self._weights(self.experts.active_per_token if self.experts else 0)
        looked_up = 0 if self.tie_embeddings else self.vocab_size * self.dim
        vectors = self.layers * self.block_vectors + self.routed_layers * self._expert_vectors + self.dim
        return active - looked_up - vectors

    @property
    def _expert_vectors(self) -> int:
        """Number of elements of the biases of a layer's router and of the experts chosen for one token."""
        if self.experts is None or self.experts.clamped_swiglu is None:
            return 0
        return self.experts.count + self.experts.active_per_token * self._expert_bias_weights

    def _weights(self, experts: int) -> int:
        """Return the model's number of parameters, with `experts` routed experts in each layer that has experts."""
        embeddings = (1 if self.tie_embeddings else 2) * self.vocab_size * self.dim
        blocks = (self.layers - self.routed_layers) * self.block_weights
        blocks += self.routed_layers * self.routed_block_weights(experts)
        return embeddings + blocks + self.dim + self._lora_weights(experts)

    @property
    def adapts_feed_forward(self) -> bool:
        """True if a matrix of the feed-forward layers has adapters."""
        return self.lora is not None and any(target in FEED_FORWARD for target in self.lora.targets)

    @property
    def lora_weights(self) -> int:
        """Number of parameters of all adapters."""
        return self._lora_weights(self.experts.count if self.experts else 0)

    @property
    def multiplied_lora_weights(self) -> int:
        """Number of parameters of the adapters by which one token is multiplied."""
        return self._lora_weights(self.experts.active_per_token if self.experts else 0)

    def _lora_weights(self, experts: int) -> int:
        """Return the number of parameters of the adapters, counting only `experts` routed experts in each layer."""
        if self.lora is None:
            return 0
        features = 0
        for projection in set(self.lora.targets):
            routed = self.routed_layers if projection in FEED_FORWARD else 0
            features += (self.layers - routed) * sum(self.shape(projection))
            if self.experts is not None and routed:
                shared = self.dim + self.shared_width if self.shared_width else 0
                features += routed * (shared + experts * (self.dim + self.expert_dim))
        return self.lora.rank * features

    def shape(self, projection: Projection) -> tuple[int, int]:
        """Return the numbers of input and output features of one matrix of a block without experts."""
        dim, hidden, query, key = self.dim, self.resolved_hidden_dim, self.query_dim, self.key_dim
        return {
            Projection.query: (dim, query), Projection.key: (dim, key), Projection.value: (dim, key),
            Projection.output: (query, dim), Projection.gate: (dim, hidden), Projection.up: (dim, hidden),
            Projection.down: (hidden, dim),
        }[projection]  # fmt: skip

    @property
    def trained_weights(self) -> int:
        """Number of parameters that are trained, and so have gradients and moments."""
        return self.lora_weights or self.weights

    @property
    def matrix_weights(self) -> int:
        """Number of trained parameters that are elements of matrices of blocks (see `model.optimizer.is_matrix`)."""
        if self.lora is not None:
            return self.lora_weights
        ends = (1 if self.tie_embeddings else 2) * self.vocab_size * self.dim + self.dim
        biases = 0
        if self.experts is not None and self.experts.clamped_swiglu is not None:
            biases = self.experts.count * (1 + self._expert_bias_weights)
        return self.weights - ends - self.layers * self.block_vectors - self.routed_layers * biases

    @property
    def trained_share(self) -> float:
        return self.trained_weights / self.weights

    @property
    def block_weights(self) -> int:
        """Number of parameters of one decoder block without experts."""
        attention = 2 * self.dim * (self.query_dim + self.key_dim)
        return attention + 3 * self.dim * self.resolved_hidden_dim + self.block_vectors

    @property
    def block_vectors(self) -> int:
        """Number of parameters of one decoder block that are vectors: norms and biases."""
        biases = self.query_dim + 2 * self.key_dim if self.qkv_bias else 0
        biases += self.dim if self.output_bias else 0
        norms = (4 if self.post_norms else 2) * self.dim + (2 * self.resolved_head_dim if self.qk_norm else 0)
        return norms + biases + (self.heads if self.attention_sinks else 0)

    @property
    def _expert_bias_weights(self) -> int:
        """Number of elements of the biases of one expert."""
        if self.experts is None or self.experts.clamped_swiglu is None:
            return 0
        return 2 * self.expert_dim + self.dim

    @property
    def expert_weights(self) -> int:
        """Number of parameters of one expert."""
        return 3 * self.dim * self.expert_dim + self._expert_bias_weights

    def routed_block_weights(self, experts: int) -> int:
        """Return the number of parameters of a block with experts, counting only `experts` of its routed experts."""
        if self.experts is None:
            return self.block_weights
        attention = self.block_weights - 3 * self.dim * self.resolved_hidden_dim
        router = self.experts.count * (self.dim + (self.experts.clamped_swiglu is not None))
        gate = self.dim if self.experts.shared_gate else 0
        return attention + router + gate + (experts + self.experts.shared) * self.expert_weights

    RULES: ClassVar[tuple[SectionRule, ...]] = (
        SectionRule(
            "dim",
            "has(self.headDim) || self.dim % (2 * self.heads) == 0",
            lambda model: model.head_dim is not None or model.dim % (2 * model.heads) == 0,
            "dim must be an even multiple of heads, because each head's width must be even: change dim or "
            "heads, or set headDim",
        ),
        SectionRule(
            "rotaryShare",
            "int(double(has(self.headDim) ? self.headDim : self.dim / self.heads) * self.rotaryShare) % 2 == 0",
            lambda model: model.rotary_dim % 2 == 0,
            "rotaryShare times the width of a head must be an even number of elements",
        ),
        SectionRule(
            "kvHeads",
            "!has(self.kvHeads) || self.heads % self.kvHeads == 0",
            lambda model: model.heads % model.resolved_kv_heads == 0,
            "heads must be a multiple of kvHeads",
        ),
        SectionRule(
            "experts.firstDense",
            "!has(self.experts) || self.experts.firstDense < self.layers",
            lambda model: model.experts is None or model.experts.first_dense < model.layers,
            "experts.firstDense must be below layers: otherwise no layer has experts",
        ),
        SectionRule(
            "lora",
            "!has(self.lora) || !has(self.experts) || !has(self.experts.biasRate) || self.experts.biasRate == 0.0",
            lambda model: model.lora is None or model.experts is None or not model.experts.bias_rate,
            "lora freezes the router and its biases: set experts.biasRate to 0, or remove lora",
        ),
        SectionRule(
            "lora.targets",
            "!has(self.lora) || !has(self.experts) || !has(self.experts.clampedSwiglu) || "
            f"!self.lora.targets.exists(target, target in {[each.value for each in FEED_FORWARD]})",
            lambda model: (
                model.experts is None or model.experts.clamped_swiglu is None or not model.adapts_feed_forward
            ),
            "lora does not support experts with clampedSwiglu: set lora.targets to [Query, Key, Value, Output]",
        ),
        SectionRule(
            "lora.rank",
            f"!has(self.lora) || !has(self.experts) && !(has(self.size) && self.size in {list(WITH_EXPERTS)}) || "
            "self.lora.rank % 8 == 0",
            lambda model: model.lora is None or model.experts is None or model.lora.rank % 8 == 0,
            "lora.rank must be a multiple of 8 in a model with experts, because of torch's grouped matrix products",
        ),
        SectionRule(
            "lora.frozenDtype",
            f"!has(self.lora) || !has(self.experts) && !(has(self.size) && self.size in {list(WITH_EXPERTS)}) || "
            f"!(self.lora.frozenDtype in {[dtype.value for dtype in FrozenDtype if dtype.quantized]})",
            lambda model: model.lora is None or model.experts is None or not model.lora.frozen_dtype.quantized,
            "a quantized lora.frozenDtype does not support a model with experts: set it to BFloat16",
        ),
        SectionRule(
            "activation",
            "!has(self.experts) || !has(self.experts.clampedSwiglu) || self.activation == 'Silu'",
            lambda model: (
                model.experts is None or model.experts.clamped_swiglu is None or model.activation is Activation.silu
            ),
            "experts.clampedSwiglu replaces the activation function: remove activation or experts.clampedSwiglu",
        ),
        SectionRule(
            "hiddenDim",
            "!has(self.experts) || has(self.experts.hiddenDim) || !has(self.hiddenDim) || self.hiddenDim % 8 == 0",
            lambda model: model.experts is None or model.expert_dim % 8 == 0,
            "the width of an expert must be a multiple of 8: set experts.hiddenDim, or another hiddenDim",
        ),
    )


OF_ANY_MODEL = ("entrypoint", "options", "sequence_length", "hf")
"""Names of fields of spec.trainer.model that also apply to a custom model."""
_OF_THE_DECODER = {name: field.default for name, field in ModelConfig.model_fields.items() if name not in OF_ANY_MODEL}


def _unsaid(name: str, default: object) -> str:
    """Return a CEL expression that is true if the job does not set the field `name`.

    The API server fills in defaults before it evaluates rules, so a field with its default value counts as not set.
    """
    path = f"self.{ModelConfig.model_fields[name].alias or to_camel(name)}"
    if default is None:
        return f"!has({path})"
    is_default = f"{path} == {json.dumps(default)}"
    return f"(!has({path}) || {is_default})" if to_camel(name) in OF_DATA else is_default


_NO_DECODER = " && ".join(_unsaid(*field) for field in _OF_THE_DECODER.items())
"""CEL expression that is true if the job sets no field that applies only to the bundled decoder."""


def _of_size(name: str) -> str:
    """Return a CEL expression that is true if the field `name` is not set, or has the value of the job's named size."""
    default = _OF_THE_DECODER[name]
    return f"({_unsaid(name, default)} || self.{to_camel(name)} == {value_of_size(to_camel(name), 'self.size')})"


def _has_fields_of_size(model: ModelConfig) -> bool:
    if model.size is None:
        return True
    fields = {name: value for name, value in SIZES[model.size].items() if name not in OF_DATA and name != "experts"}
    dumped = model.model_dump(mode="json", by_alias=True)
    experts = dumped["experts"]
    if "experts" not in SIZES[model.size]:
        return experts is None and all(dumped[name] == value for name, value in fields.items())
    unset = experts["hiddenDim"] is None and experts["clampedSwiglu"] is None
    same_experts = unset and all(experts[name] == value for name, value in EXPERTS.items())
    return same_experts and all(dumped[name] == value for name, value in fields.items())


_SIZED = ("layers", "dim", "heads", "kv_heads", "hidden_dim", "tie_embeddings", "rope_theta", "norm_epsilon")
_EXPERTS_OF_SIZE = " && ".join(f"self.experts.{name} == {json.dumps(value)}" for name, value in EXPERTS.items())


_BESIDE_SIZE = (*_SIZED, "size", "vocab_size", "experts", "lora")
_NOT_OF_SIZES = tuple(name for name in _OF_THE_DECODER if name not in _BESIDE_SIZE)
ModelConfig.RULES = (
    *ModelConfig.RULES,
    SectionRule(
        "size",
        f"!has(self.size) || {' && '.join(map(_of_size, _SIZED))} && (!has(self.experts) || "
        f"self.size in {list(WITH_EXPERTS)} && !has(self.experts.hiddenDim) && "
        f"!has(self.experts.clampedSwiglu) && {_EXPERTS_OF_SIZE})",
        _has_fields_of_size,
        "size sets the other fields of the decoder: remove size, or all other fields except vocabSize and "
        "sequenceLength",
    ),
    SectionRule(
        "size",
        f"!has(self.size) || {' && '.join(_unsaid(name, _OF_THE_DECODER[name]) for name in _NOT_OF_SIZES)}",
        lambda model: model.size is None or all(getattr(model, n) == _OF_THE_DECODER[n] for n in _NOT_OF_SIZES),
        "with size, the decoder is a Llama of that size: remove from and the fields of other model "
        "families, or remove size",
    ),
    SectionRule(
        "entrypoint",
        f"!has(self.entrypoint) || {_NO_DECODER}",
        lambda model: (
            model.entrypoint is None
            or all(getattr(model, name) == default for name, default in _OF_THE_DECODER.items())
        ),
        "with entrypoint, only options and sequenceLength apply: remove the decoder's other fields, or "
        "remove entrypoint",
    ),
    SectionRule(
        "hf",
        f"!has(self.hf) || !has(self.entrypoint) && {_NO_DECODER}",
        lambda model: (
            model.hf is None
            or (
                model.entrypoint is None
                and all(getattr(model, name) == default for name, default in _OF_THE_DECODER.items())
            )
        ),
        "with hf, only sequenceLength applies: remove entrypoint and the decoder's other fields, or remove hf",
    ),
    SectionRule(
        "options",
        "has(self.entrypoint) || has(self.hf) || !has(self.options)",
        lambda model: model.custom is not None or model.options is None,
        "options are for the model that entrypoint names: add entrypoint, or remove options",
    ),
)
