"""Plain DistributedDataParallel with checkpoints of its own: rank 0 calls torch.save, and all ranks resume.

torchrun --standalone --nproc-per-node 2 ddp.py --checkpoints /tmp/ddp
"""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--save-every", type=int, default=10)
    parser.add_argument("--checkpoints", type=Path, required=True, help="a folder that all replicas see")
    options = parser.parse_args()

    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    model = DistributedDataParallel(torch.nn.Linear(16, 1).to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    start, latest = 0, options.checkpoints / "latest.pt"
    if latest.exists():
        saved = torch.load(latest, map_location=device)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        start = saved["step"]
    print(f"rank {rank} of {world} starts at step {start}", flush=True)

    target = torch.arange(16.0, device=device).unsqueeze(1) / 16
    for step in range(start, options.steps):
        x = torch.randn(32, 16, generator=torch.Generator().manual_seed(step * world + rank)).to(device)
        loss = torch.nn.functional.mse_loss(model(x), x @ target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if (step + 1) % options.save_every == 0 and rank == 0:
            options.checkpoints.mkdir(parents=True, exist_ok=True)
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1}
            torch.save(state, latest.with_suffix(".new"))
            latest.with_suffix(".new").replace(latest)
            print(f"saved step {step + 1}, loss {loss.item():.4f}", flush=True)
    dist.barrier()
    print(f"rank {rank} of {world} is through at step {options.steps}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
    os._exit(0)  # the interpreter's own end may abort while gloo's threads free their tensors (pytorch#190489)
