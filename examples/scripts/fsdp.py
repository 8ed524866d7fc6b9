"""Fully sharded data parallel (FSDP2) with torch's distributed checkpoints, which load into any number of ranks.

torchrun --standalone --nproc-per-node 2 fsdp.py --checkpoints /tmp/fsdp
"""

import argparse
import os
import shutil
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def newest(folder: Path) -> int:
    """Return the step of the last complete checkpoint; 0 if there is none. DCP writes .metadata last."""
    return max((int(path.parent.name) for path in folder.glob("*/.metadata")), default=0)


def state_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict:
    weights, moments = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": moments}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--save-every", type=int, default=10)
    parser.add_argument("--checkpoints", type=Path, required=True, help="a folder that all replicas see")
    options = parser.parse_args()

    kind = "cuda" if torch.cuda.is_available() else "cpu"
    if kind == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if kind == "cuda" else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh(kind, (world,))

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1)).to(kind)
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    start = newest(options.checkpoints)
    if start:
        state = state_of(model, optimizer)
        dcp.load(state, checkpoint_id=options.checkpoints / str(start))
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    print(f"rank {rank} of {world} starts at step {start}", flush=True)

    for step in range(start, options.steps):
        x = torch.randn(32, 16, generator=torch.Generator().manual_seed(step * world + rank)).to(kind)
        loss = torch.nn.functional.mse_loss(model(x), x.sum(1, keepdim=True))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % options.save_every == 0:
            dcp.save(state_of(model, optimizer), checkpoint_id=options.checkpoints / str(step + 1))
            if rank == 0:
                print(f"saved step {step + 1}, loss {loss.item():.4f}", flush=True)
                shutil.rmtree(options.checkpoints / str(step + 1 - 3 * options.save_every), ignore_errors=True)
    dist.barrier()
    print(f"rank {rank} of {world} is through at step {options.steps}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
    os._exit(0)  # the interpreter's own end may abort while gloo's threads free their tensors (pytorch#190489)
