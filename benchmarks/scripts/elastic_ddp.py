"""Plain script for torchrun that also runs under concertina: DDP over gloo, a checkpoint file, one trace line a step.

    torchrun ... elastic_ddp.py --steps 100000 --trace FOLDER --checkpoint FILE

Every rank appends `unix_time round_or_restart world rank step step_seconds` to its own file in FOLDER after each step,
so that a benchmark can observe when the world trains again.
"""

import argparse
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    """Train up to step --steps, beginning with the checkpoint if it exists."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--trace", type=Path, required=True)
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--dim", type=int, default=256)
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    body = torch.nn.Sequential(*[torch.nn.Linear(options.dim, options.dim) for _ in range(8)])
    model = DistributedDataParallel(body)
    optimizer = torch.optim.AdamW(model.parameters())
    step = load(options.checkpoint, body, optimizer)
    log = (options.trace / f"{os.getpid()}.txt").open("a", buffering=1)
    while step < options.steps:
        begun = time.time()
        x = torch.randn(64, options.dim, generator=torch.Generator().manual_seed(step * 1000 + rank))
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        step += 1
        now = time.time()
        log.write(
            f"{now:.6f} {os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)} {world} {rank} {step} {now - begun:.6f}\n"
        )
        if rank == 0:
            save(options.checkpoint, body, optimizer, step)
        time.sleep(0.05)  # A step has a useful duration without using all processor time.
    dist.destroy_process_group()


def load(path: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Load the model and the optimizer from a checkpoint, and return its step. Return 0 without a checkpoint."""
    if not path.exists():
        return 0
    state = torch.load(path, weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return int(state["step"])


def save(path: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Save a checkpoint, and replace the previous file atomically."""
    part = path.with_suffix(f".{os.getpid()}")
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, part)
    part.replace(path)


if __name__ == "__main__":
    main()
