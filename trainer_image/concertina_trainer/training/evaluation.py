"""Evaluation of the loss on documents that are not used for training, at intervals of steps.

There is one set of the documents that `concertina data build --validation` has set aside, or the sets that
trainer.evaluation names. The evaluated sequences are always the same, in batches of the training's size and shape. With
`determinism: Bitwise`, the evaluation loss does not depend on the number of ranks. Otherwise, the number of ranks
changes it by rounding errors only, like the loss of a training step. Evaluation changes neither the order of the
training data nor the gradients.

A step is evaluated before the next step begins. If a drain arrives during an evaluation, all ranks stop the evaluation
after the current batch, so that the drain does not wait. The next round continues from the same step, and evaluates
that step from the beginning (decision "A drain interrupts an evaluation").
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from concertina_data.data_manifest import VALIDATION
from concertina_protocol import Evaluated, StepPart
from concertina_state.errors import InvalidInput
from concertina_state.saving import Saving
from concertina_trainer.config.data_config import DataConfig, EvaluationConfig
from concertina_trainer.config.trainer import TrainerConfig
from concertina_trainer.data.read.batch import BatchPlan
from concertina_trainer.data.read.batches import microbatches
from concertina_trainer.data.read.sequence_reader import Reader
from concertina_trainer.model.stages import Stages
from concertina_trainer.parallel.group import DistContext
from concertina_trainer.parallel.summing import Sums
from concertina_trainer.training.engine import Engine
from concertina_trainer.training.progress_report import Reporter

SEED = 0
"""Seed of the order of sequences. It does not depend on the run's seed, so that runs can be compared."""


