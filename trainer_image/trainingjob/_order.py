"""The order in which a pass over a data set takes its items, so that another process goes on in the middle of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

import torch

SEEDS = ("epoch", "seed", "initial_seed")
"""Of samplers that draw by them: torch's DistributedSampler and Accelerate's SeedableRandomSampler."""


class StatefulSampler:
    """In a sampler's place. Samplers draw their order when a pass begins, from torch's random numbers, a generator of
    their own, or a seed and an epoch: it is kept what these were then."""

    def __init__(self, sampler: Any) -> None:
        self._sampler = sampler
        self._began: Mapping[str, Any] | None = None
        self._again: tuple[Mapping[str, Any], int] | None = None

    def __iter__(self) -> Iterator[Any]:
        done, own = 0, getattr(self._sampler, "generator", None)
        if self._again is not None:
            (self._began, done), self._again = self._again, None
            self._draw_by(self._began)
        else:
            self._began = self._drawn_by()
        items = islice(self._sampler, done, None)
        first = list(islice(items, 1))  # now the order is drawn
        if self._began["generator"] is None and own is not None:
            self._sampler.generator = own
        yield from first
        yield from items

    def __len__(self) -> int:
        return len(self._sampler)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sampler, name)

    @property
    def began(self) -> Mapping[str, Any] | None:
        """By what the order of this pass was drawn."""
        return self._began if self._again is None else self._again[0]

    @property
    def next_began(self) -> Mapping[str, Any] | None:
        """By what the order of the next pass is drawn, if it goes on with one that was saved."""
        return None if self._again is None else self._again[0]

    def begin_anew(self) -> None:
        """The next pass draws its own order."""
        self._again = None

    def go_on(self, began: Mapping[str, Any], done: int) -> None:
        """The next pass is one that `began` so, from its item `done` on."""
        self._again = began, done

    def _drawn_by(self) -> dict[str, Any]:
        generator = getattr(self._sampler, "generator", None)
        return {
            "torch": torch.get_rng_state(),
            "generator": None if generator is None else generator.get_state(),
            "seeds": {name: getattr(self._sampler, name) for name in SEEDS if hasattr(self._sampler, name)},
        }

    def _draw_by(self, began: Mapping[str, Any]) -> None:
        torch.set_rng_state(began["torch"])
        if hasattr(self._sampler, "generator"):
            # One sampler may have a generator in one world and none in another.
            state, own = began["generator"], self._sampler.generator
            # Its own may be the loader's, too, which draws from it at each pass.
            self._sampler.generator = None if state is None else own or torch.Generator()
            if state is not None:
                self._sampler.generator.set_state(state)
        for name, value in began["seeds"].items():
            setattr(self._sampler, name, value)


def order_of(loader: Any) -> StatefulSampler | None:
    """Of a loader that takes items in batches by a sampler, in whose place it is put; None of others."""
    batches: Any = getattr(loader, "batch_sampler", None)
    batches = getattr(batches, "batch_sampler", batches)  # Accelerate deals batches out to ranks
    sampler = getattr(batches, "sampler", None)
    if isinstance(sampler, StatefulSampler):
        return sampler
    if not hasattr(sampler, "__len__") or not getattr(batches, "batch_size", None):
        return None
    order = StatefulSampler(sampler)
    batches.sampler = order
    return order
