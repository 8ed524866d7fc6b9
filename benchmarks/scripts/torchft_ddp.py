"""Model and trace of elastic_ddp.py under torchft: one process for each replica group, and a lighthouse.

    TORCHFT_LIGHTHOUSE=http://host:port torchft_ddp.py --trace FOLDER --replica NAME

The trace has one line a step as in elastic_ddp.py; `restart` is the number of the quorum, and `rank` is 0.
"""

import argparse
import os
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo

LIMIT = timedelta(seconds=5)
"""Time limit for all operations that may hang when a group is lost.

By default, torchft waits a minute for a quorum or a connection.
"""


def main() -> None:
    """Train forever."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trace", type=Path, required=True)
    parser.add_argument("--replica", required=True)
    parser.add_argument("--dim", type=int, default=256)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    body = torch.nn.Sequential(*[torch.nn.Linear(options.dim, options.dim) for _ in range(8)])
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def state() -> dict[str, object]:
        return {"model": body.state_dict(), "optimizer": optimizer.state_dict()}

    def load(found: dict[str, dict[str, object]]) -> None:
        body.load_state_dict(found["model"])
        optimizer.load_state_dict(found["optimizer"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=LIMIT), load_state_dict=load, state_dict=state, min_replica_size=1, timeout=LIMIT,
        quorum_timeout=LIMIT, connect_timeout=LIMIT, rank=0, world_size=1, store_addr="127.0.0.1",
        store_port=store.port, replica_id=options.replica, hostname="127.0.0.1",
    )  # fmt: skip
    model = DistributedDataParallel(manager, body)
    optimizer = Optimizer(manager, torch.optim.AdamW(body.parameters()))
    log = (options.trace / f"{os.getpid()}.txt").open("a", buffering=1)
    while True:
        begun, step = time.time(), manager.current_step()
        x = torch.randn(64, options.dim, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        if manager.current_step() > step:  # All groups have committed the step.
            now, world = time.time(), manager.num_participants()
            log.write(f"{now:.6f} {manager._quorum_id} {world} 0 {manager.current_step()} {now - begun:.6f}\n")
        time.sleep(0.05)


if __name__ == "__main__":
    main()
