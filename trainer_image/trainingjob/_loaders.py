"""The position of a script's data loaders in their passes: `State.batches(loader)`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from concertina_protocol.stderr import log
from concertina_state.errors import BadInput
from trainingjob._objects import RandomNumbers
from trainingjob._order import order_of
from trainingjob._refusals import NotSavable


class Loaders:
    """All loaders that a script has given to `State.batches`, in the order of their first use."""

    def __init__(self) -> None:
        self._passes: list[Passes] = []
        self._saved: list[Mapping[str, Any]] = []
        """Positions that were restored."""
        self._random: Mapping[str, Any] | None = None

    def batches(self, loader: Any) -> Iterator[Any]:
        known = next((passes for passes in self._passes if passes.loader is loader), None)
        if known is None:
            number = len(self._passes)
            known = Passes(loader, number)
            if number < len(self._saved):
                known.load_state_dict(self._saved[number], self._random)
            self._passes.append(known)
        return known.batches()

    def state_dict(self) -> dict[str, Any]:
        positions = [passes.state_dict() for passes in self._passes]
        return {"passes": positions + self._saved[len(positions) :]}

    def load_state_dict(self, values: Mapping[str, Any]) -> None:
        if self._passes:
            raise BadInput("State.restore() comes before the first State.batches(): correct the script's order.")
        self._saved = list(values["passes"])

    def restored(self) -> None:
        """Remember the random numbers as they were saved: a pass that goes on draws anew when it begins."""
        self._random = RandomNumbers().state_dict() if self._saved else None


class Passes:
    """The passes over one loader, and how far the current one is, in items of all ranks."""

    def __init__(self, loader: Any, number: int) -> None:
        order = order_of(loader)
        if order is None:
            raise NotSavable(
                f"State.batches() was given a {type(loader).__qualname__} whose order can't be followed: it takes a "
                "DataLoader with a sampler and a batch size. Give an IterableDataset to a "
                "torchdata.StatefulDataLoader, and that to State(loader=...)."
            )
        self.loader, self._order, self._number = loader, order, number
        self._items = self._restored = 0
        self._random: Mapping[str, Any] | None = None

    def batches(self) -> Iterator[Any]:
        share = self._share()
        begin, self._restored = self._restored // share * share, 0
        if begin and self._is_over(begin // share) and self._counts_next_epoch():
            begin, self._random = 0, None
        if begin:
            self._check_epoch()
        else:
            self._order.begin_anew()
        self._items, batch_size = begin, self.loader.batch_sampler.batch_size
        try:
            for batch in self.loader:
                self._put_back_random()
                self._items += batch_size * share
                yield batch
            self._put_back_random()
        finally:
            self._items = 0  # also after `break`: the next pass is another one

    def _share(self) -> int:
        """Ranks that share a pass."""
        return int(getattr(self._order, "num_replicas", 1))

    def _is_over(self, done: int) -> bool:
        """Return whether no batch is left of a pass of which each rank has consumed so many items."""
        batches, left = self.loader.batch_sampler, len(self._order) - done
        return bool(left < (batches.batch_size if batches.drop_last else 1))

    def _counts_next_epoch(self) -> bool:
        """Return whether the script counts a pass before its last commit, or computes the epoch from the step."""
        saved, now = self._epochs()
        return saved is not None and now == saved + 1

    def _epochs(self) -> tuple[int | None, int | None]:
        """The epoch of the saved pass, and the sampler's; None for a sampler without epochs."""
        began = self._order.next_began
        saved = None if began is None else began["seeds"].get("epoch")
        return saved, getattr(self._order, "epoch", saved)

    def _check_epoch(self) -> None:
        """The next epochs follow from the script's own count."""
        saved, now = self._epochs()
        if saved is not None and now != saved:
            raise BadInput(
                f"the sampler of loader {self._number} is at epoch {now}, and the saved state at epoch {saved}: begin "
                "the loop over epochs there. Keep the epoch in the state, or compute it from the step."
            )

    def _put_back_random(self) -> None:
        if self._random is not None:
            RandomNumbers().load_state_dict(self._random)
            self._random = None

    def state_dict(self) -> dict[str, Any]:
        return {"items": self._items, "of": len(self.loader.dataset), "began": self._order.began}

    def load_state_dict(self, values: Mapping[str, Any], random: Mapping[str, Any] | None) -> None:
        if values["of"] != (length := len(self.loader.dataset)):
            raise BadInput(
                f"loader {self._number} of State.batches() has {length} items, and {values['of']} when it was saved: "
                "give the loaders in the same order, with the same data."
            )
        if not values["items"] or values["began"] is None:
            return
        self._random = random
        self._items = self._restored = values["items"]
        share = self._share()
        if again := self._restored % share:
            log(
                f"trainingjob: loader {self._number}: {again} items of this pass are consumed again, as "
                f"{self._restored} can't be shared by {share} ranks"
            )
        self._order.go_on(values["began"], self._restored // share)
