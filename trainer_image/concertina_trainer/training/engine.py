"""Forward and backward of a rank's microbatches, in any layout."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from concertina_protocol import StepPart
from concertina_trainer.config.trainer import TrainerConfig
from concertina_trainer.data.read.batch import BatchPlan
from concertina_trainer.data.read.batches import Microbatch
from concertina_trainer.model.attention import Context
from concertina_trainer.model.optimizer import ShardedAdamW
from concertina_trainer.model.own import OwnModel
from concertina_trainer.model.stages import Stages
from concertina_trainer.parallel.group import DistContext
from concertina_trainer.parallel.pipeline import Schedule, schedule, sum_tied
from concertina_trainer.parallel.summing import Sums


class Engine(Protocol):
    """Forward and backward of a rank's microbatches."""

    def forward_backward(self, microbatches: Sequence[Microbatch]) -> list[Tensor]:
        """Compute the reduced gradients of the global mean, and return what each microbatch adds to the loss.

        Ranks that do not count the loss return nothing.
        """
        ...

    def losses(self, microbatches: Sequence[Microbatch]) -> list[Tensor]:
        """Return the same as `forward_backward`, without computing gradients."""
        ...


class WholeModel:
    """Engine for ranks that compute all layers."""

    def __init__(self, model: Stages, optimizer: ShardedAdamW, sums: Sums, world: DistContext) -> None:
        self._model = model.whole
        self._optimizer, self._sums, self._world = optimizer, sums, world
        self._counts = world.degrees.place(world.rank).tensor == 0
        """Whether this rank counts the loss: ranks of a tensor group compute the same loss."""

    def forward_backward(self, microbatches: Sequence[Microbatch]) -> list[Tensor]:
        losses, times = [], self._world.times
        for i, microbatch in enumerate(microbatches):
            self._sums.begin(self._model, i, len(microbatches))
            with times.measured(StepPart.FORWARD):
                loss = self._loss(microbatch)
            with times.measured(StepPart.BACKWARD):
                torch.autograd.backward(loss)
            if isinstance(self._model, OwnModel):
                self._model.prove(microbatch, loss.detach())
            losses.append(loss.detach())
        self._sums.finish(self._optimizer.gradients())
        return losses if self._counts else []

    def losses(self, microbatches: Sequence[Microbatch]) -> list[Tensor]:
        losses = [self._loss(microbatch.to(self._world.device)) for microbatch in microbatches]
        return losses if self._counts else []

    def _loss(self, microbatch: Microbatch) -> Tensor:
        if isinstance(self._model, OwnModel):
            return cast(Tensor, self._model(microbatch))
        tokens, targets, weights = own_part(microbatch, self._model.context)
        loss: Tensor = self._model(tokens, microbatch.document_ids, targets, weights)
        return loss


class Pipelined:
    """Engine for ranks that compute some layers of every microbatch."""

    def __init__(self, model: Stages, tied: bool, schedule: Schedule, world: DistContext) -> None:
        self._model, self._tied, self._schedule, self._world = model, tied, schedule, world
        self._first, self._last = (any(getattr(part.part, end) for part in model.parts) for end in ("first", "last"))
        self._counts = self._last and world.degrees.place(world.rank).tensor == 0

    def forward_backward(self, microbatches: Sequence[Microbatch]) -> list[Tensor]:
        with self._world.times.measured(StepPart.PIPELINE):
            losses = self._run(self._schedule.step, microbatches)
            if self._tied:
                sum_tied(self._model, self._world)
        return losses

    def losses(self, microbatches: Sequence[Microbatch]) -> list[Tensor]:
        return self._run(self._schedule.eval, [microbatch.to(self._world.device) for microbatch in microbatches])

    def _run(self, run: Callable[..., Any], microbatches: Sequence[Microbatch]) -> list[Tensor]:
        losses: list[Tensor] = []
        arguments: list[tuple[Tensor, ...]] = []
        keywords: list[dict[str, Tensor]] = []
        for microbatch in microbatches:
            tokens, targets, weights = own_part(microbatch, self._model.context)
            arguments.append((tokens,) if self._first else ())
            # All stages of a rank get the same arguments.
            ids = {} if microbatch.document_ids is None else {"document_ids": microbatch.document_ids}
            keywords.append(ids | {"weights": weights} | ({"targets": targets} if self._last else {}))
        targets_of = [None] * len(microbatches) if self._last else None
        # torch would concatenate the outputs, which are the losses themselves.
        run(arg_mbs=arguments, kwarg_mbs=keywords, target_mbs=targets_of, losses=losses, return_outputs=False)
        return [loss.detach() for loss in losses] if self._counts else []


def own_part(microbatch: Microbatch, context: Context | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return the tokens, targets and weights that this rank computes.

    Each is `[rows, length]`, or this rank's part of the length.
    """
    tokens, targets, weights = microbatch.tokens[:, :-1], microbatch.tokens[:, 1:], microbatch.weights
    if context is None:
        return tokens, targets, weights
    return context.take(tokens), context.take(targets), context.take(weights)


def engine_of(
    model: Stages, optimizer: ShardedAdamW, sums: Sums, config: TrainerConfig, plan: BatchPlan, world: DistContext
) -> Engine:
    if world.meshes.pipeline is None:
        return WholeModel(model, optimizer, sums, world)
    return Pipelined(model, config.model.tie_embeddings, schedule(model, config, plan, world), world)
