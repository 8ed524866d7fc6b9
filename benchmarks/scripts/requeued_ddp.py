"""Model and trace of elastic_ddp.py for a Job that Kueue stops and starts again, with a checkpoint at intervals.

    requeued_ddp.py --trace FOLDER --checkpoint FILE --seconds SECONDS [--save-at-the-end]

RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT must be set. After SIGTERM, the ranks end at once, or agree on a step and
save.
"""

import argparse
import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from elastic_ddp import load, save
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    """Train forever."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trace", type=Path, required=True)
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--save-at-the-end", action="store_true")
    parser.add_argument("--dim", type=int, default=256)
    options = parser.parse_args()
    stopped = []
    signal.signal(signal.SIGTERM, lambda *_: stopped.append(1) if options.save_at_the_end else os._exit(1))
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    body = torch.nn.Sequential(*[torch.nn.Linear(options.dim, options.dim) for _ in range(8)])
    model = DistributedDataParallel(body)
    optimizer = torch.optim.AdamW(model.parameters())
    step, saved = load(options.checkpoint, body, optimizer), time.monotonic()
    log = (options.trace / f"{time.time_ns()}.txt").open("a", buffering=1)
    while True:
        begun = time.time()
        x = torch.randn(64, options.dim, generator=torch.Generator().manual_seed(step * 1000 + rank))
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        step += 1
        now = time.time()
        log.write(f"{now:.6f} 0 {world} {rank} {step} {now - begun:.6f}\n")
        end = torch.tensor(len(stopped))
        dist.all_reduce(end, op=dist.ReduceOp.MAX)
        if rank == 0 and (end or time.monotonic() - saved > options.seconds):
            save(options.checkpoint, body, optimizer, step)
            saved = time.monotonic()
        if end:
            sys.exit(1)
        time.sleep(0.05)  # as in elastic_ddp.py


if __name__ == "__main__":
    main()
