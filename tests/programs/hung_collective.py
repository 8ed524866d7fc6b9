"""Two ranks in a process group, of which rank 1 never calls the last collective: `hung_collective.py BACKEND STORE`.

Each rank prints, as a line of JSON, its rank and the collectives that a thread lists while its main thread waits.
"""

import json
import os
import sys
import threading

import torch
import torch.distributed as dist

from concertina_protocol.codec.typed_json import to_json
from concertina_state import collective_calls

backend, store = sys.argv[1:]
rank = int(os.environ["RANK"])
device = "cpu"
if backend == "nccl":
    device = f"cuda:{os.environ['LOCAL_RANK']}"
    torch.cuda.set_device(device)
dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=2)
one = torch.ones(1, device=device)
pair = dist.new_group([0, 1], group_desc="pair")
for _ in range(3):
    dist.all_reduce(one)
dist.broadcast(one, 0, group=pair)
print(one.item(), file=sys.stderr)


def told(message):
    print(json.dumps([rank, to_json(message.groups)]), flush=True)
    os._exit(0)


threading.Timer(2.0, collective_calls.answer, [told]).start()
if rank == 0:
    dist.all_reduce(one, group=pair)  # rank 1 never calls it
    print(one.item(), file=sys.stderr)  # waits, as the main thread of a training process on a GPU does
threading.Event().wait()
