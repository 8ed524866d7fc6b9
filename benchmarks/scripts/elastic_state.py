"""Model and trace of elastic_ddp.py with DDP or FSDP2, and the state saved by `trainingjob.State`.

    elastic_state.py ddp|fsdp2 --trace FOLDER [--pause SECONDS] [--run]

The trace has one line a step as in elastic_ddp.py, followed by the seconds that `commit` took of the step after it.
"""

import argparse
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import trainingjob


def main() -> None:
    """Train forever."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=["ddp", "fsdp2"])
    parser.add_argument("--trace", type=Path, required=True)
    parser.add_argument("--dim", type=int, default=256)
    parser.add_argument("--pause", type=float, default=0.05, help="a step of a useful length, without using up cores")
    parser.add_argument("--run", action="store_true", help="call main by trainingjob.run")
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model: torch.nn.Module = torch.nn.Sequential(*[torch.nn.Linear(options.dim, options.dim) for _ in range(8)])
    if options.kind == "ddp":
        model = DistributedDataParallel(model)
    else:
        mesh = init_device_mesh("cpu", (world,))
        for layer in model.children():
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    state = trainingjob.State(model=model, optimizer=optimizer)
    step, committed = state.restore(default=0), 0.0
    log = (options.trace / f"{os.getpid()}.txt").open("a", buffering=1)
    while True:
        begun = time.time()
        x = torch.randn(64, options.dim, generator=torch.Generator().manual_seed(step * 1000 + rank))
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        now = time.time()
        restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)
        log.write(f"{now:.6f} {restart} {world} {rank} {step + 1} {now - begun:.6f} {committed:.6f}\n")
        time.sleep(options.pause)
        before = time.perf_counter()
        state.commit(step)
        committed = time.perf_counter() - before
        step += 1


if __name__ == "__main__":
    if "--run" in sys.argv:
        trainingjob.run(main)
    main()
