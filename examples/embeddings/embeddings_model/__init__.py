"""Prediction of the next embedding of a track, from the embeddings before it.

The data have no token ids. A causal convolution reads the last embeddings, and the loss is the mean square of the
errors.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from concertina_trainer.model.spec import DataShape, Microbatch, ModelSpec


class NextEmbedding(nn.Module):
    def __init__(self, width: int, dim: int = 64, past: int = 4) -> None:
        super().__init__()
        self.past = past
        self.entry = nn.Conv1d(width, dim, past)
        self.blocks = nn.ModuleList([nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, dim), nn.GELU())])
        self.exit = nn.Linear(dim, width)

    def forward(self, embeddings: Tensor) -> Tensor:
        """Return the prediction of the embedding after each one, `[rows, length, width]`."""
        padded = nn.functional.pad(embeddings.transpose(1, 2), (self.past - 1, 0))
        x = self.entry(padded).transpose(1, 2)
        for block in self.blocks:
            x = x + block(x)
        result: Tensor = self.exit(x)
        return result


def build(options: Mapping[str, Any], data: DataShape) -> NextEmbedding:
    return NextEmbedding(data.widths["embedding"], **options)


def loss(model: NextEmbedding, batch: Microbatch) -> Tensor:
    embeddings = batch.fields["embedding"]
    errors = model(embeddings[:, :-1]).float() - embeddings[:, 1:].float()
    return (errors.square().mean(-1) * batch.weights).sum()


def blocks(model: NextEmbedding) -> Iterable[nn.Module]:
    return model.blocks


spec = ModelSpec(build, loss, blocks)
