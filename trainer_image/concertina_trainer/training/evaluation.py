"""Evaluation of the loss on documents that are not used for training, at intervals of steps.

The documents are the validation data of `concertina data build --validation`, or the sets that trainer.evaluation
names. The evaluated sequences are always the same, in batches of the training's size and shape. With `determinism:
Bitwise`, the evaluation loss does not depend on the number of ranks. Otherwise, the number of ranks changes it by
rounding errors only, like the loss of a training step. Evaluation changes neither the order of the training data nor
the gradients.

A step is evaluated before the next step begins. If a drain arrives during an evaluation, all ranks stop the evaluation
after the current batch, so that the drain does not wait. The next round continues from the same step, and evaluates
that step from the beginning (decision "A drain interrupts an evaluation").

A round is a period in which a fixed set of replicas trains.
"""

from __future__ import annotations

import dataclasses
import json
import math
import time
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from concertina_data.data_manifest import VALIDATION, short_digest
from concertina_protocol import Evaluated, StepPart
from concertina_state.errors import InvalidInput
from concertina_state.format.shardfile import Evaluations
from concertina_state.saving import Saving
from concertina_trainer.config.data_config import DataConfig, EvaluationConfig
from concertina_trainer.config.trainer import TrainerConfig
from concertina_trainer.data.read.batch import BatchPlan
from concertina_trainer.data.read.batches import microbatches
from concertina_trainer.data.read.readers import Readers
from concertina_trainer.data.read.sequence_reader import Reader
from concertina_trainer.model.stages import Stages
from concertina_trainer.parallel.group import DistContext
from concertina_trainer.parallel.summing import Sums
from concertina_trainer.training.engine import Engine
from concertina_trainer.training.evaluation_history import continued, stop_reason, with_result
from concertina_trainer.training.progress_report import Reporter

SEED = 0
"""Seed of the order of sequences. It does not depend on the run's seed, so that runs can be compared."""
GROUPS = 1
"""Number of groups of shards for the order of sequences.

It does not depend on the run's `data.groups`, so that runs can be compared.
"""


@dataclasses.dataclass
class BatchResults:
    """Results of the evaluated batches of a set."""

    losses: list[float] = dataclasses.field(default_factory=list)
    """Mean loss of each batch."""
    correct: list[float] = dataclasses.field(default_factory=list)
    """Share of each batch's weights that belongs to correctly predicted tokens, or empty for a custom model."""
    tokens: list[int] = dataclasses.field(default_factory=list)
    """Sum of the weights of each batch's predicted tokens."""
    text_bytes: list[float | None] = dataclasses.field(default_factory=list)
    """Bytes of text of each batch (see `Reader.text_bytes`)."""

    def figures(self) -> Figures:
        """Return the figures of the set of documents, computed from its batches."""
        total = sum(self.tokens)
        pairs = list(zip(self.losses, self.tokens, strict=True))
        loss = sum(loss * count for loss, count in pairs) / total
        # The sum of weights is a whole number. Rounding to it removes the errors of the weights, which are multiplied
        # by 1 / count in float32.
        shares = zip(self.correct, self.tokens, strict=bool(self.correct))
        accuracy = sum(round(share * count) for share, count in shares) / total if self.correct else None
        known = [each for each in self.text_bytes if each]
        is_known = len(known) == len(self.text_bytes) and math.isfinite(loss)
        return Figures(loss, total, accuracy, loss / math.log(2) * total / sum(known) if is_known else None)


@dataclasses.dataclass(frozen=True)
class Figures:
    """Figures of one set of documents, such as its loss."""

    loss: float
    tokens: int
    """Sum of the weights of the predicted tokens."""
    token_accuracy: float | None
    """Share of `tokens` for which the right token has the largest logit, or None without tokens to predict."""
    bits_per_byte: float | None
    """Loss in bits per byte of text, or None if it is not known or not finite."""


