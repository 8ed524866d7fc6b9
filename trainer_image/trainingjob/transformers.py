"""The Hugging Face Trainer: `trainingjob.transformers.train(trainer)` instead of `trainer.train()`."""

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
from trainingjob._state import State
from trainingjob._steps import Steps

__all__ = ["train"]


def train(trainer: Trainer, *, folder: str = "checkpoints", overhead: float = 0.01) -> TrainOutput:
    """Goes on from the newest saved step, and keeps model, optimizer, scheduler, scaler, `trainer.state` and random
    numbers as `trainingjob.State` does.

    The trainer itself skips what was trained: it is given a folder of its own kind that holds `trainer_state.json`
    alone, and the rest is filled when it has prepared it."""
    state = State(folder=folder, overhead=overhead)
    saved = state.peek("progress")
    keeping = StateCallback(trainer, state)
    trainer.add_callback(keeping)
    try:
        if saved is None:
            return trainer.train()
        trainer._load_from_checkpoint = lambda *_, **__: None
        with tempfile.TemporaryDirectory() as place:
            Path(place, TRAINER_STATE_NAME).write_text(json.dumps(saved))
            return trainer.train(resume_from_checkpoint=place)
    except Finished:
        trainer.is_in_train = False
        return TrainOutput(trainer.state.global_step, 0.0, {})
    finally:
        trainer.remove_callback(keeping)
        trainer.__dict__.pop("_load_from_checkpoint", None)


class Finished(Exception):
    """There is no step left: the trainer would train one more."""


class StateCallback(TrainerCallback):
    def __init__(self, trainer: Trainer, state: State) -> None:
        self._trainer, self._state, self._steps = trainer, state, Steps(state)
        self._loss: float | None = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        trainer, scaler = self._trainer, self._trainer.accelerator.scaler
        self._state.add(
            model=trainer.model_wrapped,
            optimizer=getattr(trainer.optimizer, "optimizer", trainer.optimizer),
            scheduler=trainer.lr_scheduler,
            progress=Progress(trainer),
            **({} if scaler is None else {"scaler": scaler}),
        )
        self._steps.restore()
        if self._steps.done >= state.max_steps:
            raise Finished

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._steps.begin(state.global_step)

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


class Progress:
    """`trainer.state`, with the states of callbacks and of control, as the trainer's own checkpoints have it."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer

    def state_dict(self) -> dict[str, Any]:
        have = [*self._trainer.callback_handler.callbacks, self._trainer.control]
        callbacks = TrainerState(stateful_callbacks=[each for each in have if isinstance(each, ExportableState)])
        state = dataclasses.replace(self._trainer.state, stateful_callbacks=callbacks.stateful_callbacks)
        return dataclasses.asdict(state)

    def load_state_dict(self, values: dict[str, Any]) -> None:
        """The trainer has read it already."""
