"""Autoregressive predictive coding (Chung et al. 2019, arXiv 1904.03240) of precomputed features: a causal model that
predicts the next frame and, where the data have targets, which one the next frame has."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from concertina_trainer.model.spec import DataShape, Microbatch, ModelSpec


class Block(nn.Module):
    def __init__(self, dim: int, kernel: int) -> None:
        super().__init__()
        self.past = kernel - 1
        self.norm = nn.LayerNorm(dim)
        self.mix = nn.Conv1d(dim, dim, kernel)
        self.feed_forward = nn.Sequential(
            nn.LayerNorm(dim), nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim)
        )

    def forward(self, x: Tensor) -> Tensor:
        frames = F.pad(self.norm(x).transpose(1, 2), (self.past, 0))
        x = x + F.gelu(self.mix(frames)).transpose(1, 2)
        result: Tensor = x + self.feed_forward(x)
        return result


class AudioModel(nn.Module):
    def __init__(self, width: int, classes: int, dim: int = 64, blocks: int = 3, kernel: int = 5) -> None:
        super().__init__()
        self.width = width
        self.entry = nn.Linear(width, dim)
        self.blocks = nn.ModuleList(Block(dim, kernel) for _ in range(blocks))
        self.exit = nn.Linear(dim, width + classes)

    def forward(self, frames: Tensor) -> tuple[Tensor, Tensor]:
        """Of each frame [rows, length, width]: the next one, and logits of its target."""
        x = self.entry(frames)
        for block in self.blocks:
            x = block(x)
        found = self.exit(x)
        return found[..., : self.width], found[..., self.width :]


def build(options: Mapping[str, Any], data: DataShape) -> AudioModel:
    return AudioModel(data.width, data.vocab_size, **options)


def loss(model: AudioModel, batch: Microbatch) -> Tensor:
    """The mean distance of the features and, with targets, the cross entropy; each prediction by its weight."""
    assert batch.features is not None
    frames, logits = model(batch.features[:, :-1])
    losses = (frames - batch.features[:, 1:]).abs().float().mean(-1)
    if logits.size(-1):
        losses = losses + F.cross_entropy(logits.float().transpose(1, 2), batch.tokens[:, 1:], reduction="none")
    return (losses * batch.weights).sum()


def blocks(model: AudioModel) -> Iterable[nn.Module]:
    return model.blocks


def flops(options: Mapping[str, Any], data: DataShape) -> float:
    """6 a weight and frame: each weight is used once a frame, as convolutions use theirs."""
    return 6.0 * sum(parameter.numel() for parameter in build(options, data).parameters())


spec = ModelSpec(build, loss, blocks, flops=flops)
