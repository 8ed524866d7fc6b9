"""Load a checkpoint by plain `dcp.load` as one of several ranks, which divide all tensors by columns.

Usage: dcp_load.py URI RANK WORLD STORE OUT. Each rank writes the whole tensors, put together from all ranks, to OUT.
"""

import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, zeros

import trainingjob.dcp


def main(uri: str, rank: int, world: int, store: str, out: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    mesh = init_device_mesh("cpu", (world,))
    found: dict[str, torch.Tensor] = {}
    for name, tensor in trainingjob.dcp.Reader(uri).read_metadata().state_dict_metadata.items():
        last = len(tensor.size) - 1  # a stored row has only a part of these columns
        cut = [Shard(last)]
        found[name] = zeros(*tensor.size, device_mesh=mesh, placements=cut) if tensor.size else torch.tensor(0.0)
    dcp.load(found, storage_reader=trainingjob.dcp.Reader(uri))
    whole = {name: each.full_tensor() if isinstance(each, DTensor) else each for name, each in found.items()}
    torch.save(whole, out)
    dist.destroy_process_group()


if __name__ == "__main__":
    uri, rank, world, store, out = sys.argv[1:]
    main(uri, int(rank), int(world), store, out)
