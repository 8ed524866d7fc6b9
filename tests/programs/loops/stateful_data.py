"""Loops over torchdata's StatefulDataLoader, which continue at their last position."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DistributedSampler, IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

import trainingjob
from loops.common import parallel, perceptron
from loops.data import Items, shared
from loops.run import BATCH, Run


def epochs(run: Run, loader: StatefulDataLoader[Any]) -> None:
    """Give State the loader as an object, which saves its own position."""
    model = parallel(run, perceptron())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    progress = {"epoch": 0}
    state = trainingjob.State(model=model, optimizer=optimizer, loader=loader, progress=progress, overhead=1000.0)
    step = state.restore(default=0)
    for epoch in itertools.count(progress["epoch"]):
        progress["epoch"] = epoch
        if isinstance(loader.sampler, DistributedSampler):
            loader.sampler.set_epoch(epoch)
        for x, index in loader:
            loss = run.mean((model(x) - x.sum(1, keepdim=True)).square())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            run.consumed(step, index.tolist())
            run.record(step, loss=run.total(loss))
            state.commit(step, durable=step == run.steps - 1)
            step += 1
            if step == run.steps:
                return


def loader(run: Run, items: Any, **options: Any) -> StatefulDataLoader[Any]:
    """Return a loader with a generator of its own.

    It draws a seed when a pass begins or continues, and not from the script's random numbers.
    """
    return StatefulDataLoader(items, BATCH // run.size, generator=torch.Generator(), **options)


def distributed(run: Run, workers: int = 0) -> None:
    epochs(run, loader(run, Items(), sampler=shared(run), num_workers=workers))


def distributed_with_workers(run: Run) -> None:
    distributed(run, workers=2)


class Stream(IterableDataset[tuple[torch.Tensor, int]]):
    """Endless stream of one rank's items."""

    def __init__(self, run: Run) -> None:
        self.place, self.ranks = run.rank, run.size

    def __iter__(self) -> Iterator[tuple[torch.Tensor, int]]:
        while True:
            index, self.place = self.place, self.place + self.ranks
            yield Items()[index]

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, values: dict[str, int]) -> None:
        self.place = values["place"]


def streamed(run: Run) -> None:
    epochs(run, loader(run, Stream(run)))
