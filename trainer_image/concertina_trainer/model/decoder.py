"""Compact decoder: RMSNorm, rotary positions, grouped-query attention, gated feed-forward or experts.

The fields of ModelConfig select among the model families that the decoder can compute (see format/hf_families.py).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed._symmetric_memory  # registers the symm_mem operations of PRODUCTS
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from concertina_trainer.config.memory_config import Activations
from concertina_trainer.config.model_config import Activation, LoraConfig, ModelConfig, Projection
from concertina_trainer.model.activation import ACTIVATIONS
from concertina_trainer.model.attention import Context, Mask, Scores, attend, causal_mask
from concertina_trainer.model.dropout import derived
from concertina_trainer.model.experts import MixtureOfExperts
from concertina_trainer.model.lora import freeze, linear, product
from concertina_trainer.model.loss import summed_cross_entropy
from concertina_trainer.model.positions import Positions, Table, rotate, tables_of
from concertina_trainer.model.precision import precise
from concertina_trainer.model.soft_cap import soft_capped


class RMSNorm(nn.Module):
    def __init__(self, dim: int, config: ModelConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(dim))
        self.epsilon, self.offset = config.norm_epsilon, config.norm_offset

    def forward(self, x: Tensor) -> Tensor:
        return self.normalized(x, self.weight)

    def normalized(self, x: Tensor, weight: Tensor) -> Tensor:
        if not self.offset:
            return F.rms_norm(x, (x.size(-1),), weight, self.epsilon)
        # In half precision, 1 + weight would lose most of the weight's digits.
        return F.rms_norm(precise(x), (x.size(-1),), precise(weight) + 1.0, self.epsilon).type_as(x)


class HeadNorm(RMSNorm):
    """RMSNorm over the elements of each head, for queries or keys.

    Under tensor parallelism, the ranks of a tensor group have the same weight `[head_dim]` and normalize different
    heads.
    """

    def forward(self, x: Tensor) -> Tensor:
        # Each rank of a tensor group has different heads, so the weight's gradient is the sum over the group.
        weight = self.weight.to_local(grad_placements=[Partial()]) if isinstance(self.weight, DTensor) else self.weight
        return self.normalized(x, weight)


class Products:
    """Matrix products at the beginning and at the end of a layer.

    The method `columns` multiplies the layer's input by its first weights (such as query, key and value). The method
    `rows` multiplies the layer's intermediate result by its last weight (such as output). The argument `keys` contains
    the keys of dropout, or is None without dropout. With asynchronous tensor parallelism, another class replaces this
    one.
    """

    def columns(self, x: Tensor, weights: Sequence[nn.Linear], keys: Tensor | None) -> Sequence[Tensor]:
        return [product(x, weight, keys) for weight in weights]

    def rows(self, x: Tensor, weight: nn.Linear, keys: Tensor | None) -> Tensor:
        return product(x, weight, keys)


class Attention(nn.Module):
    def __init__(self, config: ModelConfig, layer: int, context: Context | None) -> None:
        super().__init__()
        self.context, self.products = context, Products()
        self.head_dim = config.resolved_head_dim
        scale = (config.query_scale or self.head_dim) ** -0.5
        self.scores = Scores(config.heads != config.resolved_kv_heads, scale, config.attention_soft_cap)
        self.positions = Positions.of(config, layer)
        self.query = linear(*config.shape(Projection.query), config.lora, Projection.query, config.qkv_bias)
        self.key = linear(*config.shape(Projection.key), config.lora, Projection.key, config.qkv_bias)
        self.value = linear(*config.shape(Projection.value), config.lora, Projection.value, config.qkv_bias)
        self.output = linear(*config.shape(Projection.output), config.lora, Projection.output, config.output_bias)
        self.sinks = nn.Parameter(torch.empty(config.heads)) if config.attention_sinks else None
        self.query_norm = HeadNorm(self.head_dim, config) if config.qk_norm else None
        self.key_norm = HeadNorm(self.head_dim, config) if config.qk_norm else None

    def forward(self, x: Tensor, mask: Mask | None, table: Table, keys: Tensor | None = None) -> Tensor:
        batch, length, _ = x.shape
        query, key, value = (
            projection.view(batch, length, -1, self.head_dim).transpose(1, 2)
            for projection in self.products.columns(x, (self.query, self.key, self.value), keys)
        )
        if self.query_norm is not None and self.key_norm is not None:
            query, key = self.query_norm(query), self.key_norm(key)
        query, key = rotate(query, self.positions, table), rotate(key, self.positions, table)
        if self.context is not None:
            key, value = self.context.gather(key, value)
        # Under tensor parallelism, each rank has the sinks of its own heads.
        sinks = self.sinks.to_local() if isinstance(self.sinks, DTensor) else self.sinks
        attended = attend(query, key, value, mask, self.scores, sinks)
        return self.products.rows(attended.transpose(1, 2).reshape(batch, length, -1), self.output, keys)


class FeedForward(nn.Module):
    def __init__(self, dim: int, hidden_dim: int, activation: Activation, lora: LoraConfig | None = None) -> None:
        super().__init__()
        self.products, self.activation = Products(), ACTIVATIONS[activation]
        self.gate = linear(dim, hidden_dim, lora, Projection.gate)
        self.up = linear(dim, hidden_dim, lora, Projection.up)
        self.down = linear(hidden_dim, dim, lora, Projection.down)

    def forward(self, x: Tensor, keys: Tensor | None = None) -> Tensor:
        gate, up = self.products.columns(x, (self.gate, self.up), keys)
        return self.products.rows(self.activation(gate) * up, self.down, keys)


def feed_forward(config: ModelConfig, layer: int) -> FeedForward | MixtureOfExperts:
    if config.experts is None or not config.routed(layer):
        return FeedForward(config.dim, config.resolved_hidden_dim, config.activation, config.lora)
    width = config.shared_width
    shared = FeedForward(config.dim, width, config.activation, config.lora) if width else None
    return MixtureOfExperts(config.dim, config.expert_dim, config.activation, config.experts, shared, config.lora)


PRODUCTS = (
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten._scaled_mm.default,
    torch.ops.aten._grouped_mm.default,
    torch.ops.symm_mem.fused_all_gather_matmul.default,
    torch.ops.symm_mem.fused_matmul_reduce_scatter.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.higher_order.flex_attention,
)
"""Operations whose results selective activation checkpointing keeps, because recomputing them is expensive.

