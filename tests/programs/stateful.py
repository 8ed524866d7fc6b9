"""Script that saves its state by `trainingjob.State`. Its global batch and its loss are the same in any world."""

import argparse
import os
import sys
import time

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import trainingjob

BATCH = 12


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=["plain", "ddp", "fsdp1", "fsdp2", "hsdp", "tensor"])
    parser.add_argument("--steps", type=int, default=10**9)
    parser.add_argument("--pause", type=float, default=0.01)
    parser.add_argument("--overhead", type=float, default=1000.0)
    parser.add_argument("--cuda", action="store_true")
    parser.add_argument("--run", action="store_true", help="call main by trainingjob.run")
    options = parser.parse_args()

    world = trainingjob.world()
    device = torch.device("cuda" if options.cuda else "cpu")
    if options.cuda:
        shared = torch.cuda.device_count() < world.size  # NCCL must take the ranks for ranks of several hosts.
        os.environ |= {"NCCL_HOSTID": str(world.rank)} if shared else {}
        torch.cuda.set_device(0 if shared else world.rank)
    if options.kind != "plain":
        dist.init_process_group("nccl" if options.cuda else "gloo")
    torch.manual_seed(world.rank)
    model = torch.nn.Sequential(torch.nn.Linear(7, 34), torch.nn.Tanh(), torch.nn.Linear(34, 1))
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number)) / 4)
    model.to(device)
    if options.kind == "ddp":
        model = DistributedDataParallel(model)
    elif options.kind == "fsdp1":
        model = FullyShardedDataParallel(model, device_id=device, use_orig_params=True)
    elif options.kind in ("fsdp2", "hsdp"):
        copies = 2 if options.kind == "hsdp" else 1
        mesh = init_device_mesh(device.type, (copies, world.size // copies), mesh_dim_names=("replicate", "shard"))
        mesh = mesh if options.kind == "hsdp" else mesh["shard"]
        fully_shard(model[0], mesh=mesh)
        fully_shard(model, mesh=mesh)
    elif options.kind == "tensor":
        mesh = init_device_mesh(device.type, (world.size // 2, 2), mesh_dim_names=("shard", "tensor"))
        parallelize_module(model, mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        fully_shard(model, mesh=mesh["shard"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 30, gamma=0.5)
    state = trainingjob.State(model=model, optimizer=optimizer, scheduler=scheduler, overhead=options.overhead)
    alike = 2 if options.kind == "tensor" else 1  # ranks that train on the same items
    shares = world.size // alike
    start = state.restore(default=0)
    print(f"rank {world.rank} of {world.size} starts at step {start}", flush=True)
    for step in range(start, options.steps):
        x = torch.randn(BATCH, 7, generator=torch.Generator().manual_seed(step)).to(device)
        share = world.rank // alike
        mine = range(BATCH * share // shares, BATCH * (share + 1) // shares)
        losses = (model(x[mine.start : mine.stop]) - x[mine.start : mine.stop].sum(1, keepdim=True)).square()
        loss = losses.sum() / BATCH * shares  # Losses are averaged as gradients are.
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        total = losses.detach().sum() / BATCH / alike
        if options.kind != "plain":
            dist.all_reduce(total)
        if world.rank == 0:
            print(f"step {step} loss {total.item():.9f}", flush=True)
        time.sleep(options.pause)
        state.commit(step, durable=step == options.steps - 1)
    print(f"rank {world.rank} is through", flush=True)
    os._exit(0)


if __name__ == "__main__":
    if "--run" in sys.argv:
        trainingjob.run(main)
    main()
