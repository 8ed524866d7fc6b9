"""Forward and backward pass of a rank's microbatches, with or without pipeline parallelism."""

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
from concertina_trainer.model.dropout import keys_of_tokens
from concertina_trainer.model.loss import correct_weights
from concertina_trainer.model.optimizer import LocalOptimizer
from concertina_trainer.model.own import OwnModel
from concertina_trainer.model.stages import Stages
from concertina_trainer.parallel.group import DistContext
from concertina_trainer.parallel.pipeline import Schedule, schedule, sum_tied
from concertina_trainer.parallel.summing import Sums


class Engine(Protocol):
    """Forward and backward pass of a rank's microbatches."""

    def forward_backward(self, microbatches: Sequence[Microbatch]) -> list[Tensor]:
        """Compute the gradients of the global batch's mean loss, and return the share of each microbatch in this mean.

        The gradients are reduced over ranks. The list is empty on ranks whose loss is not counted. These are all ranks
        of a tensor group except the first, and all pipeline stages except the last.
        """
        ...

    def evaluated(self, microbatches: Sequence[Microbatch]) -> tuple[list[Tensor], list[Tensor]]:
        """Return the losses that `forward_backward` returns, without computing gradients.

        The second list contains the sums of the weights of correctly predicted tokens (see `correct_weights`). It is
        empty for custom models.
        """
        ...


class WholeModel:
    """Engine for training without pipeline parallelism, in which each rank computes all layers."""

    def __init__(
        self, model: Stages, optimizer: LocalOptimizer, sums: Sums, world: DistContext, dropout_seed: int | None = None
    ) -> None:
        """Store the parts of the engine. `dropout_seed` is the seed of dropout in training, or None for no dropout."""
        self._model, self._dropout_seed = model.whole, dropout_seed
        self._optimizer, self._sums, self._world = optimizer, sums, world
        self._counts = world.degrees.place(world.rank).tensor == 0
        """True if this rank's loss is counted.

        All ranks of a tensor group compute the same loss, so only that of the first rank is counted.
        """

    def forward_backward(self, microbatches: Sequence[Microbatch]) -> list[Tensor]:
        losses, times = [], self._world.times
        for i, microbatch in enumerate(microbatches):
            self._sums.begin(self._model, i, len(microbatches))
            with times.measured(StepPart.FORWARD):
                loss = self._loss(microbatch, self._dropout_seed)
            with times.measured(StepPart.BACKWARD):
                torch.autograd.backward(loss)
            if isinstance(self._model, OwnModel):
                self._model.prove(microbatch, loss.detach())
            losses.append(loss.detach())
        self._sums.finish(self._optimizer.gradients())
        return losses if self._counts else []

    def evaluated(self, microbatches: Sequence[Microbatch]) -> tuple[list[Tensor], list[Tensor]]:
        with correct_weights() as correct:
            losses = [self._loss(microbatch.to(self._world.device), None) for microbatch in microbatches]
        return (losses, correct) if self._counts else ([], [])

    def _loss(self, microbatch: Microbatch, dropout_seed: int | None) -> Tensor:
        if isinstance(self._model, OwnModel):
            return cast(Tensor, self._model(microbatch))
        tokens, targets, weights, keys = own_part(microbatch, self._model.context, dropout_seed)
        loss: Tensor = self._model(tokens, microbatch.document_ids, targets, weights, keys)
        return loss


class Pipelined:
    """Engine for training with pipeline parallelism, in which a rank computes some layers of every microbatch."""

    def __init__(
        self, model: Stages, tied: bool, schedule: Schedule, world: DistContext, dropout_seed: int | None = None
    ) -> None:
        """Store the parts of the engine. `dropout_seed` is the seed of dropout in training, or None for no dropout."""
        self._dropout_seed = dropout_seed
        self._model, self._tied, self._schedule, self._world = model, tied, schedule, world
        self._first, self._last = (any(getattr(part.part, end) for part in model.parts) for end in ("first", "last"))
        self._counts = self._last and world.degrees.place(world.rank).tensor == 0

    def forward_backward(self, microbatches: Sequence[Microbatch]) -> list[Tensor]:
        with self._world.times.measured(StepPart.PIPELINE):
            losses = self._run(self._schedule.step, microbatches, self._dropout_seed)
            if self._tied:
                sum_tied(self._model, self._world)
        return losses

    def evaluated(self, microbatches: Sequence[Microbatch]) -> tuple[list[Tensor], list[Tensor]]:
        on_device = [microbatch.to(self._world.device) for microbatch in microbatches]
        with correct_weights() as correct:
            losses = self._run(self._schedule.eval, on_device, None)
        return losses, correct if self._counts else []

    def _run(
        self, run: Callable[..., Any], microbatches: Sequence[Microbatch], dropout_seed: int | None
    ) -> list[Tensor]:
        losses: list[Tensor] = []
        arguments: list[tuple[Tensor, ...]] = []
        keywords: list[dict[str, Tensor]] = []
        for microbatch in microbatches:
            tokens, targets, weights, keys = own_part(microbatch, self._model.context, dropout_seed)
            arguments.append((tokens,) if self._first else ())
            # torch passes the same arguments to all stages of a rank.
            optional = {"document_ids": microbatch.document_ids, "keys": keys}
            given = {name: tensor for name, tensor in optional.items() if tensor is not None}
            keywords.append(given | {"weights": weights} | ({"targets": targets} if self._last else {}))
        targets_of = [None] * len(microbatches) if self._last else None
        # The outputs of the last stage are the losses. With return_outputs, torch would concatenate them.
        run(arg_mbs=arguments, kwarg_mbs=keywords, target_mbs=targets_of, losses=losses, return_outputs=False)
        return [loss.detach() for loss in losses] if self._counts else []


def own_part(
    microbatch: Microbatch, context: Context | None, dropout_seed: int | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return the tokens, targets, weights and dropout keys that this rank computes, each `[rows, length]`.

    Without a seed, the keys are None. Under context parallelism, each result is `[rows, length / size]`: the columns of
    this rank (see `Context.take`).
    """
    tokens, targets, weights = microbatch.tokens[:, :-1], microbatch.tokens[:, 1:], microbatch.weights
    keys = None
    if dropout_seed is not None:
        rows, length = weights.shape
        keys = keys_of_tokens(microbatch.samples, dropout_seed, rows, length, weights.device)
    if context is None:
        return tokens, targets, weights, keys
    own_keys = None if keys is None else context.take(keys)
    return context.take(tokens), context.take(targets), context.take(weights), own_keys


def engine_of(
    model: Stages, optimizer: LocalOptimizer, sums: Sums, config: TrainerConfig, plan: BatchPlan, world: DistContext
) -> Engine:
    lora = config.model.lora
    dropout_seed = config.seed if lora is not None and lora.dropout else None
    if world.meshes.pipeline is None:
        return WholeModel(model, optimizer, sums, world, dropout_seed)
    return Pipelined(model, config.model.tie_embeddings, schedule(model, config, plan, world), world, dropout_seed)
