"""DDP that reports to its job by `trainingjob`, which is available in every replica with a user's own command.

It also runs outside of a job: torchrun --standalone --nproc-per-node 2 with_trainingjob.py
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

try:
    import trainingjob
except ImportError:  # not in a TrainingJob
    trainingjob = None


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--save-every", type=int, default=100)
    options = parser.parse_args()

    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    model = DistributedDataParallel(torch.nn.Linear(16, 1).to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    start, latest = 0, (trainingjob.checkpoint_dir() / "latest.pt") if trainingjob else None
    if latest and latest.exists():
        saved = torch.load(latest, map_location=device)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        start = saved["step"]
    print(f"rank {rank} of {world} starts at step {start}", flush=True)

    target = torch.arange(16.0, device=device).unsqueeze(1) / 16
    for step in range(start + 1, options.steps + 1):
        x = torch.randn(32, 16, generator=torch.Generator().manual_seed(step * world + rank)).to(device)
        loss = torch.nn.functional.mse_loss(model(x), x @ target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if trainingjob is None:
            continue
        trainingjob.report(step=step, steps=options.steps, loss=loss.item(), samples=step * 32 * world)
        last = trainingjob.should_checkpoint()  # on every rank, at every step
        if rank == 0 and (last or step % options.save_every == 0):
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
            torch.save(state, latest.with_suffix(".new"))
            latest.with_suffix(".new").replace(latest)
            print(f"saved step {step}, loss {loss.item():.4f}", flush=True)
    dist.barrier()
    print(f"rank {rank} of {world} is through at step {options.steps}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
    os._exit(0)  # the interpreter's own end may abort while gloo's threads free their tensors (pytorch#190489)