class Evaluation:
    """Evaluation of a run's loss on documents that are not used for training."""

    def __init__(
        self, config: EvaluationConfig, readers: Mapping[str, Reader], plan: BatchPlan, model: Stages, engine: Engine,
        sums: Sums, world: DistContext, reporter: Reporter, saving: Saving,
    ) -> None:  # fmt: skip
        """Prepare to evaluate.

        `readers` has the reader of each set by name, in the order of `evaluation_readers`.
        """
        self._every, self._most, self._named = config.every_steps, config.sequences, bool(config.sets)
        self._readers, self._plan = readers, plan
        self._model, self._engine, self._sums = model, engine, sums
        self._world, self._reporter, self._saving = world, reporter, saving
        self._done = 0
        """Last step whose evaluation began in this round."""

    def after(self, step: int, last: bool = False) -> bool:
        """Evaluate if an evaluation is due after `step` steps, or if `step` is the `last` step of the run.

        Return False if a drain interrupted the evaluation, and True otherwise.
        """
        if step == self._done or (step % self._every and not last):
            return True
        self._done, started = step, time.perf_counter()
        self._reporter.evaluating(step)
        with self._world.times.measured(StepPart.EVALUATION):
            measured = {name: self._losses(reader) for name, reader in self._readers.items()}
        seconds, batches = time.perf_counter() - started, sum(map(self._batches, self._readers.values()))
        finished = sum(len(losses) for losses, _ in measured.values())
        if finished < batches:
            self._reporter.note(
                f"step {step}: the evaluation stopped for a drain, after {finished} of {batches} "
                "batches; the round that continues from this step starts it again"
            )
            return False
        means = {name: _mean(losses, tokens) for name, (losses, tokens) in measured.items()}
        (loss, tokens), *_ = means.values()
        perplexity = None if self._model.own else perplexity_of(loss)
        figures = [f"evaluation loss {loss:.4f}"]
        figures += [] if perplexity is None else [f"perplexity {perplexity:.4g}"]
        sentence = f"step {step}: {', '.join(figures)} (mean of {tokens:,} tokens, {seconds:.1f} s)"
        if self._named:
            losses = (f"{name} {loss:.4f} of {tokens:,} tokens" for name, (loss, tokens) in means.items())
            sentence += f"; by set: {', '.join(losses)}"
        sets = {name: loss for name, (loss, _) in means.items()} if self._named else {}
        self._reporter.evaluated(Evaluated(step, loss, perplexity, sets), sentence)
        return True

    def _count(self, reader: Reader) -> int:
        return min(self._most, reader.epoch_size)

    def _batches(self, reader: Reader) -> int:
        return -(-self._count(reader) // self._plan.global_size)

    @torch.no_grad()
    def _losses(self, reader: Reader) -> tuple[list[float], list[int]]:
        """Return the mean loss of each batch of a set, and the sum of the weights of each batch's predicted tokens.

        If a drain arrives during the evaluation, the remaining batches are left out.
        """
        sums: list[Tensor] = []
        tokens: list[int] = []
        number = self._count(reader)
        for begin in range(0, number, self._plan.global_size):
            end = min(number, begin + self._plan.global_size)
            batch = microbatches(reader, self._plan, self._world.data_rank, begin, end)
            count = int(reader.weight_sums(begin, end).sum())
            # The host waits for the device only here, once per batch. Meanwhile it has read the next batch, so reading
            # overlaps with the computation of the previous batch.
            if sums and sums[-1][-1].item():
                break
            losses = self._sums.losses(self._engine.losses(batch))
            payload = torch.cat([losses, losses.new_tensor([self._saving.local_flags().drain])])
            dist.all_reduce(payload)
            sums.append(payload)
            tokens.append(count)
        for module in self._model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()  # no backward pass frees the gathered weights
        return [self._sums.loss(losses) for *losses, _ in torch.stack(sums).tolist()], tokens


def _mean(losses: list[float], tokens: list[int]) -> tuple[float, int]:
    """Return the mean loss of a set, given those of its batches, and the sum of the weights of its tokens."""
    loss = sum(loss * count for loss, count in zip(losses, tokens, strict=True)) / max(1, sum(tokens))
    return loss, sum(tokens)


def perplexity_of(loss: float) -> float | None:
    """Return exp(loss), or None if it is not finite."""
    try:
        perplexity = math.exp(loss)
    except OverflowError:
        return None
    return perplexity if math.isfinite(perplexity) else None


def evaluation_readers(config: TrainerConfig, training: Reader, begun: bool = False) -> dict[str, Reader]:
    """Return the reader of each evaluation set, by name. See Reader for `begun`.

    Raises:
        InvalidInput: When a set does not exist or can't be used, or its tokenizer differs from that of the data in
            `training`.
    """
    if config.evaluation is None:
        return {}
    if not config.evaluation.sets:
        return {VALIDATION: _validation_reader(config, begun)}
    readers = {}
    for one in config.evaluation.sets:
        reader = _reader(config, begun, uri=one.uri, mixture=[])
        ours, theirs = training.tokenizer, reader.tokenizer
        if ours.digest != theirs.digest:
            raise InvalidInput(
                f"the evaluation set {one.name} has the tokenizer {theirs.name} (digest {theirs.digest}), but the "
                f"training data have {ours.name} (digest {ours.digest}): build {one.uri} again in the same way as the "
                "training data."
            )
        readers[one.name] = reader
    return readers


def _reader(config: TrainerConfig, begun: bool, **changed: Any) -> Reader:
    data: DataConfig = config.data.model_copy(update=changed)
    return Reader(data, config.model.sequence_length, SEED, begun=begun)


def _validation_reader(config: TrainerConfig, begun: bool) -> Reader:
    """Return a reader of the validation documents of each data set.

    Raises:
        InvalidInput: When there are no validation documents, or they can't be used.
    """
    aside = [
        source.model_copy(update={"uri": f"{source.uri.rstrip('/')}/{VALIDATION}"}) for source in config.data.sources
    ]
    try:
        return _reader(config, begun, uri=None, mixture=aside)
    except InvalidInput as error:
        raise InvalidInput(
            f"{error} trainer.evaluation needs the documents that `concertina data build --validation "
            "SHARE` sets aside: build the data with that option, or remove trainer.evaluation."
        ) from error
