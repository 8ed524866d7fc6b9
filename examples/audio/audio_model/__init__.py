"""Autoregressive predictive coding of precomputed features (Chung et al. 2019, arXiv 1904.03240).

The model is causal and predicts the next frame. If the data have targets, it also predicts the target of the next
frame.
"""

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
        """Return the predicted next frame of each frame `[rows, length, width]`, and the logits of its target."""
        x = self.entry(frames)
        for block in self.blocks:
            x = block(x)
        found = self.exit(x)
        return found[..., : self.width], found[..., self.width :]


def build(options: Mapping[str, Any], data: DataShape) -> AudioModel:
    return AudioModel(data.widths["features"], data.vocab_size, **options)


def loss(model: AudioModel, batch: Microbatch) -> Tensor:
    """Return the weighted sum of each prediction's mean distance and, with targets, its cross entropy."""
    features = batch.fields["features"]
    frames, logits = model(features[:, :-1])
    losses = (frames - features[:, 1:]).abs().float().mean(-1)
    if logits.size(-1):
        losses = losses + F.cross_entropy(logits.float().transpose(1, 2), batch.tokens[:, 1:], reduction="none")
    return (losses * batch.weights).sum()


def blocks(model: AudioModel) -> Iterable[nn.Module]:
    return model.blocks


def flops(options: Mapping[str, Any], data: DataShape) -> float:
    """Return 6 operations for each weight and frame. Each weight is used once a frame, as those of convolutions are."""
    return 6.0 * sum(parameter.numel() for parameter in build(options, data).parameters())


spec = ModelSpec(build, loss, blocks, flops=flops)
