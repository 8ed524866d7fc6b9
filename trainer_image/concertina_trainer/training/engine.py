"""Forward and backward of a rank's microbatches, in whatever layout."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from concertina_protocol import StepPart
from concertina_trainer.data.read.batches import Microbatch
from concertina_trainer.model.decoder import Decoder, token_losses
from concertina_trainer.model.optimizer import ShardedAdamW
from concertina_trainer.parallel.group import DistContext
from concertina_trainer.parallel.summing import Sums


class Engine(Protocol):
    def forward_backward(self, microbatches: Sequence[Microbatch]) -> list[Tensor]:
        """Gradients of the global mean, reduced. What each microbatch adds to the loss, on the ranks that count it; of
        others nothing."""
        ...

    def losses(self, microbatches: Sequence[Microbatch]) -> list[Tensor]:
        """The same, without gradients."""
        ...


class WholeModel:
    """Each rank computes all layers."""

    def __init__(self, model: Decoder, optimizer: ShardedAdamW, sums: Sums, world: DistContext) -> None:
        self._model, self._optimizer, self._sums, self._world = model, optimizer, sums, world
        self._counts = world.degrees.place(world.rank).tensor == 0
        """Ranks of a tensor group come to the same loss."""

    def forward_backward(self, microbatches: Sequence[Microbatch]) -> list[Tensor]:
        added, times = [], self._world.times
        for i, microbatch in enumerate(microbatches):
            self._sums.begin(self._model, i, len(microbatches))
            with times.measured(StepPart.FORWARD):
                loss = self._loss(microbatch, trained=True)
            with times.measured(StepPart.BACKWARD):
                torch.autograd.backward(loss)
            added.append(loss.detach())
        self._sums.finish(self._optimizer.gradients())
        return added if self._counts else []

    def losses(self, microbatches: Sequence[Microbatch]) -> list[Tensor]:
        found = [self._loss(microbatch.to(self._world.device)) for microbatch in microbatches]
        return found if self._counts else []

    def _loss(self, microbatch: Microbatch, trained: bool = False) -> Tensor:
        own = microbatch.tokens[:, :-1], microbatch.tokens[:, 1:], microbatch.weights
        context = self._model.context
        tokens, targets, weights = own if context is None else map(context.take, own)
        logits = self._model(tokens, microbatch.document_ids, weights if trained else None)
        return (token_losses(logits, targets) * weights).sum()
