"""Accelerate: a `State` of all that an Accelerator has prepared.

Example::

    import trainingjob.accelerate

    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    state = trainingjob.accelerate.register(accelerator)
    step = state.restore(default=0)
    for batch in state.batches(loader):
        ...
        state.commit(step)
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import accelerate

from trainingjob._objects import RandomNumbers
from trainingjob._order import order_of
from trainingjob._refusals import check_not_in_run
from trainingjob._state import State

__all__ = ["PreparedState", "register"]


def register(
    accelerator: accelerate.Accelerator, *, folder: str = "checkpoints", overhead: float = 0.01, **objects: Any
) -> PreparedState:
    """Return a `State` of all objects that an Accelerator has prepared or registered for checkpointing.

    Args:
        accelerator: The Accelerator. Call this function after `prepare` and `register_for_checkpointing`.
        folder: Folder for snapshots outside of a job.
        overhead: Share of the training time that snapshots may take.
        **objects: Further objects to save, by name.

    Returns:
        A `trainingjob.State`, whose method `batches` accepts the prepared loaders.

    Raises:
        concertina_state.errors.InvalidInput: See `trainingjob.State`.
    """
    check_not_in_run("Accelerate")
    return PreparedState(accelerator, folder, overhead, objects)


class PreparedState(State):
    """A `trainingjob.State` of the objects that an Accelerator has prepared. See `register`."""

    def __init__(self, accelerator: accelerate.Accelerator, folder: str, overhead: float, objects: dict[str, Any]):
        objects_by_kind = {
            "model": accelerator._models,
            "optimizer": [wrapper.optimizer for wrapper in accelerator._optimizers],
            "scheduler": accelerator._schedulers,
            "object": accelerator._custom_objects,
            "scaler": [] if accelerator.scaler is None else [accelerator.scaler],
        }
        named = {
            f"{kind}{number}": prepared
            for kind, prepared_objects in objects_by_kind.items()
            for number, prepared in enumerate(prepared_objects)
        }
        self._prepared = [PreparedLoader(accelerator, loader) for loader in accelerator._dataloaders]
        loaders = {f"loader{number}": loader for number, loader in enumerate(self._prepared)}
        super().__init__(
            folder=folder,
            overhead=overhead,
            **{**named, **loaders, "accumulation": Accumulation(accelerator), **objects},
        )

    def restore(self, default: int = 0) -> int:
        """Restore all objects. See `trainingjob.State.restore`."""
        step = super().restore(default)
        for loader in self._prepared:
            loader.random = RandomNumbers().state_dict()
        return step

    def batches(self, loader: Any) -> Iterator[Any]:
        """Return an iterator over one pass of a prepared loader. After a restore, it covers the rest of the saved pass.

        Args:
            loader: A loader that the Accelerator has prepared.
        """
        return next(prepared for prepared in self._prepared if prepared.loader is loader).batches()


class PreparedLoader:
    """Data loader that an Accelerator has prepared, with its position in the pass over the data.

    The position counts the items that all ranks together have consumed, so it stays valid when the number of ranks
    changes.
    """

    def __init__(self, accelerator: accelerate.Accelerator, loader: Any) -> None:
        self._accelerator, self.loader, self._order = accelerator, loader, order_of(loader)
        self._items = 0
        """Items of this pass that were delivered."""
        self._restored_items = 0
        """Number of items of the saved pass that had been delivered; it is used when that pass continues."""
        self.random: dict[str, Any] | None = None
        """Random numbers to restore once the first batch has been fetched."""

    def batches(self) -> Iterator[Any]:
        """Yield the batches of one pass of the loader, and count their items."""
        loader, size = self.loader, self.loader.total_batch_size
        restored_items, self._restored_items = self._restored_items, 0
        skipped_batches = restored_items // size
        if restored_items:
            loader = self._accelerator.skip_first_batches(loader, skipped_batches)
        self._items = skipped_batches * size
        for batch in loader:
            self._restore_random_numbers()
            self._items += size
            yield batch
        self._restore_random_numbers()
        self._items = 0
        if loader is not self.loader:
            self.loader.iteration += 1  # the loader that skipped has counted its own

    def _restore_random_numbers(self) -> None:
        """Set the saved states of the random number generators, after the first batch of a resumed pass.

        In the saved run, that batch had been fetched before the save. The random numbers that this second fetch draws
        must therefore have no effect.
        """
        if self.random is not None:
            RandomNumbers().load_state_dict(self.random)
            self.random = None

    def state_dict(self) -> dict[str, Any]:
        began = None if self._order is None else self._order.began
        return {"items": self._items, "pass": self.loader.iteration, "began": began}

    def load_state_dict(self, values: dict[str, Any]) -> None:
        self._items = self._restored_items = values["items"]
        self.loader.iteration = values["pass"]
        if self._order is not None and values["began"] is not None and self._items:
            self._order.resume(values["began"], 0)


class Accumulation:
    """Number of batches that `Accelerator.accumulate` has counted."""

    def __init__(self, accelerator: accelerate.Accelerator) -> None:
        self._accelerator = accelerator

    def state_dict(self) -> dict[str, int]:
        return {"step": self._accelerator.step}

    def load_state_dict(self, values: dict[str, int]) -> None:
        self._accelerator.step = values["step"]
