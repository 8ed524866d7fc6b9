"""Where Lightning's loops are, and where its loaders are in their data."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

import trainingjob
from trainingjob._order import StatefulSampler, order_of

if TYPE_CHECKING:
    from lightning.pytorch import Trainer


class Loops:
    """Saved between two batches, when the next one has been fetched and is not begun.

    Lightning counts batches on after a restart, but begins its loaders at their first item: here they go on where they
    were. The place in an epoch is counted in items of all ranks, so it holds in a world of another size, too."""

    def __init__(self, trainer: Trainer) -> None:
        self._fit = trainer.fit_loop
        self._saved: list[dict[str, Any]] | None = None
        """Of loaders, from `load_state_dict` until these are there."""
        self._told: deque[list[Any]] = deque()
        """By loaders that tell their places themselves: the first is of the batch that was trained last."""
        self._epoch_ends = False

    # --- what is saved ----------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        loops = self._fit.state_dict()
        batches, epochs = loops["epoch_loop.batch_progress"], loops["epoch_progress"]
        batches["is_last_batch"] = False
        for counts in (batches["total"], batches["current"]):
            counts["ready"] = counts["started"] = counts["processed"] = counts["completed"]
        if self._epoch_ends:
            batches["current"] = dict.fromkeys(batches["current"], 0)
        else:  # also where max_steps has ended training in the middle of it
            for counts in (epochs["total"], epochs["current"]):
                counts["started"] = counts["ready"]
                counts["processed"] = counts["completed"] = counts["ready"] - 1
        if self._told:
            loops["state_dict"]["combined_loader"] = self._told[0]
        return {"loops": loops, "loaders": [] if self._epoch_ends else [_place(each) for each in self._loaders]}

    def load_state_dict(self, values: dict[str, Any]) -> None:
        self._saved = values["loaders"]
        self._fit.load_state_dict(values["loops"])

    def end(self) -> None:
        """No batch comes any more."""
        self._epoch_ends = self._fit.epoch_loop._num_ready_batches_reached()

    # --- the loaders ------------------------------------------------------------------------------------------------

    @property
    def _loaders(self) -> list[Any]:
        combined = self._fit._combined_loader
        return [] if combined is None else list(combined.flattened)

    @property
    def _tell(self) -> bool:
        """Lightning saves the places of these, and tells them."""
        return any(hasattr(each, "state_dict") and hasattr(each, "load_state_dict") for each in self._loaders)

    def fetched(self) -> None:
        """A batch was trained; others may have been fetched in advance."""
        if not self._tell:
            return
        self._told.append(self._fit._combined_loader._state_dicts())
        ahead = len(getattr(self._fit._data_fetcher, "batches", ()))
        while len(self._told) > 1 + ahead:
            self._told.popleft()

    def follow(self) -> None:
        """The order of these loaders is to be known, from their first item on."""
        if self._tell:
            return
        new = [order_of(each) for each in self._loaders if not isinstance(_sampler(each), StatefulSampler)]
        if any(new):
            iter(self._fit._data_fetcher)

    def go_on(self) -> None:
        """Behind the batches that were trained in this epoch."""
        saved, self._saved = self._saved, None
        if self._tell:
            return self.fetched()
        if not saved:
            return self.follow()
        fetcher, counts = self._fit._data_fetcher, self._fit.epoch_loop.batch_progress.current
        done, world, orders = counts.completed, trainingjob.world().size, [order_of(each) for each in self._loaders]
        known = all(order is not None and was["began"] for order, was in zip(orders, saved, strict=True))
        for loader, order, was in zip(reversed(self._loaders), reversed(orders), reversed(saved), strict=True):
            if order is None or was["began"] is None:
                continue
            items = done * was["batch"] % was["items"] // world if known else 0
            order.go_on(was["began"], items)
            left = len(order) - items
            size = loader.batch_sampler.batch_size
            batches = len(loader) - (left // size if loader.batch_sampler.drop_last else -(-left // size))
            if known:
                counts.ready = counts.started = counts.processed = counts.completed = batches
        iter(fetcher)
        if not known:
            for _ in range(done):
                next(fetcher)
            fetcher.fetched -= done  # Lightning adds them
        return None


def _sampler(loader: Any) -> Any:
    return getattr(getattr(loader, "batch_sampler", None), "sampler", None)


def _place(loader: Any) -> dict[str, Any]:
    """By what the order of its pass was drawn, and, of all ranks, items of a batch and of a pass."""
    order, world = order_of(loader), trainingjob.world().size
    if order is None:
        return {"began": None}
    return {"began": order.began, "batch": loader.batch_sampler.batch_size * world, "items": len(order) * world}
