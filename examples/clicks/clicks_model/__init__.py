"""Prediction of the next event of a session, from the events before it and the times between them.

Each event is the embedding of its item, and of the time until the next event in steps of powers of two. A causal
convolution mixes the events, so the model knows only the past.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from concertina_trainer.model.spec import DataShape, Microbatch, ModelSpec

PAUSES = 32
"""Number of lengths of a pause that are told apart. The length n is from 2^n - 1 to 2^(n + 1) - 2 seconds."""


class Block(nn.Module):
    def __init__(self, dim: int, kernel: int) -> None:
        super().__init__()
        self.past = kernel - 1
        self.norm = nn.LayerNorm(dim)
        self.mix = nn.Conv1d(dim, dim, kernel)
        self.feed_forward = nn.Sequential(
            nn.LayerNorm(dim), nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim)
        )

    def forward(self, x: Tensor) -> Tensor:
        events = F.pad(self.norm(x).transpose(1, 2), (self.past, 0))
        x = x + F.gelu(self.mix(events)).transpose(1, 2)
        result: Tensor = x + self.feed_forward(x)
        return result


class NextEvent(nn.Module):
    def __init__(self, items: int, dim: int = 64, blocks: int = 2, kernel: int = 3) -> None:
        super().__init__()
        self.item = nn.Embedding(items, dim)
        self.pause = nn.Embedding(PAUSES, dim)
        self.blocks = nn.ModuleList(Block(dim, kernel) for _ in range(blocks))
        self.exit = nn.Linear(dim, items)

    def forward(self, items: Tensor, pauses: Tensor) -> Tensor:
        """Return the logits of the item after each event.

        Args:
            items: Items `[rows, length]`.
            pauses: Seconds from each event to the next one, `[rows, length]`.
        """
        lengths = torch.log2(pauses.clamp(min=0).double() + 1).long().clamp(max=PAUSES - 1)
        x = self.item(items) + self.pause(lengths)
        for block in self.blocks:
            x = block(x)
        result: Tensor = self.exit(x)
        return result


def build(options: Mapping[str, Any], data: DataShape) -> NextEvent:
    return NextEvent(data.vocab_size, **options)


def loss(model: NextEvent, batch: Microbatch) -> Tensor:
    times = batch.fields["time"]
    logits = model(batch.tokens[:, :-1], times[:, 1:] - times[:, :-1])
    losses = F.cross_entropy(logits.float().transpose(1, 2), batch.tokens[:, 1:], reduction="none")
    return (losses * batch.weights).sum()


def blocks(model: NextEvent) -> Iterable[nn.Module]:
    return model.blocks


spec = ModelSpec(build, loss, blocks)
