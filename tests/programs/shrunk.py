"""A rank of a group whose last rank is killed: measures how long the others take until they can reduce again.

    python shrunk.py WAY RANK RANKS PORT BACKEND

WAY is `shrink_group` or `new group`. The ranks meet in a store at PORT of this machine. Survivors print the seconds
from the moment at which all of them know of the death until the end of the first all-reduce of the smaller group.
"""

import datetime
import sys
import time

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore

from concertina_state import process_groups

LIMIT = datetime.timedelta(seconds=60)


def main(way, rank, ranks, port, backend):
    process_groups.prepare_to_stay()
    connections = process_groups.Connections()
    store = TCPStore("127.0.0.1", port, is_master=False, timeout=LIMIT)
    device = torch.device("cuda", 0) if backend == "nccl" else torch.device("cpu")
    if backend == "nccl":
        torch.cuda.set_device(device)
    dist.init_process_group(backend, store=PrefixStore("first", store), rank=rank, world_size=ranks)
    reduced(device, ranks)
    store.add("reduced", 1)
    store.wait(["killed"], LIMIT)  # the last rank waits too, until it is killed
    store.add("know", 1)
    while store.add("know", 0) < ranks - 1:
        time.sleep(0.001)
    started = time.perf_counter()
    if way == "shrink_group":
        dist.shrink_group([ranks - 1], shrink_flags=dist.distributed_c10d.SHRINK_ABORT)
    else:
        connections.abort()  # also the connection to the store, as each round of a job has its own
        process_groups.leave()
        connections.release()
        store = TCPStore("127.0.0.1", port, is_master=False, timeout=LIMIT)
        dist.init_process_group(backend, store=PrefixStore("second", store), rank=rank, world_size=ranks - 1)
    reduced(device, ranks - 1)
    print(time.perf_counter() - started, flush=True)


def reduced(device, ranks):
    ones = torch.ones(4, device=device)
    dist.all_reduce(ones)
    assert ones.tolist() == [ranks] * 4


if __name__ == "__main__":
    way, rank, ranks, port, backend = sys.argv[1:]
    main(way, int(rank), int(ranks), int(port), backend)