class Evaluation:
    """Evaluation of a run's loss on documents that are not used for training."""

    def __init__(
        self, config: EvaluationConfig, readers: Mapping[str, Reader], plan: BatchPlan, model: Stages, engine: Engine,
        sums: Sums, world: DistContext, reporter: Reporter, saving: Saving, history: Evaluations,
    ) -> None:  # fmt: skip
        """Prepare to evaluate.

        Args:
            config: `spec.trainer.evaluation`.
            readers: Reader of each set, keyed by name, in the order of `evaluation_readers`.
            plan: Division of a batch among the ranks.
            model: Model to evaluate.
            engine: Engine of the training.
            sums: Sums of the training.
            world: Ranks of the round.
            reporter: Reports of this worker.
            saving: Object that saves this rank's state, including the history of evaluations.
            history: Evaluations before this round.
        """
        self._config, self._readers, self._plan = config, readers, plan
        self._model, self._engine, self._sums = model, engine, sums
        self._world, self._reporter, self._saving = world, reporter, saving
        self.history = continued(history, self._digest())
        if self.history.step:
            reporter.evaluated_before(self._result())

    def _digest(self) -> str:
        """Return a digest of the documents on which the run's evaluation loss is measured: those of the first set."""
        reader = next(iter(self._readers.values()))
        measured = [reader.digest, reader.length, self._count(reader), self._config.ema, reader.transform]
        return short_digest(json.dumps(measured).encode())

    @property
    def stop_reason(self) -> str:
        """Sentence that says why the run ends after the last evaluation, or "" if the run continues."""
        return stop_reason(self.history, self._config.stopping)

    def is_best(self, step: int) -> bool:
        """Return whether `step` has the lowest loss so far."""
        return self.history.best_step == step

    def after(self, step: int, last: bool = False) -> bool:
        """Evaluate if an evaluation is due after `step` steps, or if `step` is the `last` step of the run.

        In a drain, all ranks stop after the same step. Return False if a request to stop the round (a drain)
        interrupted the evaluation, and True otherwise.

        Raises:
            InvalidInput: When a set has no token to predict.
        """
        if step == self.history.step or (step % self._config.every_steps and not last):
            return True
        started = time.perf_counter()
        self._reporter.evaluating(step)
        with self._world.times.measured(StepPart.EVALUATION):
            measured = {name: self._batches(reader) for name, reader in self._readers.items()}
        seconds, batches = time.perf_counter() - started, sum(map(self._number_of_batches, self._readers.values()))
        finished = sum(len(each.losses) for each in measured.values())
        if finished < batches:
            self._reporter.note(
                f"step {step}: the evaluation stopped for a drain, after {finished} of {batches} "
                "batches; the round that continues from this step starts it again"
            )
            return False
        for name, each in measured.items():
            if not sum(each.tokens):
                raise InvalidInput(
                    f"the evaluation set {name} has no token to predict in its first {self._config.sequences} "
                    "sequences, so its loss would be 0: raise evaluation.sequences, or use another set."
                )
        by_set = {name: each.figures() for name, each in measured.items()}
        first, *_ = by_set.values()
        named = by_set if self._config.sets else {}
        self.history = self._with_figures(step, first, named)
        self._saving.evaluated(self.history)
        result = self._result()
        figures = [f"evaluation loss {first.loss:.4f}"]
        figures += [] if result.perplexity is None else [f"perplexity {result.perplexity:.4g}"]
        figures += _words(first)
        sentence = f"step {step}: {', '.join(figures)} (mean of {first.tokens:,} tokens, {seconds:.1f} s)"
        if named:
            sets = (
                ", ".join([f"{name} {each.loss:.4f}", *_words(each)]) + f" of {each.tokens:,} tokens"
                for name, each in named.items()
            )
            sentence += f"; by set: {'; '.join(sets)}"
        self._reporter.evaluated(result, sentence)
        return True

    def _with_figures(self, step: int, first: Figures, named: Mapping[str, Figures]) -> Evaluations:
        """Return the history with the figures of the first set and of the named sets."""
        sets = {name: each.loss for name, each in named.items()}
        least = self._config.stopping.least_improvement if self._config.stopping else 0.0
        accuracies = {name: each.token_accuracy for name, each in named.items()}
        bits = {name: each.bits_per_byte for name, each in named.items()}
        return dataclasses.replace(
            with_result(self.history, step, first.loss, sets, least),
            token_accuracy=first.token_accuracy,
            bits_per_byte=first.bits_per_byte,
            set_token_accuracies={name: value for name, value in accuracies.items() if value is not None},
            set_bits_per_byte={name: value for name, value in bits.items() if value is not None},
        )

    def _result(self) -> Evaluated:
        """Return the last evaluation in the form in which it is reported to the agent."""
        history, has_perplexity = self.history, self._model.predicts_tokens
        return Evaluated(
            step=history.step,
            loss=_number(history.loss),
            perplexity=perplexity_of(history.loss) if has_perplexity and history.loss is not None else None,
            sets={name: _number(loss) for name, loss in history.sets.items()},
            best_step=history.best_step or None,
            best_loss=history.best_loss,
            without_improvement=history.without_improvement,
            stop_reason=self.stop_reason,
            token_accuracy=history.token_accuracy,
            bits_per_byte=history.bits_per_byte,
            set_token_accuracies=history.set_token_accuracies,
            set_bits_per_byte=history.set_bits_per_byte,
        )

    def _count(self, reader: Reader) -> int:
        return min(self._config.sequences, reader.epoch_size)

    def _number_of_batches(self, reader: Reader) -> int:
        return -(-self._count(reader) // self._plan.global_size)

    @torch.no_grad()
    def _batches(self, reader: Reader) -> BatchResults:
        """Evaluate the batches of a set.

        In a drain, all ranks stop after the same step. If a request to stop the round (a drain) arrives during the
        evaluation, the remaining batches are left out.
        """
        sums: list[Tensor] = []
        found = BatchResults()
        number = self._count(reader)
        for begin in range(0, number, self._plan.global_size):
            end = min(number, begin + self._plan.global_size)
            batch = microbatches(reader, self._plan, self._world.data_rank, begin, end)
            count = int(reader.weight_sums(begin, end).sum())
            # The host waits for the device only here, once per batch. Meanwhile it has read the next batch, so reading
            # overlaps with the computation of the previous batch.
            if sums and sums[-1][-1].item():
                break
            losses, correct = self._engine.evaluated(batch)
            parts = [self._sums.losses(losses)]
            parts += [self._sums.losses(correct)] if self._model.predicts_tokens else []
            payload = torch.cat([*parts, parts[0].new_tensor([self._saving.local_flags().drain])])
            dist.all_reduce(payload)
            sums.append(payload)
            found.tokens.append(count)
            found.text_bytes.append(reader.text_bytes(begin, end) if self._model.predicts_tokens else None)
        for module in self._model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()  # no backward pass frees the gathered weights
        for *summed, _ in torch.stack(sums).tolist():
            size = len(summed) // 2 if self._model.predicts_tokens else len(summed)
            found.losses.append(self._sums.loss(summed[:size]))
            if self._model.predicts_tokens:
                found.correct.append(self._sums.loss(summed[size:]))
        return found


def _number(loss: float | None) -> float:
    return math.nan if loss is None else loss


def _words(figures: Figures) -> list[str]:
    """Return phrases for the log about the known figures other than the loss."""
    accuracy = [] if figures.token_accuracy is None else [f"token accuracy {figures.token_accuracy:.4f}"]
    return accuracy + ([] if figures.bits_per_byte is None else [f"{figures.bits_per_byte:.4f} bits per byte"])


def perplexity_of(loss: float) -> float | None:
    """Return exp(loss), or None if it is not finite."""
    try:
        perplexity = math.exp(loss)
    except OverflowError:
        return None
    return perplexity if math.isfinite(perplexity) else None


def evaluation_readers(
    config: TrainerConfig, training: Reader, readers: Readers, begun: bool = False
) -> dict[str, Reader]:
    """Return the reader of each evaluation set, keyed by name. `readers` opens them. See Reader for `begun`.

    Raises:
        InvalidInput: When a set does not exist or can't be used, or its tokenizer differs from that of the data in
            `training`.
    """
    if config.evaluation is None:
        return {}
    if not config.evaluation.sets:
        return {VALIDATION: _validation_reader(config, readers, begun)}
    by_name = {}
    for one in config.evaluation.sets:
        reader = _reader(config, readers, begun, uri=one.uri, mixture=[])
        ours, theirs = training.tokenizer, reader.tokenizer
        if ours.digest != theirs.digest:
            raise InvalidInput(
                f"the evaluation set {one.name} has the tokenizer {theirs.name} (digest {theirs.digest}), but the "
                f"training data have {ours.name} (digest {ours.digest}): build {one.uri} again in the same way as the "
                "training data."
            )
        by_name[one.name] = reader
    return by_name


def _reader(config: TrainerConfig, readers: Readers, begun: bool, **changed: Any) -> Reader:
    data: DataConfig = config.data.model_copy(update={**changed, "groups": GROUPS})
    return readers.open(data, config.model.sequence_length, SEED, begun, evaluates=True)


def _validation_reader(config: TrainerConfig, readers: Readers, begun: bool) -> Reader:
    """Return a reader of the validation documents of each data set.

    Raises:
        InvalidInput: When there are no validation documents, or they can't be used.
    """
    aside = [
        source.model_copy(update={"uri": f"{source.uri.rstrip('/')}/{VALIDATION}"}) for source in config.data.sources
    ]
    try:
        return _reader(config, readers, begun, uri=None, mixture=aside)
    except InvalidInput as error:
        raise InvalidInput(
            f"{error} trainer.evaluation needs the documents that `concertina data build --validation "
            "SHARE` sets aside: build the data with that option, or remove trainer.evaluation."
        ) from error
