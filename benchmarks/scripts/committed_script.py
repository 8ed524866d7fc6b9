"""A plain script over gloo whose state is committed after each step, or not, by turns (`turns.py`): DDP or FSDP2."""

from __future__ import annotations

import os
import time

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from turns import Turns

import trainingjob

ROWS = 1024


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    dim = int(os.environ["DIM"])
    model: torch.nn.Module = torch.nn.Sequential(*[torch.nn.Linear(dim, dim) for _ in range(8)])
    if os.environ["CUT"] == "ddp":
        model = DistributedDataParallel(model)
    else:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for layer in model.children():
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    state = trainingjob.State(model=model, optimizer=optimizer)
    turns = Turns()
    step = state.restore(default=0)
    while not turns.begins(step):
        optimizer.zero_grad()
        model(torch.randn(ROWS, dim)).square().mean().backward()
        optimizer.step()
        if turns.on:
            with turns.hooks.timed("commit"):
                state.commit(step)
        else:  # what its pace knows of a step's length is that of one
            state._returned = time.perf_counter()
        step += 1
    turns.write()
    dist.barrier()


main()
