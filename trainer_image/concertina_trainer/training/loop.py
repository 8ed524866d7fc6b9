"""The training loop."""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import Tensor

from concertina_protocol.worker_channel import Done
from concertina_trainer.config import TrainerConfig
from concertina_trainer.data.read.batches import Batches, Microbatch
from concertina_trainer.model.decoder import Decoder, token_losses
from concertina_trainer.model.optimizer import ShardedAdamW, learning_rate
from concertina_trainer.parallel.parallel import World
from concertina_trainer.parallel.summing import Sums
from concertina_trainer.training.agreement import Said, agree
from concertina_trainer.training.anomalies import Anomalies
from concertina_trainer.training.balance import Balance
from concertina_trainer.training.digests import Digests
from concertina_trainer.training.evaluation import Evaluation
from concertina_trainer.training.report import Reporter
from concertina_trainer.training.saving import Saving


@dataclasses.dataclass(frozen=True)
class Run:
    config: TrainerConfig
    world: World
    model: Decoder
    optimizer: ShardedAdamW
    sums: Sums
    batches: Batches
    balance: Balance
    anomalies: Anomalies
    digests: Digests
    saving: Saving
    reporter: Reporter
    evaluation: Evaluation | None = None

    def evaluate(self, step: int, position: int, last: bool = False) -> Done | None:
        """Done where a drain has come meanwhile: the round ends with `step`, and who goes on from it evaluates it."""
        if self.evaluation is None or self.evaluation.after(step, last):
            return None
        self.reporter.heartbeat.enter("checkpointing", step)
        return self.saving.drained(step, position)


def train(run: Run, step: int, position: int) -> Done:
    """From `step` finished steps and `position` consumed samples to the end of the run, or to a drain."""
    if step >= run.config.steps:
        done = run.evaluate(step, position, last=True) or run.saving.after(step, position, Said())
        assert done is not None
        return done
    enter = run.reporter.heartbeat.enter
    while True:
        if done := run.evaluate(step, position):
            return done
        enter("loading data", step)
        microbatches = run.batches.next(run.reporter.stalled)
        enter("computing", step)
        run.digests.begin(step)
        losses = forward_backward(run.model, run.optimizer, run.sums, microbatches)
        enter("reducing", step)
        digests = run.digests.word(step, run.world.device)
        work = run.balance.word(run.world.device)
        agreed = agree(run.world, run.sums, losses, run.optimizer.gradients(), run.saving.say(), digests, work)
        run.digests.judge(step, agreed.digests, run.anomalies.skipped)
        if why := run.anomalies.skips(step, position, agreed):
            run.optimizer.drop_gradients()
            run.reporter.left_out(why, run.anomalies.skipped)
            continue
        run.reporter.note(run.balance.judge(agreed.work))

        rate = learning_rate(step, run.config.steps, run.config.optimizer)
        run.optimizer.update(rate, clip_scale(agreed.squared_norm, run.config.optimizer.gradient_clip))
        step, position = step + 1, position + run.config.global_batch_size

        run.saving.heard(agreed.said)
        saving, stalled = run.saving.seconds, run.batches.stalled_seconds
        run.reporter.step(step, position, agreed.loss, rate, run.saving.snapshot_step, saving, stalled)
        run.balance.worked(microbatches, run.reporter.heartbeat.busy)
        if step == run.config.steps and (done := run.evaluate(step, position, last=True)):
            return done
        enter("checkpointing", step)
        done = run.saving.after(step, position, agreed.said)
        if done is not None:
            return done
        run.digests.rest(step)


def forward_backward(
    model: Decoder, optimizer: ShardedAdamW, sums: Sums, microbatches: list[Microbatch]
) -> list[Tensor]:
    """Gradients of the global mean, reduced; returns what each microbatch adds to the loss."""
    parts = []
    for i, batch in enumerate(microbatches):
        sums.begin(model, i, len(microbatches))
        losses = token_losses(model(batch.tokens[:, :-1], batch.documents), batch.tokens[:, 1:])
        loss = (losses * batch.weights).sum()
        torch.autograd.backward(loss)
        parts.append(loss.detach())
    sums.finish(optimizer.gradients())
    return parts


def clip_scale(squared_norm: float, limit: float) -> float:
    """What gradients are multiplied by so that their norm is at most `limit` (0: no limit)."""
    norm = math.sqrt(squared_norm)
    return min(1.0, limit / norm) if limit and norm else 1.0
