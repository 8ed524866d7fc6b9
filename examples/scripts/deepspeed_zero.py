"""DeepSpeed's ZeRO with its own checkpoints, which are converted to universal ones for a world of another size.

torchrun --standalone --nproc-per-node 2 deepspeed_zero.py --stage 3 --checkpoints /tmp/zero
"""

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist

if not torch.cuda.is_available():
    # DeepSpeed would compile a way to talk over shared memory: gloo's own needs no compiler in the image.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--stage", type=int, default=2, choices=[1, 2, 3])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--save-every", type=int, default=10)
    parser.add_argument("--checkpoints", type=Path, required=True, help="a folder that all replicas see")
    return parser.parse_args()


def newest(folder: Path) -> tuple[int, int]:
    """Return the last step that is saved completely, and the number of ranks that saved it; 0 if there is none.

    DeepSpeed's file `latest` may name an incomplete checkpoint after a kill.
    """
    found = [path.name.split("-") for path in folder.glob("whole-*-*")]
    return max(((int(step), int(world)) for _, step, world in found), default=(0, 0))


def save(engine: deepspeed.DeepSpeedEngine, folder: Path, step: int, old: int) -> None:
    """Save a checkpoint, and delete that of step `old`."""
    engine.save_checkpoint(str(folder), tag=f"step-{step}", save_latest=False)
    dist.barrier()
    if dist.get_rank() == 0:
        (folder / f"whole-{step}-{dist.get_world_size()}").touch()
        print(f"saved step {step}", flush=True)
        for path in (*folder.glob(f"whole-{old}-*"), *folder.glob(f"step-{old}")):
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def universal(folder: Path, step: int) -> str:
    """Convert a checkpoint so that a world of any size can load it, and return the new tag."""
    tag, draft = f"step-{step}-universal", folder / f"step-{step}-draft"
    if dist.get_rank() == 0 and not (folder / tag).exists():
        shutil.rmtree(draft, ignore_errors=True)
        convert = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", "--inject_missing_state"]
        convert += ["--input_folder", str(folder / f"step-{step}"), "--output_folder", str(draft)]
        subprocess.run(convert, check=True, stdout=subprocess.DEVNULL)
        draft.rename(folder / tag)
    dist.barrier()
    return tag


def main() -> None:
    options = arguments()
    deepspeed.init_distributed("nccl" if torch.cuda.is_available() else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    start, saved_by = newest(options.checkpoints)
    dist.barrier()  # none has saved before all have looked
    tag = f"step-{start}" if saved_by == world else universal(options.checkpoints, start) if start else ""
    config = {
        "train_micro_batch_size_per_gpu": 32,
        "zero_optimization": {"stage": options.stage},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,  # DeepSpeed's own on a CPU is compiled at its first use
        "checkpoint": {"load_universal": tag.endswith("-universal")},
    }
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    if tag:
        engine.load_checkpoint(str(options.checkpoints), tag=tag)
    print(f"rank {rank} of {world} starts at step {start}", flush=True)
    for step in range(start, options.steps):
        x = torch.randn(32, 16, generator=torch.Generator().manual_seed(step * world + rank)).to(engine.device)
        loss = (engine(x) - x.sum(1, keepdim=True)).square().mean()
        engine.backward(loss)
        engine.step()
        if rank == 0:
            print(f"step {step} loss {loss.item():.4f}", flush=True)
        if (step + 1) % options.save_every == 0:
            save(engine, options.checkpoints, step + 1, step + 1 - 3 * options.save_every)
    dist.barrier()
    print(f"rank {rank} of {world} is through at step {options.steps}", flush=True)


if __name__ == "__main__":
    main()
    os._exit(0)  # the interpreter's own end may abort while gloo's threads free their tensors (pytorch#190489)
