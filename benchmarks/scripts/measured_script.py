"""Plain DDP script over gloo that either reports each step to its agent or does not, in turns (`turns.py`)."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from turns import Turns

import trainingjob

ROWS = 256


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    dim = int(os.environ["DIM"])
    model = DistributedDataParallel(torch.nn.Sequential(*[torch.nn.Linear(dim, dim) for _ in range(8)]))
    optimizer = torch.optim.AdamW(model.parameters())
    turns = Turns()
    step = 0
    while not turns.begins(step):
        optimizer.zero_grad()
        loss = model(torch.randn(ROWS, dim)).square().mean()
        loss.backward()
        optimizer.step()
        value = loss.item()  # as any script that logs its loss does
        step += 1
        if turns.on:
            with turns.hooks.timed("trainingjob.report"):
                trainingjob.report(step=step, loss=value, samples=step * ROWS, metrics={"scale": 1.0, "rate": 1e-3})
    turns.write()
    dist.barrier()


main()
