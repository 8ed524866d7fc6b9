"""The training loop."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable

from concertina_protocol import StepPart
from concertina_protocol.heartbeat import WorkerPhase
from concertina_protocol.worker_channel import Done, Outcome
from concertina_state.saving import Saving, StepFlags
from concertina_trainer.config.trainer import TrainerConfig
from concertina_trainer.data.read.batches import Batches
from concertina_trainer.model.optimizer import LocalOptimizer, learning_rate
from concertina_trainer.parallel.group import DistContext
from concertina_trainer.parallel.summing import Sums
from concertina_trainer.training import collection
from concertina_trainer.training.agreement import agree
from concertina_trainer.training.anomalies import Anomalies
from concertina_trainer.training.balance import Balance
from concertina_trainer.training.digests import Digests
from concertina_trainer.training.engine import Engine
from concertina_trainer.training.evaluation import Evaluation
from concertina_trainer.training.expert_loads import ExpertLoads
from concertina_trainer.training.progress_report import Reporter, StepInfo


@dataclasses.dataclass(frozen=True)
class TrainingRun:
    """Parts of a training run."""

    config: TrainerConfig
    world: DistContext
    engine: Engine
    optimizer: LocalOptimizer
    sums: Sums
    batches: Batches
    balance: Balance
    loads: ExpertLoads
    anomalies: Anomalies
    digests: Digests
    saving: Saving
    reporter: Reporter
    evaluation: Evaluation | None = None

    def evaluate(self, step: int, position: int, last: bool = False) -> Done | None:
        """Evaluate `step` if an evaluation is due. Return Done if a request to stop (drain) interrupted the evaluation.

        In that case this round ends with `step`, and the next round evaluates `step` again.
        """
        if self.evaluation is None:
            return None
        averaged = self.config.evaluation is not None and self.config.evaluation.ema
        with self.optimizer.averaged() if averaged else contextlib.nullcontext():
            done = self.evaluation.after(step, last)
        if done:
            return None
        self.reporter.enter(WorkerPhase.CHECKPOINTING, step)
        self.saving.stop_at(step, position, self.anomalies.skipped, self.anomalies.trend)
        return Done(Outcome.DRAINED, step)


def train(run: TrainingRun, step: int, position: int, check: Callable[[], None] = lambda: None) -> Done:
    """Train until the run is complete, or until a drain (a request to save and stop) ends the round.

    Training begins after `step` finished steps and `position` consumed samples. `check` is a function that raises an
    error if the round is over. `train` calls `check` after the all-reduce of each step, because collectives on a GPU
    return invalid results after they were aborted.
    """
    config, reporter, saving, anomalies, optimizer = run.config, run.reporter, run.saving, run.anomalies, run.optimizer
    if step >= config.last_step:
        if done := run.evaluate(step, position, last=True):
            return done
        saving.save(saving.decide(step, StepFlags()), position, anomalies.skipped, anomalies.trend)
        return Done(Outcome.COMPLETE, step)
    while True:
        # Evaluate the previous step, if the previous round ended before its evaluation.
        if done := run.evaluate(step, position):
            return done

        reporter.enter(WorkerPhase.LOADING_DATA, step)
        microbatches = run.batches.next(reporter.stalled)

        reporter.enter(WorkerPhase.COMPUTING, step)
        run.digests.begin(step)
        losses = run.engine.forward_backward(microbatches)

        # All ranks get the same result before the weights are changed.
        reporter.enter(WorkerPhase.REDUCING, step)
        result = agree(
            run.world, run.sums, losses, optimizer.counted_gradients(), saving.local_flags(),
            run.digests.payload(step, run.world.device), run.balance.payload(run.world.device),
            run.loads.payload(run.world.device),
        )  # fmt: skip
        check()
        run.digests.check(step, result.digests, anomalies.skipped)
        if why := anomalies.skips(step, position, result):
            optimizer.drop_gradients()
            reporter.note(why)
            continue
        reporter.note(run.balance.decide(result.work))

        rate = learning_rate(step, config.steps, config.optimizer)
        saving.before_change()
        with run.world.times.measured(StepPart.OPTIMIZER):
            optimizer.update(rate, clip_scale(result.squared_norm, config.optimizer.max_grad_norm))
            run.loads.update(result.loads)
        step, position = step + 1, position + config.global_batch_size

        decision = saving.decide(step, result.flags)
        reporter.step(
            StepInfo(
                step, position, run.batches.tokens, result.loss, math.sqrt(max(0.0, result.squared_norm)), rate,
                saving.snapshot_step, saving.seconds, run.batches.stalled_seconds, anomalies.skipped,
                run.balance.reported, saving.reported_interval, saving.reported_snapshots,
                run.loads.busiest(result.loads),
            )
        )  # fmt: skip
        collection.after(step)
        saving.traces.after(step)
        run.balance.worked(microbatches, reporter.heartbeat.busy)

        if step == config.last_step and (done := run.evaluate(step, position, last=True)):
            return done
        reporter.enter(WorkerPhase.CHECKPOINTING, step)
        saving.save(decision, position, anomalies.skipped, anomalies.trend)
        if decision.outcome is not None:
            return Done(decision.outcome, step)
        run.digests.rest(step)


def clip_scale(squared_norm: float, limit: float) -> float:
    """Return the factor that limits the norm of the gradients to `limit`; 0 means no limit."""
    norm = math.sqrt(squared_norm)
    return min(1.0, limit / norm) if limit and norm else 1.0
