"""Lightning: the state and the progress of a fit, by a callback.

Example::

    import trainingjob.lightning

    trainer = lightning.Trainer(..., callbacks=[trainingjob.lightning.Callback()])
    trainer.fit(model, loader)
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import trainingjob
from trainingjob._lightning_loops import LightningLoops
from trainingjob._refusals import check_not_in_run
from trainingjob._state import State
from trainingjob._steps import StepCommitter

if TYPE_CHECKING or "pytorch_lightning" not in sys.modules or "lightning" in sys.modules:
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch import callbacks as base
else:
    from pytorch_lightning import callbacks as base

__all__ = ["Callback"]


class Callback(base.Callback):
    """Lightning callback that saves and restores a fit by `trainingjob.State`, and reports its progress.

    The callback saves the model, the optimizers, the schedulers, the scaler, the positions of the loops and loaders,
    other callbacks, the data module and the random numbers. Pass the callback to the Trainer, and call `trainer.fit` as
    usual.

    Args:
        folder: Folder for snapshots outside of a job.
        overhead: Share of the training time that snapshots may take.
    """

    def __init__(self, *, folder: str = "checkpoints", overhead: float = 0.01) -> None:
        self._folder, self._overhead = folder, overhead
        self._loss: float | None = None

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        check_not_in_run("Lightning")
        others = {callback.state_key: callback for callback in trainer.callbacks if callback is not self}
        data = {} if trainer.datamodule is None else {"data": trainer.datamodule}
        self._loops = LightningLoops(trainer)
        state = State(
            folder=self._folder,
            overhead=self._overhead,
            model=trainer.strategy.model,
            **{f"optimizer{number}": optimizer for number, optimizer in enumerate(trainer.optimizers)},
            **{f"scheduler{number}": config.scheduler for number, config in enumerate(trainer.lr_scheduler_configs)},
            others=StatefulGroup({"precision": trainer.precision_plugin, **data, **others}),
            loops=self._loops,
        )
        self._steps = StepCommitter(state)
        self._steps.restore()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._loops.resume()

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._loops.follow_order()

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._steps.begin_step(trainer.global_step)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._loops.record_position()
        if trainer.global_step % trainer.log_every_n_steps == 0 and isinstance(outputs, dict) and "loss" in outputs:
            self._loss = float(outputs["loss"])
        self._report(trainer, "training")

    def on_validation_batch_end(self, trainer: Trainer, *_: Any, **__: Any) -> None:
        self._report(trainer, "evaluating")

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._loops.end()
        self._steps.commit(trainer.global_step, durable=True)

    def _report(self, trainer: Trainer, phase: str) -> None:
        steps = max(trainer.max_steps, 0)
        trainingjob.report(step=trainer.global_step, steps=steps, loss=self._loss, phase=phase)


class StatefulGroup:
    """Group of objects with `state_dict`, saved together under their names. An object may have an empty state."""

    def __init__(self, objects: dict[str, Any]) -> None:
        self._objects = objects

    def state_dict(self) -> dict[str, Any]:
        return {name: state for name, stateful in self._objects.items() if (state := stateful.state_dict())}

    def load_state_dict(self, values: dict[str, Any]) -> None:
        for name in values.keys() & self._objects.keys():
            self._objects[name].load_state_dict(values[name])
