"""Accelerate: `state = trainingjob.accelerate.register(accelerator)` after `prepare`, and loops over
`state.batches(loader)`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import accelerate

from trainingjob._objects import RandomNumbers
from trainingjob._order import order_of
from trainingjob._state import State

__all__ = ["Prepared", "register"]


def register(
    accelerator: accelerate.Accelerator, *, folder: str = "checkpoints", overhead: float = 0.01, **objects: Any
) -> Prepared:
    """A state of all that is prepared and of all that stands in `register_for_checkpointing`, and of `objects`."""
    return Prepared(accelerator, folder, overhead, objects)


class Prepared(State):
    def __init__(self, accelerator: accelerate.Accelerator, folder: str, overhead: float, objects: dict[str, Any]):
        optimizers = [each.optimizer for each in accelerator._optimizers]
        kinds = {
            "model": accelerator._models,
            "optimizer": optimizers,
            "scheduler": accelerator._schedulers,
            "object": accelerator._custom_objects,
            "scaler": [] if accelerator.scaler is None else [accelerator.scaler],
        }
        named = {f"{kind}{number}": each for kind, found in kinds.items() for number, each in enumerate(found)}
        self._prepared = [Loader(accelerator, each) for each in accelerator._dataloaders]
        loaders = {f"loader{number}": each for number, each in enumerate(self._prepared)}
        super().__init__(
            folder=folder,
            overhead=overhead,
            **{**named, **loaders, "accumulation": Accumulation(accelerator), **objects},
        )

    def restore(self, default: int = 0) -> int:
        """See `trainingjob.State`."""
        step = super().restore(default)
        for loader in self._prepared:
            loader.random = RandomNumbers().state_dict()
        return step

    def batches(self, loader: Any) -> Iterator[Any]:
        """One pass over a prepared loader: first the rest of the one in which the state was saved."""
        return next(each for each in self._prepared if each.loader is loader).batches()


class Loader:
    """A prepared loader, and where it is in its pass: in items of all ranks, so that it holds in any world."""

    def __init__(self, accelerator: accelerate.Accelerator, loader: Any) -> None:
        self._accelerator, self.loader, self._order = accelerator, loader, order_of(loader)
        self._items = 0
        """Of this pass, that were given out."""
        self._restored = 0
        """Of those, in the pass that was saved, until it goes on."""
        self.random: dict[str, Any] | None = None

    def batches(self) -> Iterator[Any]:
        loader, size = self.loader, self.loader.total_batch_size
        restored, self._restored = self._restored, 0
        skipped = restored // size
        if restored:
            loader = self._accelerator.skip_first_batches(loader, skipped)
        self._items = skipped * size
        for batch in loader:
            self._put_back_random()
            self._items += size
            yield batch
        self._put_back_random()
        self._items = 0
        if loader is not self.loader:
            self.loader.iteration += 1  # the one that skipped counted for itself

    def _put_back_random(self) -> None:
        """Fetching has drawn, as it had before the step was saved."""
        if self.random is not None:
            RandomNumbers().load_state_dict(self.random)
            self.random = None

    def state_dict(self) -> dict[str, Any]:
        began = None if self._order is None else self._order.began
        return {"items": self._items, "pass": self.loader.iteration, "began": began}

    def load_state_dict(self, values: dict[str, Any]) -> None:
        self._items = self._restored = values["items"]
        self.loader.iteration = values["pass"]
        if self._order is not None and values["began"] is not None and self._items:
            self._order.go_on(values["began"], 0)


class Accumulation:
    """How many batches are behind the accelerator, as `accumulate` counts them."""

    def __init__(self, accelerator: accelerate.Accelerator) -> None:
        self._accelerator = accelerator

    def state_dict(self) -> dict[str, int]:
        return {"step": self._accelerator.step}

    def load_state_dict(self, values: dict[str, int]) -> None:
        self._accelerator.step = values["step"]
