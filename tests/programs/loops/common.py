"""Common parts of scripts: a batch that is the same in any world, and DDP if there are several ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from loops.run import BATCH, Run

FEATURES = 7


def batch(run: Run, number: int, step: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return this rank's rows of a batch. With `step`, the batch is a part of that step, and not a step of its own."""
    x = torch.randn(BATCH, FEATURES, generator=torch.Generator().manual_seed(number))
    mine = run.share()
    run.consumed(number if step is None else step, [number * BATCH + row for row in mine])
    x = x[mine.start : mine.stop]
    return x, x.sum(1, keepdim=True)


def parallel(run: Run, module: nn.Module, **options: Any) -> nn.Module:
    return DistributedDataParallel(module, **options) if run.size > 1 else module


def perceptron(*between: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(FEATURES, 16), *between, nn.Tanh(), nn.Linear(16, 1))


def squares(run: Run, model: nn.Module, number: int, step: int | None = None) -> torch.Tensor:
    """Return the loss of a batch, to be averaged over ranks."""
    x, y = batch(run, number, step)
    return run.mean((model(x) - y).square())


def evaluated(model: nn.Module) -> float:
    """Return the loss of a rank's model on items that no step trains on."""
    x = torch.randn(50, FEATURES, generator=torch.Generator().manual_seed(1_000_000))
    training = model.training
    model.eval()
    with torch.no_grad():
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean().item()
    model.train(training)
    return loss
