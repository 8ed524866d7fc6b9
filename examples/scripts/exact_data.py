"""A small language model that consumes the same samples in the same order in any world, whatever fails meanwhile.

concertina data build --out /tmp/tokens docs
torchrun --standalone --nproc-per-node 2 exact_data.py ddp --data /tmp/tokens
"""

import argparse
import json
import os
import zlib
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import trainingjob


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=["ddp", "fsdp2"])
    parser.add_argument("--data", required=True, help="what `concertina data build` wrote: a folder or a URI")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--length", type=int, default=64, help="tokens of a sequence")
    parser.add_argument("--batch", type=int, default=16, help="sequences of a step, of all ranks together")
    parser.add_argument("--record", type=Path, help="a folder for each step's loss and checksums of its rows")
    options = parser.parse_args()

    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    data = trainingjob.data(options.data, length=options.length, batch=options.batch, seed=1)

    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(
        nn.Embedding(data.vocab_size, 32), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, data.vocab_size)
    ).to(device)
    model = DistributedDataParallel(model) if options.kind == "ddp" else fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.003)
    state = trainingjob.State(model=model, optimizer=optimizer, data=data)

    for step in range(state.restore(default=0), options.steps):
        rows = next(data).to(device)
        loss = nn.functional.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
        loss = loss * data.weight  # so that the mean over the ranks is the mean over the batch
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if options.record:
            dist.all_reduce(mean := loss.detach() / dist.get_world_size())
            record(options.record, step, mean.item(), rows)
        state.commit(step, durable=step == options.steps - 1)
    print(f"rank {dist.get_rank()} is through after {data.samples} samples", flush=True)


def record(folder: Path, step: int, loss: float, rows: torch.Tensor) -> None:
    world = trainingjob.world()
    sums = [zlib.crc32(str(row).encode()) for row in rows.tolist()]
    line = {"step": step, "round": world.round, "rank": world.rank, "size": world.size, "loss": loss, "rows": sums}
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"{world.round}-{world.rank}.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    trainingjob.run(main)  # in a job, a process that survives a failure calls main again
    os._exit(0)  # the interpreter's own end may abort while gloo's threads free their tensors (pytorch#190489)
