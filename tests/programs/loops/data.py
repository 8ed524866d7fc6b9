"""Loops over data loaders, which must continue at the right item."""

from __future__ import annotations

import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import trainingjob
from loops.common import FEATURES, parallel, perceptron
from loops.run import BATCH, Run

ITEMS = 48


class Items(Dataset[tuple[torch.Tensor, int]]):
    def __len__(self) -> int:
        return ITEMS

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.randn(FEATURES, generator=torch.Generator().manual_seed(index)), index


def epochs(run: Run, loader: DataLoader[tuple[torch.Tensor, int]], stops_at: int = 0) -> None:
    """Train epochs; with `stops_at`, each pass is left after that number of batches."""
    model = parallel(run, perceptron())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    progress = {"epoch": 0}
    state = trainingjob.State(model=model, optimizer=optimizer, scheduler=scheduler, progress=progress, overhead=1000.0)
    step = state.restore(default=0)
    while step < run.steps:
        if isinstance(loader.sampler, DistributedSampler):
            loader.sampler.set_epoch(progress["epoch"])
        batches = stops_at or len(loader)
        for place, (x, index) in enumerate(state.batches(loader), step % batches):
            loss = run.mean((model(x) - x.sum(1, keepdim=True)).square())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if place == batches - 1:
                progress["epoch"] += 1
                scheduler.step()
            run.consumed(step, index.tolist())
            run.record(step, loss=run.total(loss), rate=optimizer.param_groups[0]["lr"])
            state.commit(step, durable=step == run.steps - 1)
            step += 1
            if step == run.steps or place == batches - 1:
                break


def shared(run: Run, seed: int = 0) -> DistributedSampler[tuple[torch.Tensor, int]]:
    """Return a sampler that is given size and rank, as a world of one has no process group here."""
    return DistributedSampler(Items(), num_replicas=run.size, rank=run.rank, seed=seed)


def distributed(run: Run) -> None:
    epochs(run, DataLoader(Items(), BATCH // run.size, sampler=shared(run)))


def distributed_with_workers(run: Run) -> None:
    loader = DataLoader(Items(), BATCH // run.size, sampler=shared(run, seed=3), num_workers=2)
    epochs(run, loader)


def shuffled(run: Run) -> None:
    """Shuffle by torch's random numbers."""
    torch.manual_seed(5)
    epochs(run, DataLoader(Items(), BATCH, shuffle=True))


def shuffled_by_generator(run: Run) -> None:
    epochs(run, DataLoader(Items(), BATCH, shuffle=True, generator=torch.Generator().manual_seed(5)))


def left_early(run: Run) -> None:
    """Leave each pass after three of its four batches."""
    epochs(run, DataLoader(Items(), BATCH // run.size, sampler=shared(run)), stops_at=3)


def in_order(run: Run) -> None:
    epochs(run, DataLoader(Items(), BATCH))
