"""Plain script whose state is either committed after each step or not, in turns (`turns.py`).

It uses DDP or FSDP2 over gloo, or one process on a GPU.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from turns import Turns

import trainingjob

ROWS = {"cpu": 1024, "cuda": 8192}


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    dim, cut = int(os.environ["DIM"]), os.environ["CUT"]
    device = "cuda" if cut == "gpu" else "cpu"
    torch.set_float32_matmul_precision("high")
    model: torch.nn.Module = torch.nn.Sequential(*[torch.nn.Linear(dim, dim, device=device) for _ in range(8)])
    if cut == "ddp":
        model = DistributedDataParallel(model)
    elif cut == "fsdp2":
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
        loss = model(torch.randn(ROWS[device], dim, device=device)).square().mean()
        loss.backward()
        optimizer.step()
        loss.item()  # The loss is read because scripts that log it wait for the device too.
        if turns.on:
            with turns.hooks.timed("commit"):
                state.commit(step)
        else:  # The pace then measures the duration of one step only.
            state._saver._commit_began = None
        step += 1
    turns.write()
    dist.barrier()


main()