In blocks that are not compiled, FlexAttention is a compiled function of its own, whose operations torch's activation
checkpointing does not see. In such blocks, the backward pass therefore recomputes FlexAttention.
"""


def _keeping_products() -> Any:
    def policy(context: Any, operation: Any, *arguments: Any, **keywords: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if operation in PRODUCTS else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def computed_again(
    activations: Activations, draws: bool, compute: Callable[..., Any], *arguments: Any, **keywords: Any
) -> Any:
    """Return the result of `compute`, with the activation checkpointing that `activations` selects.

    The backward pass recomputes the activations that are not kept. If `draws` is True, `compute` draws random numbers
    (for dropout), and the recomputation starts from the same state of the random number generator.
    """
    if activations is Activations.keep or not torch.is_grad_enabled():
        return compute(*arguments, **keywords)
    if activations is Activations.recompute:
        return checkpoint(compute, *arguments, use_reentrant=False, preserve_rng_state=draws, **keywords)
    return checkpoint(
        compute, *arguments, use_reentrant=False, preserve_rng_state=draws, context_fn=_keeping_products, **keywords
    )


class Block(nn.Module):
    def __init__(self, config: ModelConfig, layer: int, context: Context | None, activations: Activations) -> None:
        super().__init__()
        self.activations = activations
        self.attention_norm = RMSNorm(config.dim, config)
        self.attention = Attention(config, layer, context)
        self.feed_forward_norm = RMSNorm(config.dim, config)
        self.feed_forward = feed_forward(config, layer)
        self.attention_post_norm = RMSNorm(config.dim, config) if config.post_norms else None
        self.feed_forward_post_norm = RMSNorm(config.dim, config) if config.post_norms else None

    def forward(
        self, x: Tensor, mask: Mask | None, table: Table, weights: Tensor | None, keys: Tensor | None
    ) -> Tensor:
        """Compute the block for x `[batch, length, dim]`, and return a tensor of the same shape.

        `table` contains the cosines and sines of the rotary positions. `weights` `[batch, length]` is the weight of
        each token in the loss (see `MixtureOfExperts.forward`). `keys` `[batch, length]` contains the keys of this
        layer's dropout, or is None without dropout. Under tensor parallelism, `weights` and `keys` contain the tokens
        of the whole group.
        """
        result: Tensor
        # Nothing in a block draws random numbers.
        result, loads = computed_again(self.activations, False, self._computed, x, mask, table, weights, keys)
        if isinstance(self.feed_forward, MixtureOfExperts):
            # Not within `_computed`, which activation checkpointing runs again in the backward pass: the tokens of the
            # microbatch would be counted twice.
            self.feed_forward.count(loads)
        return result

    def _computed(
        self, x: Tensor, mask: Mask | None, table: Table, weights: Tensor | None, keys: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        x = self.attended(x, mask, table, keys)
        inner, loads = self.feed_forward_norm(x), None
        if isinstance(self.feed_forward, MixtureOfExperts):
            inner, loads = self.feed_forward(inner, weights, keys)
        else:
            inner = self.feed_forward(inner, keys)
        return x + (inner if self.feed_forward_post_norm is None else self.feed_forward_post_norm(inner)), loads

    def attended(self, x: Tensor, mask: Mask | None, table: Table, keys: Tensor | None) -> Tensor:
        """Compute the first half of the block, attention, for x `[batch, length, dim]`."""
        attended: Tensor = self.attention(self.attention_norm(x), mask, table, keys)
        return x + (attended if self.attention_post_norm is None else self.attention_post_norm(attended))


@dataclasses.dataclass(frozen=True)
class StageLayers:
    """Layers of one pipeline stage, given by the layers' numbers in the whole decoder."""

    blocks: range
    first: bool = True
    """True if this is the first stage, whose input is tokens."""
    last: bool = True
    """True if this is the last stage, whose output is logits or the loss."""


