"""A compact Llama-style decoder: RMSNorm, rotary positions, grouped-query attention, SwiGLU."""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from concertina_state.format.read_plan import Box
from concertina_trainer.config import ModelConfig
from concertina_trainer.model.attention import Context, Mask, attend, causal_mask
from concertina_trainer.model.experts import MixtureOfExperts


class RMSNorm(nn.Module):
    def __init__(self, dim: int, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(dim))
        self.epsilon = epsilon

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.size(-1),), self.weight, self.epsilon)


@functools.lru_cache(maxsize=8)
def rotary_table(length: int, head_dim: int, theta: float, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosines and sines, float32 [length, head_dim / 2]. Not buffers: `to_empty` would leave those as garbage."""
    frequencies = theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float32, device=device) / head_dim)
    angles = torch.outer(torch.arange(length, dtype=torch.float32, device=device), frequencies)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, theta: float, context: Context | None) -> Tensor:
    """Rotary positions on x [batch, heads, length, head_dim], or this rank's part of the length."""
    if context is None:
        cos, sin = rotary_table(x.size(-2), x.size(-1), theta, x.device)
    else:
        length = x.size(-2) * context.size
        rows = context.queries(length, x.device)
        cos, sin = (table[rows] for table in rotary_table(length, x.size(-1), theta, x.device))
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).type_as(x)


class Attention(nn.Module):
    def __init__(self, config: ModelConfig, context: Context | None) -> None:
        super().__init__()
        self.context = context
        self.heads, self.kv_heads = config.heads, config.resolved_kv_heads
        self.head_dim = config.dim // config.heads
        self.theta = config.rope_theta
        self.query = nn.Linear(config.dim, config.dim, bias=False)
        self.key = nn.Linear(config.dim, self.kv_heads * self.head_dim, bias=False)
        self.value = nn.Linear(config.dim, self.kv_heads * self.head_dim, bias=False)
        self.output = nn.Linear(config.dim, config.dim, bias=False)

    def forward(self, x: Tensor, mask: Mask | None) -> Tensor:
        batch, length, _ = x.shape
        query, key, value = (
            projection(x).view(batch, length, -1, self.head_dim).transpose(1, 2)
            for projection in (self.query, self.key, self.value)
        )
        query, key = rotate(query, self.theta, self.context), rotate(key, self.theta, self.context)
        if self.context is not None:
            key, value = self.context.gather(key, value)
        attended = attend(query, key, value, mask, gqa=self.heads != self.kv_heads)
        result: Tensor = self.output(attended.transpose(1, 2).reshape(batch, length, -1))
        return result


class FeedForward(nn.Module):
    def __init__(self, dim: int, hidden_dim: int) -> None:
        super().__init__()
        self.gate = nn.Linear(dim, hidden_dim, bias=False)
        self.up = nn.Linear(dim, hidden_dim, bias=False)
        self.down = nn.Linear(hidden_dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return result


def feed_forward(config: ModelConfig, layer: int) -> FeedForward | MixtureOfExperts:
    if config.experts is None or not config.routed(layer):
        return FeedForward(config.dim, config.resolved_hidden_dim)
    shared = config.experts.shared and FeedForward(config.dim, config.experts.shared * config.expert_dim)
    return MixtureOfExperts(config.dim, config.expert_dim, config.experts, shared or None)


class Block(nn.Module):
    def __init__(self, config: ModelConfig, layer: int, context: Context | None) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.dim, config.norm_epsilon)
        self.attention = Attention(config, context)
        self.feed_forward_norm = RMSNorm(config.dim, config.norm_epsilon)
        self.feed_forward = feed_forward(config, layer)

    def forward(self, x: Tensor, mask: Mask | None, weights: Tensor | None = None) -> Tensor:
        x = x + self.attention(self.attention_norm(x), mask)
        routed = (weights,) if isinstance(self.feed_forward, MixtureOfExperts) else ()
        after: Tensor = x + self.feed_forward(self.feed_forward_norm(x), *routed)
        return after


class Decoder(nn.Module):
    def __init__(self, config: ModelConfig, context: Context | None = None) -> None:
        super().__init__()
        self.context = context
        self.embedding = nn.Embedding(config.vocab_size, config.dim)
        self.blocks = nn.ModuleList(Block(config, layer, context) for layer in range(config.layers))
        self.norm = RMSNorm(config.dim, config.norm_epsilon)
        # Tied weights are one parameter used twice, not two that share memory: `to_empty` would untie those.
        self.head = None if config.tie_embeddings else nn.Linear(config.dim, config.vocab_size, bias=False)

    def mixtures(self) -> Iterator[MixtureOfExperts]:
        """Those of its layers."""
        return (block.feed_forward for block in self.blocks if isinstance(block.feed_forward, MixtureOfExperts))

    def forward(self, tokens: Tensor, document_ids: Tensor | None = None, weights: Tensor | None = None) -> Tensor:
        """Logits [batch, length, vocabulary] for tokens [batch, length]; with `document_ids` [batch, length], a token
        attends to its own document only (positions are relative, so they need not begin anew). Where ranks share
        sequences, `tokens` and the result are this rank's part of them, and `document_ids` are of whole ones. With
        `weights`, those of the tokens in the loss, [batch, length], experts count their loads and the gradient has
        that of the loss that balances them."""
        length = tokens.size(1) * (1 if self.context is None else self.context.size)
        mask = causal_mask(document_ids, length, self.context, tokens.device)
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, mask, weights)
        x = self.norm(x)
        return F.linear(x, self.embedding.weight if self.head is None else self.head.weight)


def initial_weight(name: str, shape: torch.Size, config: ModelConfig, seed: int) -> Tensor:
    """The whole initial value of one parameter, float32 on CPU: a function of seed and name, so that it is the same
    however the model is cut. Norms are 1, biases of routers 0; matrices normal, those that write into the residual
    stream scaled down. Of experts, each is a matrix of its own, NAME.NUMBER, so that a rank draws those that it has."""
    if len(shape) == 1:
        return torch.zeros(shape) if name.endswith("router.bias") else torch.ones(shape)
    if len(shape) == 3:
        return torch.stack([initial_weight(f"{name}.{i}", shape[1:], config, seed) for i in range(shape[0])])
    residual = (".feed_forward." in name and ".down" in name) or name.endswith("attention.output.weight")
    deviation = 0.02 / math.sqrt(2 * config.layers) if residual else 0.02
    generator = torch.Generator().manual_seed(int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:7]))
    return torch.empty(shape).normal_(0.0, deviation, generator=generator)


def initial_part(name: str, whole: Sequence[int], box: Box, config: ModelConfig, seed: int) -> Tensor:
    """A box of `initial_weight`; of experts only those are drawn that it holds."""
    if len(whole) < 3:
        return initial_weight(name, torch.Size(whole), config, seed)[box.within(Box((0,) * len(whole), tuple(whole)))]
    (first, *offsets), (count, *shape) = box.offsets, box.shape
    part = Box(tuple(offsets), tuple(shape))
    return torch.stack([initial_part(f"{name}.{first + i}", whole[1:], part, config, seed) for i in range(count)])


def token_losses(logits: Tensor, targets: Tensor) -> Tensor:
    """Cross entropy of each token, float32 [batch, length]."""
    losses = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="none")
    return (losses.to_local() if isinstance(losses, DTensor) else losses).view_as(targets)
