"""The training loop."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Sequence

from concertina_protocol import StepPart
from concertina_protocol.heartbeat import WorkerPhase
from concertina_protocol.worker_channel import Done, Outcome
from concertina_state.saving import SaveDecision, Saving
from concertina_trainer.config.trainer import TrainerConfig
from concertina_trainer.data.read.batches import Batches, Microbatch
from concertina_trainer.model.optimizer import LocalOptimizer, learning_rate
from concertina_trainer.parallel.group import DistContext, of_first_rank
from concertina_trainer.parallel.summing import Sums
from concertina_trainer.training import collection
from concertina_trainer.training.agreement import StepResult, agree
from concertina_trainer.training.anomalies import Anomalies
from concertina_trainer.training.balance import Balance
from concertina_trainer.training.digests import Digests
from concertina_trainer.training.engine import Engine
from concertina_trainer.training.evaluation import Evaluation
from concertina_trainer.training.expert_loads import ExpertLoads
from concertina_trainer.training.loss_scaling import LossScaling
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
    scaling: LossScaling
    evaluation: Evaluation | None = None
    keeps_best: bool = False
    """True to make a checkpoint after each evaluation with a new lowest loss (`checkpoint.keepBest`)."""

    def begin(self, step: int, position: int) -> Done | None:
        """Evaluate the restored step, if the previous round ended before the evaluation. Return Done if the run ends.

        A run that has finished all steps, or has stopped early, ends with one more checkpoint of the restored step.
        """
        last = step >= self.config.last_step
        evaluated_before = self.evaluation is not None and self.evaluation.history.step == step
        if not self._evaluate(step, last):
            return self._drained(step, position)
        # A checkpoint of this step that was made before its evaluation does not say that it is the best. Otherwise
        # rank 0 decides whether there is a checkpoint, because the ranks' agents may know of different ones.
        stored = evaluated_before and self.keeps_best and of_first_rank(self.world, self.saving.durable_step >= step)
        decision = self._amended(SaveDecision(step, snapshot=False, durable=False, outcome=None), last, stored)
        return self._save(decision, position) if decision.snapshot else None

    def end_step(self, decision: SaveDecision, position: int) -> Done | None:
        """Evaluate the step if an evaluation is due, and save it as `decision` says. Return Done if the round ends.

        In a drain, all ranks stop after the same step. If a drain interrupts the evaluation, this round ends with the
        step, and the next round evaluates it again.
        """
        if decision.outcome is not Outcome.DRAINED:
            if not self._evaluate(decision.step, decision.outcome is Outcome.COMPLETE):
                return self._drained(decision.step, position)
            decision = self._amended(decision, decision.outcome is Outcome.COMPLETE)
        return self._save(decision, position)

    def _evaluate(self, step: int, last: bool) -> bool:
        """Evaluate `step` if an evaluation is due. Return False if a drain has interrupted the evaluation.

        In a drain, all ranks stop after the same step.
        """
        if self.evaluation is None:
            return True
        averaged = self.config.evaluation is not None and self.config.evaluation.ema
        with self.optimizer.averaged() if averaged else contextlib.nullcontext():
            return self.evaluation.after(step, last)

    def _amended(self, decision: SaveDecision, last: bool, stored: bool = False) -> SaveDecision:
        """Return the decision, changed according to the evaluations so far.

        `stored` says whether storage is known to contain a checkpoint of this step with its evaluation.
        """
        stop_reason, best = "", False
        if self.evaluation is not None:
            stop_reason = "" if last else self.evaluation.stop_reason
            best = self.keeps_best and not stored and self.evaluation.is_best(decision.step)
        self.reporter.note(stop_reason)
        uploading = self.saving.uploading_best
        if best and uploading is not None and not decision.durable:
            self.reporter.note(
                f"step {decision.step} has the lowest evaluation loss so far, but gets no checkpoint: that of step "
                f"{uploading}, the best before, is still being uploaded"
            )
            best = False
        return self.saving.amended(decision, complete=last or bool(stop_reason), best=best)

    def _save(self, decision: SaveDecision, position: int) -> Done | None:
        self.reporter.enter(WorkerPhase.CHECKPOINTING, decision.step)
        self.saving.save(decision, position, self.anomalies.skipped, self.anomalies.trend, self.scaling.state)
        return None if decision.outcome is None else Done(decision.outcome, decision.step)

    def _drained(self, step: int, position: int) -> Done:
        self.reporter.enter(WorkerPhase.CHECKPOINTING, step)
        self.saving.stop_at(step, position, self.anomalies.skipped, self.anomalies.trend, self.scaling.state)
        return Done(Outcome.DRAINED, step)


def train(run: TrainingRun, step: int, position: int, check: Callable[[], None] = lambda: None) -> Done:
    """Train until the run is complete, or until a drain (a request to save and stop) ends the round.

    Training begins after `step` finished steps and `position` consumed samples. `check` is a function that raises an
    error if the round is over. `train` calls `check` after the all-reduce of each step, and after an update in which
    ranks communicate, because collectives on a GPU return invalid results after they were aborted.

    In a drain, all ranks stop after the same step.
    """
    config, reporter, saving, anomalies, optimizer = run.config, run.reporter, run.saving, run.anomalies, run.optimizer
    scaling = run.scaling
    if done := run.begin(step, position):
        return done
    while True:
        reporter.enter(WorkerPhase.LOADING_DATA, step)
        microbatches = run.batches.next(reporter.stalled)

        result = computed(run, step, microbatches, check)
        while scaling.lowered(result):
            optimizer.drop_gradients()
            what = "a gradient" if math.isfinite(result.loss) else "the loss"
            reporter.note(f"step {step + 1} is computed again with loss scale {scaling.scale:g}: {what} overflowed")
            # The first computation has the ranks' work since the last step.
            result = dataclasses.replace(computed(run, step, microbatches, check), work=result.work)
        if why := anomalies.skips(step, position, result):
            optimizer.drop_gradients()
            scaling.skipped()
            reporter.note(why)
            continue
        reporter.note(run.balance.decide(result.work))

        rate = learning_rate(step, config.steps, config.optimizer)
        saving.before_change()
        with run.world.times.measured(StepPart.OPTIMIZER):
            optimizer.update(rate, clip_scale(result.squared_norm, config.optimizer.max_grad_norm) / scaling.scale)
            run.loads.update(result.loads)
        if optimizer.communicates:
            optimizer.finish()
            check()  # before the weights are saved
        metrics = scaling.metrics
        scaling.stepped()
        step, position = step + 1, position + config.global_batch_size

        decision = saving.decide(step, result.flags)
        reporter.step(
            StepInfo(
                step, position, run.batches.tokens, result.loss, math.sqrt(max(0.0, result.squared_norm)), rate,
                saving.snapshot_step, saving.seconds, run.batches.stalled_seconds, anomalies.skipped,
                run.balance.reported, saving.reported_interval, saving.reported_snapshots,
                run.loads.busiest(result.loads), metrics,
            )
        )  # fmt: skip
        collection.after(step)
        saving.traces.after(step)
        run.balance.worked(microbatches, reporter.heartbeat.busy)

        if done := run.end_step(decision, position):
            return done
        run.digests.rest(step)


def computed(run: TrainingRun, step: int, microbatches: Sequence[Microbatch], check: Callable[[], None]) -> StepResult:
    """Compute the gradients of the step after `step` finished steps. Return the result, the same on all ranks."""
    run.reporter.enter(WorkerPhase.COMPUTING, step)
    run.digests.begin(step)
    losses = run.scaling.unscaled(run.engine.forward_backward(run.scaling.scaled(microbatches)))

    # All ranks get the same result before the weights are changed.
    run.reporter.enter(WorkerPhase.REDUCING, step)
    device = run.world.device
    result = agree(
        run.world, run.sums, losses, run.optimizer.counted_gradients(), run.saving.local_flags(),
        run.digests.payload(step, device), run.balance.payload(device), run.loads.payload(device),
    )  # fmt: skip
    check()
    run.digests.check(step, result.digests, run.anomalies.skipped)
    return run.scaling.result(result)


def clip_scale(squared_norm: float, limit: float) -> float:
    """Return the factor that limits the norm of the gradients to `limit`; 0 means no limit."""
    norm = math.sqrt(squared_norm)
    return min(1.0, limit / norm) if limit and norm else 1.0
