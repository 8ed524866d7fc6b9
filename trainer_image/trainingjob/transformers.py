"""The Hugging Face Trainer: its training with a state that survives failures.

Example::

    import trainingjob.transformers

    trainer = Trainer(model=model, args=arguments, train_dataset=dataset)
    trainingjob.transformers.train(trainer)  # instead of trainer.train()
"""

from __future__ import annotations

import dataclasses
import json
import tempfile
from pathlib import Path
from typing import Any

from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import TrainOutput

import trainingjob
from trainingjob._refusals import check_not_in_run
from trainingjob._state import State
from trainingjob._steps import StepCommitter

__all__ = ["train"]


def train(trainer: Trainer, *, folder: str = "checkpoints", overhead: float = 0.01) -> TrainOutput:
    """Train from the newest saved step, or from the beginning if nothing was saved.

    The model, the optimizer, the scheduler, the scaler, `trainer.state` and the random numbers are saved by
    `trainingjob.State`. To skip batches that were trained before, the Trainer resumes from a temporary folder that
    holds only `trainer_state.json`. All other state is restored after the Trainer has prepared its objects.

    Args:
        trainer: The Trainer, or an object of a class derived from it.
        folder: Folder for snapshots outside of a job.
        overhead: Share of the training time that snapshots may take.

    Returns:
        The result of `trainer.train()`. If no step was left to train, its loss is 0.0 and its metrics are empty.

    Raises:
        concertina_state.errors.InvalidInput: See `trainingjob.State`.
    """
    check_not_in_run("The Hugging Face Trainer")
    state = State(folder=folder, overhead=overhead)
    saved_progress = state.peek("progress")
    callback = StateCallback(trainer, state)
    trainer.add_callback(callback)
    try:
        if saved_progress is None:
            return trainer.train()
        trainer._load_from_checkpoint = lambda *_, **__: None
        with tempfile.TemporaryDirectory() as checkpoint:
            Path(checkpoint, TRAINER_STATE_NAME).write_text(json.dumps(saved_progress))
            return trainer.train(resume_from_checkpoint=checkpoint)
    except NothingLeft:
        trainer.is_in_train = False
        return TrainOutput(trainer.state.global_step, 0.0, {})
    finally:
        trainer.remove_callback(callback)
        trainer.__dict__.pop("_load_from_checkpoint", None)


class NothingLeft(Exception):
    """Exception: all steps were already trained before the restart.

    The exception stops the Trainer, which would otherwise train one more step.
    """


class StateCallback(TrainerCallback):
    """Callback that restores a `State` when training begins, commits each step, and reports the progress."""

    def __init__(self, trainer: Trainer, state: State) -> None:
        self._trainer, self._state, self._steps = trainer, state, StepCommitter(state)
        self._loss: float | None = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        trainer, scaler = self._trainer, self._trainer.accelerator.scaler
        self._state.add(
            model=trainer.model_wrapped,
            optimizer=getattr(trainer.optimizer, "optimizer", trainer.optimizer),
            scheduler=trainer.lr_scheduler,
            progress=TrainerProgress(trainer),
            **({} if scaler is None else {"scaler": scaler}),
        )
        self._steps.restore()
        if self._steps.committed >= state.max_steps:
            raise NothingLeft

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._steps.begin_step(state.global_step)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._report(state, "training")

    def on_prediction_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._report(state, "evaluating")

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        self._loss = (logs or {}).get("loss", self._loss)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._steps.commit(state.global_step, durable=True)

    def _report(self, state: TrainerState, phase: str) -> None:
        loss = None if self._loss is None else float(self._loss)
        trainingjob.report(step=state.global_step, steps=state.max_steps, loss=loss, phase=phase)


class TrainerProgress:
    """Progress of the Trainer: `trainer.state` with the states of callbacks, as in its own checkpoints."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer

    def state_dict(self) -> dict[str, Any]:
        objects = [*self._trainer.callback_handler.callbacks, self._trainer.control]
        exportable = [stateful for stateful in objects if isinstance(stateful, ExportableState)]
        callbacks = TrainerState(stateful_callbacks=exportable).stateful_callbacks
        state = dataclasses.replace(self._trainer.state, stateful_callbacks=callbacks)
        return dataclasses.asdict(state)

    def load_state_dict(self, values: dict[str, Any]) -> None:
        """Do nothing, because the Trainer has already read these values from the temporary folder."""
