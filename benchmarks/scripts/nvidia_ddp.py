"""Model and trace of elastic_ddp.py under the in-process restart of nvidia-resiliency-ext, over gloo.

    RANK=... WORLD_SIZE=... MASTER_ADDR=... MASTER_PORT=... nvidia_ddp.py --trace FOLDER [--tuned]

The trace has one line a step as in elastic_ddp.py; `restart` is the number of the wrapper's iteration. Each rank keeps
its model and optimizer in the process. The wrapper's world can shrink, and does not grow again.
"""

import argparse
import os
import time
from datetime import timedelta
from pathlib import Path
from typing import Optional

import torch
import torch.distributed as dist
from nvidia_resiliency_ext import inprocess
from torch.nn.parallel import DistributedDataParallel

TUNED = {
    "monitor_thread_interval": timedelta(milliseconds=50),
    "monitor_process_interval": timedelta(milliseconds=50),
    "heartbeat_interval": timedelta(milliseconds=200),
    "progress_watchdog_interval": timedelta(milliseconds=200),
    "last_call_wait": timedelta(milliseconds=50),
    "termination_grace_time": timedelta(milliseconds=200),
    "soft_timeout": timedelta(seconds=2),
    "hard_timeout": timedelta(seconds=3),
    "heartbeat_timeout": timedelta(seconds=3),
}


def main() -> None:
    """Train forever."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trace", type=Path, required=True)
    parser.add_argument("--tuned", action="store_true")
    parser.add_argument("--dim", type=int, default=256)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    body = torch.nn.Sequential(*[torch.nn.Linear(options.dim, options.dim) for _ in range(8)])
    optimizer = torch.optim.AdamW(body.parameters())
    port = int(os.environ["MASTER_PORT"])
    base = dist.TCPStore("127.0.0.1", port, is_master=os.environ["RANK"] == "0", multi_tenant=True)
    log = (options.trace / f"{os.getpid()}.txt").open("a", buffering=1)
    step = 0

    @inprocess.Wrapper(store_kwargs={"port": port + 1}, **(TUNED if options.tuned else {}))
    def train(call: Optional[inprocess.CallWrapper] = None) -> None:  # noqa: UP045  # The wrapper compares annotations.
        nonlocal step
        assert call is not None
        rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        store = dist.PrefixStore(str(call.iteration), base)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
        model = DistributedDataParallel(body)
        while True:
            begun = time.time()
            x = torch.randn(64, options.dim, generator=torch.Generator().manual_seed(step * 1000 + rank))
            optimizer.zero_grad()
            model(x).square().mean().backward()
            with call.atomic():  # A restart must not interrupt an update.
                optimizer.step()
                step += 1
            now = time.time()
            log.write(f"{now:.6f} {call.iteration} {world} {rank} {step} {now - begun:.6f}\n")
            time.sleep(0.05)

    train()


if __name__ == "__main__":
    main()
