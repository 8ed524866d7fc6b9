"""Positions of a script's data loaders in their passes over the data, for `State.batches(loader)`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from concertina_protocol.stderr import write_line
from concertina_state.errors import InvalidInput
from trainingjob._objects import RandomNumbers
from trainingjob._order import order_of
from trainingjob._refusals import NotSavable


class Loaders:
    """Data loaders that a script has passed to `State.batches`, in the order of their first use."""

    def __init__(self) -> None:
        self._positions: list[LoaderPosition] = []
        self._saved: list[Mapping[str, Any]] = []
        """Saved positions, keyed by the number of the loader."""
        self._random: Mapping[str, Any] | None = None
        """Random numbers as they were saved."""

    def batches(self, loader: Any) -> Iterator[Any]:
        """Return an iterator over the next pass of a loader.

        After a restore, the first iterator covers the remaining part of the saved pass.

        Raises:
            NotSavable: The loader's order can't be followed.
            InvalidInput: The loader's data, or the epoch of its sampler, differ from the saved ones.
        """
        position = next((position for position in self._positions if position.loader is loader), None)
        if position is None:
            number = len(self._positions)
            position = LoaderPosition(loader, number)
            if number < len(self._saved):
                position.load_state_dict(self._saved[number], self._random)
            self._positions.append(position)
        return position.batches()

    def state_dict(self) -> dict[str, Any]:
        positions = [position.state_dict() for position in self._positions]
        return {"passes": positions + self._saved[len(positions) :]}

    def load_state_dict(self, values: Mapping[str, Any]) -> None:
        if self._positions:
            raise InvalidInput(
                "State.restore() must be called before the first State.batches(): correct the order in the script."
            )
        self._saved = list(values["passes"])

    def remember_random_numbers(self) -> None:
        """Store the restored states of the random number generators, to set them again later.

        Resuming a pass over the data draws additional random numbers, so the restored states have to be set once more.
        """
        self._random = RandomNumbers().state_dict() if self._saved else None


class LoaderPosition:
    """Position of one loader in its current pass, counted in items that all ranks together have consumed."""

    def __init__(self, loader: Any, number: int) -> None:
        order = order_of(loader)
        if order is None:
            raise NotSavable(
                f"State.batches() was given a {type(loader).__qualname__} whose order is not known. It "
                "needs a DataLoader with a sampler and a batch size. For an IterableDataset, use a "
                "torchdata.StatefulDataLoader with State(loader=...)."
            )
        self.loader, self._order, self._number = loader, order, number
        self._items = self._restored_items = 0
        self._random: Mapping[str, Any] | None = None
        """Random numbers to restore once the first batch of a continued pass has been fetched."""

    def batches(self) -> Iterator[Any]:
        """Yield the batches of one pass of the loader, and count them."""
        ranks = self._rank_count()
        begin, self._restored_items = self._restored_items // ranks * ranks, 0
        if begin and self._is_over(begin // ranks) and self._counts_next_epoch():
            begin, self._random = 0, None
        if begin:
            self._check_epoch()
        else:
            self._order.draw_anew()
        self._items, batch_size = begin, self.loader.batch_sampler.batch_size
        try:
            for batch in self.loader:
                self._restore_random_numbers()
                self._items += batch_size * ranks
                yield batch
            self._restore_random_numbers()
        finally:
            self._items = 0  # also after `break`: the next pass is another one

    def _rank_count(self) -> int:
        """Return the number of ranks that share the items of one pass."""
        return int(getattr(self._order, "num_replicas", 1))

    def _is_over(self, consumed: int) -> bool:
        """Return whether a pass has no further batch after each rank has consumed `consumed` items."""
        batches, left = self.loader.batch_sampler, len(self._order) - consumed
        return bool(left < (batches.batch_size if batches.drop_last else 1))

    def _counts_next_epoch(self) -> bool:
        """Return whether the sampler's epoch is already the one after the saved pass.

        This happens if the script counts an epoch before its last commit, or computes the epoch from the step.
        """
        saved, now = self._epochs()
        return saved is not None and now == saved + 1

    def _epochs(self) -> tuple[int | None, int | None]:
        """Return the epoch of the saved pass and the sampler's present epoch.

        Both are None if the sampler has no epochs.
        """
        began = self._order.next_began
        saved = None if began is None else began["seeds"].get("epoch")
        return saved, getattr(self._order, "epoch", saved)

    def _check_epoch(self) -> None:
        """Raise an error if the sampler's epoch differs from the epoch of the saved pass.

        Raises:
            InvalidInput: The epochs differ. Later epochs would repeat data, because the script computes them from
                its own count.
        """
        saved, now = self._epochs()
        if saved is not None and now != saved:
            raise InvalidInput(
                f"the sampler of loader {self._number} is at epoch {now}, and the saved state at epoch "
                f"{saved}: start the loop over epochs at {saved}. To know the epoch, save it in the state "
                "or compute it from the step."
            )

    def _restore_random_numbers(self) -> None:
        if self._random is not None:
            RandomNumbers().load_state_dict(self._random)
            self._random = None

    def state_dict(self) -> dict[str, Any]:
        return {"items": self._items, "of": len(self.loader.dataset), "began": self._order.began}

    def load_state_dict(self, values: Mapping[str, Any], random: Mapping[str, Any] | None) -> None:
        """Make the next pass of the loader continue a saved pass.

        Args:
            values: The saved position.
            random: Saved states of the random number generators.

        Raises:
            InvalidInput: The data have another length.
        """
        if values["of"] != (length := len(self.loader.dataset)):
            raise InvalidInput(
                f"loader {self._number} of State.batches() has {length} items, but had {values['of']} when "
                "it was saved: call State.batches() with the loaders in the same order and the same data."
            )
        if not values["items"] or values["began"] is None:
            return
        self._random = random
        self._items = self._restored_items = values["items"]
        ranks = self._rank_count()
        if repeated := self._restored_items % ranks:
            write_line(
                f"trainingjob: loader {self._number}: {repeated} items of this pass are consumed again, as "
                f"{self._restored_items} can't be shared by {ranks} ranks"
            )
        self._order.resume(values["began"], self._restored_items // ranks)
