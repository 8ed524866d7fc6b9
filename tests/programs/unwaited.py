"""Script that ends without waiting for its last snapshot, which the last rank never completes."""

import os
import threading
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import trainingjob
from concertina_state import snapshots

LEAST = 5
"""Number of steps before the last snapshot."""


def main() -> None:
    dist.init_process_group("gloo")
    model = DistributedDataParallel(torch.nn.Linear(7, 1))
    state = trainingjob.State(model=model, overhead=1000.0)
    write_sidecar = snapshots.write_sidecar

    def write_or_hang(file, sidecar) -> None:
        if sidecar.id.step > LEAST and sidecar.shard == sidecar.id.shards - 1:
            threading.Event().wait()
        write_sidecar(file, sidecar)

    snapshots.write_sidecar = write_or_hang
    step = state.restore(default=0)
    while True:
        state.commit(step)
        if state._shard.snapshots.step_of(state._shard.snapshots.count - 1) > LEAST:
            break
        time.sleep(0.01)
        step += 1
    print(f"ends with a snapshot of step {step + 1}", flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