class Decoder(nn.Module):
    """Whole decoder, or the layers of one pipeline stage.

    Weights have the names that they have in the whole decoder, so that checkpoints do not depend on the stages.
    """

    def __init__(
        self,
        config: ModelConfig,
        context: Context | None = None,
        part: StageLayers | None = None,
        activations: Activations = Activations.keep,
    ) -> None:
        super().__init__()
        part = part or StageLayers(range(config.layers))
        self.embedding_scale = config.dim**0.5 if config.embedding_scale else None
        self.logit_soft_cap = config.logit_soft_cap
        self.masked = config.attention_soft_cap is not None or config.attention_sinks
        self.part, self.context, self.tensor_degree = part, context, 1
        # With tied embeddings, the embedding and the output layer use one parameter. Two parameters that share memory
        # would be separated by `to_empty`.
        tied = config.tie_embeddings
        has_embedding = part.first or (part.last and tied)
        self.embedding = nn.Embedding(config.vocab_size, config.dim) if has_embedding else None
        self.blocks = nn.ModuleDict({str(i): Block(config, i, context, activations) for i in part.blocks})
        windows = {str(i): config.window_of(i) for i in part.blocks}
        self.windows = {layer: window.size if window else None for layer, window in windows.items()}
        self.positions = {str(i): Positions.of(config, i) for i in part.blocks}
        self.norm = RMSNorm(config.dim, config) if part.last else None
        self.head = nn.Linear(config.dim, config.vocab_size, bias=False) if part.last and not tied else None
        if config.lora:
            freeze(self)

    def mixtures(self) -> Iterator[MixtureOfExperts]:
        """Return the mixtures of experts among the layers of this decoder."""
        feed_forwards = (block.feed_forward for block in self.blocks.values())
        return (layer for layer in feed_forwards if isinstance(layer, MixtureOfExperts))

    def forward(
        self,
        x: Tensor,
        document_ids: Tensor | None = None,
        targets: Tensor | None = None,
        weights: Tensor | None = None,
        keys: Tensor | None = None,
    ) -> Tensor:
        """Return logits `[batch, length, vocabulary]` for tokens `[batch, length]`, or the weighted sum of losses.

        Under context parallelism, `length` is the number of this rank's tokens of each sequence, except in the shape of
        `document_ids`. A pipeline stage that is not the first takes the output of the previous stage, `[batch, length,
        dim]`. A stage that is not the last returns a tensor of that shape. Under tensor parallelism, this tensor
        between stages is split along `length` over the tensor group. If gradients are enabled and `weights` is given,
        the layers count the tokens of each expert, and the gradients include the gradient of the experts' balancing
        loss.

        Args:
            x: Tokens `[batch, length]`, or the output of the previous stage.
            document_ids: `[batch, length]` of whole sequences: the document of each token. A token attends only to its
                own document. Rotary positions are relative, so they do not begin again at 0 in each document.
            targets: `[batch, length]`: the token to predict at each position. With `targets` and `weights`, the result
                is the weighted sum of the tokens' losses.
            weights: `[batch, length]`: the weight of each token in the loss.
            keys: `[batch, length]`: the key of each token for the dropout of adapters. None: there is no dropout.
        """
        if self.part.first:
            assert self.embedding is not None
            length, x = x.size(1), self.embedding(x)
            x = x if self.embedding_scale is None else x * self.embedding_scale
        else:
            length = x.size(1) * self.tensor_degree  # between layers, the tensor group splits the length
        whole = length * (1 if self.context is None else self.context.size)
        masks = {
            window: causal_mask(document_ids, whole, self.context, x.device, window, self.masked)
            for window in set(self.windows.values())
        }
        tables = tables_of(set(self.positions.values()), whole, self.context, x.device)
        balanced = weights if torch.is_grad_enabled() else None
        for layer, block in self.blocks.items():
            # Derived here, because compiled blocks share code, in which the number of a layer would be a constant.
            of_layer = None if keys is None else derived(keys, int(layer))
            x = block(x, masks[self.windows[layer]], tables[self.positions[layer]], balanced, of_layer)
        if self.norm is None:
            return x
        output = self.embedding if self.head is None else self.head
        assert output is not None
        x = self.norm(x)
        if targets is None or weights is None:
            return soft_capped(F.linear(x, output.weight), self.logit_soft_cap)
        return summed_cross_entropy(x, output.weight, targets, weights, self.logit_soft_cap)
