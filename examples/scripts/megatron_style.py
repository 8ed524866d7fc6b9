"""Arguments and groups in Megatron's style: --local-rank, --tensor-model-parallel-size, one checkpoint per tensor rank.

torchrun --standalone --nproc-per-node 4 megatron_style.py --tensor-model-parallel-size 2 --checkpoints /tmp/megatron
"""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--local-rank", type=int, default=int(os.environ.get("LOCAL_RANK", "0")))
    parser.add_argument("--distributed-backend", default="nccl" if torch.cuda.is_available() else "gloo")
    parser.add_argument("--tensor-model-parallel-size", type=int, default=1)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--save-every", type=int, default=10)
    parser.add_argument("--checkpoints", type=Path, required=True, help="a folder that all replicas see")
    return parser.parse_args()


def parallel_groups(tensor: int) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """Return this rank's tensor-parallel and data-parallel group; tensor ranks are neighbours.

    Raises:
        SystemExit: If the world is not a multiple of the tensor group.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    if world % tensor:
        raise SystemExit(f"{world} ranks are no multiple of --tensor-model-parallel-size {tensor}")
    blocks = [dist.new_group(list(range(first, first + tensor))) for first in range(0, world, tensor)]
    slices = [dist.new_group(list(range(first, world, tensor))) for first in range(tensor)]
    return blocks[rank // tensor], slices[rank % tensor]


def part(folder: Path, step: int, mine: int) -> Path:
    return folder / f"iter_{step:09d}" / f"mp_rank_{mine:02d}.pt"


def newest(folder: Path, tensor: int) -> int:
    """Return the last step of which every tensor rank has saved its part; 0 if there is none."""
    steps = [int(path.name[5:]) for path in folder.glob("iter_*")]
    return max((s for s in steps if all(part(folder, s, mine).exists() for mine in range(tensor))), default=0)


def main() -> None:
    options = arguments()
    if torch.cuda.is_available():
        torch.cuda.set_device(options.local_rank)
    device = torch.device("cuda", options.local_rank) if torch.cuda.is_available() else torch.device("cpu")
    dist.init_process_group(options.distributed_backend)
    rank, world, tensor = dist.get_rank(), dist.get_world_size(), options.tensor_model_parallel_size
    block, peers = parallel_groups(tensor)
    mine = rank % tensor

    features = 16 // tensor  # each tensor rank holds some columns of one layer
    weight = torch.zeros(features, device=device, requires_grad=True)
    start = newest(options.checkpoints, tensor)
    if start:
        weight.data.copy_(torch.load(part(options.checkpoints, start, mine), map_location=device))
    print(f"rank {rank} of {world} starts at step {start}", flush=True)

    target = torch.arange(16.0, device=device) / 16
    for step in range(start, options.steps):
        generator = torch.Generator().manual_seed(step * world + rank // tensor)
        x = torch.randn(32, 16, generator=generator).to(device)
        out = x[:, mine * features : (mine + 1) * features] @ weight
        full = out.detach().clone()
        dist.all_reduce(full, group=block)
        error = full - x @ target
        out.backward(2 * error / error.numel())
        dist.all_reduce(weight.grad, group=peers)
        with torch.no_grad():
            weight -= 0.05 * weight.grad / dist.get_world_size(peers)
            weight.grad = None
        if (step + 1) % options.save_every == 0 and rank < tensor:
            path = part(options.checkpoints, step + 1, mine)
            path.parent.mkdir(parents=True, exist_ok=True)
            torch.save(weight.data, path.with_suffix(".new"))
            path.with_suffix(".new").replace(path)
            if rank == 0:
                print(f"saved step {step + 1}, loss {error.square().mean().item():.4f}", flush=True)
    dist.barrier()
    print(f"rank {rank} of {world} is through at step {options.steps}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
    os._exit(0)  # the interpreter's own end may abort while gloo's threads free their tensors (pytorch#190489)
