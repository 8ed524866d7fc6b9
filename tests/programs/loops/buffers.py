"""Loops with buffers that are equal on all ranks, and with buffers that each rank has for itself."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.nn.functional import all_reduce

import trainingjob
from loops.common import FEATURES, batch, evaluated, parallel, squares
from loops.run import BATCH, Run


def train(run: Run, model: nn.Module) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    state = trainingjob.State(model=model, optimizer=optimizer, overhead=1000.0)
    for step in range(state.restore(default=0), run.steps):
        loss = squares(run, model, step)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.record(step, loss=run.total(loss))
        run.record_own(step, evaluation=evaluated(model.module if run.size > 1 else model))
        state.commit(step, durable=step == run.steps - 1)
    run.finished_own(evaluation=evaluated(model.module if run.size > 1 else model))


def batch_norm_model() -> nn.Module:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for width in (FEATURES, 16, 16):
        layers += [nn.Linear(width, 16, bias=False), nn.BatchNorm1d(16), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(16, 1))


def batch_norm(run: Run) -> None:
    train(run, parallel(run, batch_norm_model()))


def batch_norm_of_each_rank(run: Run) -> None:
    """Train with running means that differ between ranks."""
    train(run, parallel(run, batch_norm_model(), broadcast_buffers=False))


class Synchronized(nn.Module):
    """Batch norm over the items of all ranks, like torch's SyncBatchNorm, which does not support CPU tensors."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(features)), nn.Parameter(torch.zeros(features))
        self.register_buffer("mean", torch.zeros(features))
        self.register_buffer("variance", torch.ones(features))
        self.register_buffer("batches", torch.tensor(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mean, variance = self.mean, self.variance
        if self.training:
            sums = torch.stack([x.sum(0), x.square().sum(0), torch.full_like(x[0], len(x))])
            sums = all_reduce(sums) if dist.is_initialized() else sums
            mean = sums[0] / sums[2]
            variance = sums[1] / sums[2] - mean.square()
            self.mean.lerp_(mean.detach(), 0.1)
            self.variance.lerp_(variance.detach(), 0.1)
            self.batches += 1
        return (x - mean) / (variance + 1e-5).sqrt() * self.weight + self.bias


def synchronized(run: Run) -> None:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for width in (FEATURES, 16):
        layers += [nn.Linear(width, 16, bias=False), Synchronized(16), nn.Tanh()]
    model = nn.Sequential(*layers, nn.Linear(16, 1))
    train(run, parallel(run, model))


class Queue(nn.Module):
    """Contrastive learning, in which each rank remembers the features of its own last items."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.encoder = nn.Linear(FEATURES, 8)
        self.register_buffer("queue", torch.zeros(64, 8))
        self.register_buffer("place", torch.zeros(1, dtype=torch.long))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        features = nn.functional.normalize(self.encoder(x), dim=1)
        scores = features @ self.queue.clone().T
        with torch.no_grad():
            rows = (int(self.place) + torch.arange(len(x))) % len(self.queue)
            self.queue[rows] = features.detach()
            self.place.copy_((self.place + len(x)) % len(self.queue))
        return scores.logsumexp(1) - features.sum(1)


def queue(run: Run) -> None:
    model = parallel(run, Queue(), broadcast_buffers=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    state = trainingjob.State(model=model, optimizer=optimizer, overhead=1000.0)
    for step in range(state.restore(default=0), run.steps):
        x, _ = batch(run, step)
        loss = run.mean(model(x))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.record(step, loss=run.total(loss))
        run.record_own(step, own=loss.item())
        state.commit(step, durable=step == run.steps - 1)


class Counting(nn.Module):
    """Buffers of integers and booleans that are equal on all ranks, and one that is recomputed."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(FEATURES, 1)
        self.register_buffer("calls", torch.tensor(0))
        self.register_buffer("counts", torch.zeros(5, dtype=torch.int32))
        self.register_buffer("seen", torch.zeros(3, 5, dtype=torch.bool))
        self.register_buffer("scale", torch.linspace(0.5, 1.5, FEATURES), persistent=False)
        self.register_buffer("nothing", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.counts[self.calls % 5] += 1
        self.seen[self.calls % 3, self.calls % 5] = True
        self.calls += 1
        return self.layer(x * self.scale)


def counting(run: Run) -> None:
    model = parallel(run, Counting())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    state = trainingjob.State(model=model, optimizer=optimizer, overhead=1000.0)
    for step in range(state.restore(default=0), run.steps):
        loss = squares(run, model, step)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.record(step, loss=run.total(loss))
        state.commit(step, durable=step == run.steps - 1)


HIDDEN = 6


class Cell(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.cell, self.out = nn.GRUCell(FEATURES, HIDDEN), nn.Linear(HIDDEN, 1)

    def forward(self, x: torch.Tensor, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.cell(x, hidden)
        return self.out(hidden), hidden


def carried(run: Run, hidden: torch.Tensor, **keeps: object) -> None:
    """Carry a hidden state of each item of the batch from step to step."""
    model = parallel(run, Cell())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    state = trainingjob.State(model=model, optimizer=optimizer, overhead=1000.0, **keeps)
    for step in range(state.restore(default=0), run.steps):
        x, y = batch(run, step)
        output, new = model(x, hidden)
        loss = run.mean((output - y).square())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        hidden.copy_(new.detach())
        run.record(step, loss=run.total(loss))
        run.record_own(step, hidden=hidden)
        state.commit(step, durable=step == run.steps - 1)


def carried_as_part(run: Run) -> None:
    mine = run.share()
    hidden = torch.zeros(len(mine), HIDDEN)
    carried(run, hidden, memory={"hidden": trainingjob.ArrayShard(hidden, [mine.start, 0], [BATCH, HIDDEN])})


def carried_in_dict(run: Run) -> None:
    """Carry the hidden state in a dict, without saying which part of the batch it is."""
    hidden = torch.zeros(len(run.share()), HIDDEN)
    carried(run, hidden, memory={"hidden": hidden})


class Memory:
    def __init__(self, hidden: torch.Tensor) -> None:
        self.hidden = hidden

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {"hidden": self.hidden}

    def load_state_dict(self, values: dict[str, torch.Tensor]) -> None:
        self.hidden.copy_(values["hidden"])


def carried_by_object(run: Run) -> None:
    """Carry the hidden state in an object of the rank's own."""
    hidden = torch.zeros(len(run.share()), HIDDEN)
    carried(run, hidden, memory=Memory(hidden))
