"""Evaluation of the loss on validation documents (`concertina data build --validation`), at intervals of steps.

The evaluated sequences are always the same, in batches of the training's size and shape. With `determinism: Bitwise`,
the evaluation loss does not depend on the number of ranks. Otherwise, the number of ranks changes it by rounding errors
only, like the loss of a training step. Evaluation changes neither the order of the training data nor the gradients.

A step is evaluated before the next step begins. If a drain arrives during an evaluation, all ranks stop the evaluation
after the current batch, so that the drain does not wait. The next round continues from the same step, and evaluates
that step from the beginning (decision "A drain interrupts an evaluation").
"""

from __future__ import annotations

import time

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
    """Evaluation of a run's loss on validation documents."""

    def __init__(
        self, config: EvaluationConfig, reader: Reader, plan: BatchPlan, model: Stages, engine: Engine, sums: Sums,
        world: DistContext, reporter: Reporter, saving: Saving,
    ) -> None:  # fmt: skip
        self._every, self._reader, self._plan = config.every_steps, reader, plan
        self._model, self._engine, self._sums = model, engine, sums
        self._world, self._reporter, self._saving = world, reporter, saving
        self._count = min(config.sequences, reader.epoch_size)
        self._done = 0
        """Last step whose evaluation began in this round."""

    def after(self, step: int, last: bool = False) -> bool:
        """Evaluate if an evaluation is due after `step` steps, or if `step` is the `last` step of the run.

        Return False if a request to stop the round (a drain) interrupted the evaluation, and True otherwise.
        """
        if step == self._done or (step % self._every and not last):
            return True
        self._done, started = step, time.perf_counter()
        self._reporter.evaluating(step)
        with self._world.times.measured(StepPart.EVALUATION):
            losses, tokens = self._losses()
        seconds, batches = time.perf_counter() - started, -(-self._count // self._plan.global_size)
        if len(losses) < batches:
            self._reporter.note(
                f"step {step}: the evaluation stopped for a drain, after {len(losses)} of {batches} "
                "batches; the round that continues from this step starts it again"
            )
            return False
        loss = sum(loss * count for loss, count in zip(losses, tokens, strict=True)) / max(1, sum(tokens))
        self._reporter.evaluated(
            Evaluated(step, loss),
            f"step {step}: evaluation loss {loss:.4f} (mean of {sum(tokens):,} tokens, {seconds:.1f} s)",
        )
        return True

    @torch.no_grad()
    def _losses(self) -> tuple[list[float], list[int]]:
        """Return the mean loss of each validation batch, and the sum of the weights of each batch's predicted tokens.

        If a request to stop the round (a drain) arrives during the evaluation, the remaining batches are left out.
        """
        sums: list[Tensor] = []
        tokens: list[int] = []
        for begin in range(0, self._count, self._plan.global_size):
            end = min(self._count, begin + self._plan.global_size)
            batch = microbatches(self._reader, self._plan, self._world.data_rank, begin, end)
            count = int(self._reader.weight_sums(begin, end).sum())
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


def validation_reader(config: TrainerConfig, begun: bool = False) -> Reader:
    """Return a reader of the validation documents of each data set. See Reader for `begun`.

    Raises:
        InvalidInput: When there are no validation documents, or they can't be used.
    """
    aside = [
        source.model_copy(update={"uri": f"{source.uri.rstrip('/')}/{VALIDATION}"}) for source in config.data.sources
    ]
    data: DataConfig = config.data.model_copy(update={"uri": None, "mixture": aside})
    try:
        return Reader(data, config.model.sequence_length, SEED, begun=begun, evaluates=True)
    except InvalidInput as error:
        raise InvalidInput(
            f"{error} trainer.evaluation needs the documents that `concertina data build --validation "
            "SHARE` sets aside: build the data with that option, or remove trainer.evaluation."
        ) from error
