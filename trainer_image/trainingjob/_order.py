"""Order of the items in a pass over a data set. It is recorded so that another process can continue the pass."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

import torch

SEEDS = ("epoch", "seed", "initial_seed")
"""Attributes from which samplers derive their order: DistributedSampler and Accelerate's SeedableRandomSampler."""


class StatefulSampler:
    """Wrapper around a sampler that can continue a pass over the data in the middle.

    A sampler draws its order when a pass begins: from torch's random numbers, from its own generator, or from a seed
    and an epoch. This class records the random state at that time, from which the same order can be drawn again.
    """

    def __init__(self, sampler: Any) -> None:
        self._sampler = sampler
        self._began: Mapping[str, Any] | None = None
        """Random state from which the order of the current pass was drawn."""
        self._resume_at: tuple[Mapping[str, Any], int] | None = None
        """Random state and first item's number of the next pass, if it continues a saved one. Otherwise None."""

    def __iter__(self) -> Iterator[Any]:
        done, own_generator = 0, getattr(self._sampler, "generator", None)
        if self._resume_at is not None:
            (self._began, done), self._resume_at = self._resume_at, None
            self._restore_draw(self._began)
        else:
            self._began = self._current_draw()
        items = islice(self._sampler, done, None)
        first = list(islice(items, 1))  # the sampler draws its order now
        if self._began["generator"] is None and own_generator is not None:
            self._sampler.generator = own_generator
        yield from first
        yield from items

    def __len__(self) -> int:
        return len(self._sampler)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sampler, name)

    @property
    def began(self) -> Mapping[str, Any] | None:
        """State of the random number generator from which the order of the present pass was drawn."""
        return self._began if self._resume_at is None else self._resume_at[0]

    @property
    def next_began(self) -> Mapping[str, Any] | None:
        """Random state from which to draw the order of the next pass, if that pass continues a saved one.

        If the next pass draws a new order, the value is None.
        """
        return None if self._resume_at is None else self._resume_at[0]

    def draw_anew(self) -> None:
        """Make the next pass draw a new order, instead of continuing a saved pass."""
        self._resume_at = None

    def resume(self, began: Mapping[str, Any], done: int) -> None:
        """Make the next pass continue a saved one.

        Args:
            began: Random state from which the order of the saved pass was drawn.
            done: Number of items of the saved pass that were consumed.
        """
        self._resume_at = began, done

    def _current_draw(self) -> dict[str, Any]:
        generator = getattr(self._sampler, "generator", None)
        return {
            "torch": torch.get_rng_state(),
            "generator": None if generator is None else generator.get_state(),
            "seeds": {name: getattr(self._sampler, name) for name in SEEDS if hasattr(self._sampler, name)},
        }

    def _restore_draw(self, began: Mapping[str, Any]) -> None:
        torch.set_rng_state(began["torch"])
        if hasattr(self._sampler, "generator"):
            # A sampler may have a generator in one world and none in another.
            state, own_generator = began["generator"], self._sampler.generator
            # The loader may share the sampler's generator, and draws from it at each pass.
            self._sampler.generator = None if state is None else own_generator or torch.Generator()
            if state is not None:
                self._sampler.generator.set_state(state)
        for name, value in began["seeds"].items():
            setattr(self._sampler, name, value)


def order_of(loader: Any) -> StatefulSampler | None:
    """Replace the sampler of a data loader by one that records the order of items, and return the new sampler.

    Returns:
        The sampler, or None if the loader does not form its batches from a sampler.
    """
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
