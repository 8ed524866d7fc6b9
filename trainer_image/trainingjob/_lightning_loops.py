"""Positions of Lightning's training loops in a fit, and of its data loaders in their data."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

from concertina_state.errors import InvalidInput
from trainingjob._order import StatefulSampler, order_of
from trainingjob._world import world

if TYPE_CHECKING:
    from lightning.pytorch import Trainer


class LightningLoops:
    """Position of Lightning's training loop and data loaders within a fit.

    After a restart, Lightning continues its count of batches, but its data loaders begin at their first item. This
    class makes the loaders continue at their saved position. The position in an epoch is counted in items of all ranks,
    so it stays valid when the number of ranks changes.

    The position is saved between two batches: the next batch has been fetched, but its training has not begun.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._fit = trainer.fit_loop
        self._saved_positions: list[dict[str, Any]] | None = None
        """Positions of loaders, from `load_state_dict` until the loaders exist."""
        self._loader_states: deque[list[Any]] = deque()
        """States of loaders that have `state_dict`. The first is the state after the last trained batch."""
        self._epoch_ends = False

    # --- the saved state --------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        loops = self._fit.state_dict()
        batches, epochs = loops["epoch_loop.batch_progress"], loops["epoch_progress"]
        batches["is_last_batch"] = False
        for counts in (batches["total"], batches["current"]):
            counts["ready"] = counts["started"] = counts["processed"] = counts["completed"]
        if self._epoch_ends:
            batches["current"] = dict.fromkeys(batches["current"], 0)
        else:  # also if max_steps has ended training in the middle of the epoch
            for counts in (epochs["total"], epochs["current"]):
                counts["started"] = counts["ready"]
                counts["processed"] = counts["completed"] = counts["ready"] - 1
        if self._loader_states:
            loops["state_dict"]["combined_loader"] = self._loader_states[0]
        return {"loops": loops, "loaders": [] if self._epoch_ends else [_position(loader) for loader in self._loaders]}

    def load_state_dict(self, values: dict[str, Any]) -> None:
        self._saved_positions = values["loaders"]
        self._fit.load_state_dict(values["loops"])

    def end(self) -> None:
        """Record that the fit has ended, so no further batch follows."""
        self._epoch_ends = self._fit.epoch_loop._num_ready_batches_reached()

    # --- the loaders ------------------------------------------------------------------------------------------------

    @property
    def _loaders(self) -> list[Any]:
        combined = self._fit._combined_loader
        return [] if combined is None else list(combined.flattened)

    @property
    def _are_stateful(self) -> bool:
        """True if a data loader saves its own position. Lightning saves and restores such loaders itself."""
        return any(hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict") for loader in self._loaders)

    def record_position(self) -> None:
        """Record the positions of the loaders after a batch, because further batches may already have been fetched."""
        if not self._are_stateful:
            return
        self._loader_states.append(self._fit._combined_loader._state_dicts())
        ahead = len(getattr(self._fit._data_fetcher, "batches", ()))
        while len(self._loader_states) > 1 + ahead:
            self._loader_states.popleft()

    def follow_order(self) -> None:
        """Begin to record the order in which the loaders deliver items, from the first item of this epoch."""
        if self._are_stateful:
            return
        new = [order_of(loader) for loader in self._loaders if not isinstance(_sampler(loader), StatefulSampler)]
        if any(new):
            iter(self._fit._data_fetcher)

    def resume(self) -> None:
        """Make the loaders continue after the batches of this epoch that were trained before the restart.

        Raises:
            InvalidInput: The saved state has positions of more or fewer loaders.
        """
        saved, self._saved_positions = self._saved_positions, None
        if self._are_stateful:
            self.record_position()
            return
        if not saved:
            self.follow_order()
            return
        if len(saved) != len(self._loaders):
            raise InvalidInput(
                f"the state was saved with {len(saved)} data loaders, and this run has "
                f"{len(self._loaders)}: give Lightning the same number."
            )
        fetcher, counts = self._fit._data_fetcher, self._fit.epoch_loop.batch_progress.current
        done, ranks, orders = counts.completed, world().size, [order_of(loader) for loader in self._loaders]
        all_known = all(order is not None and position["began"] for order, position in zip(orders, saved))
        loaders = zip(reversed(self._loaders), reversed(orders), reversed(saved))
        for loader, order, position in loaders:
            if order is None or position["began"] is None:
                continue
            items = done * position["batch"] % position["items"] // ranks if all_known else 0
            order.resume(position["began"], items)
            left = len(order) - items
            size = loader.batch_sampler.batch_size
            batches = len(loader) - (left // size if loader.batch_sampler.drop_last else -(-left // size))
            if all_known:
                counts.ready = counts.started = counts.processed = counts.completed = batches
        iter(fetcher)
        if not all_known:
            for _ in range(done):
                next(fetcher)
            fetcher.fetched -= done  # Lightning adds them


def _sampler(loader: Any) -> Any:
    return getattr(getattr(loader, "batch_sampler", None), "sampler", None)


def _position(loader: Any) -> dict[str, Any]:
    """Return the position of a data loader, to be saved with the state.

    The position contains the random state of the loader's order, the number of items in a batch, and the number of
    items that all ranks together consume in a pass.
    """
    order, ranks = order_of(loader), world().size
    if order is None:
        return {"began": None}
    return {"began": order.began, "batch": loader.batch_sampler.batch_size * ranks, "items": len(order) * ranks}
