"""Hugging Face Accelerate with save_state, load_state, and skip_first_batches to resume within an epoch.

torchrun --standalone --nproc-per-node 2 hf_accelerate.py --checkpoints /tmp/accelerate
"""

import argparse
import os
import shutil
from pathlib import Path

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset


class Steps:
    """Counter that save_state saves in addition to model, optimizer and loader."""

    def __init__(self) -> None:
        self.finished = 0

    def state_dict(self) -> dict:
        return {"finished": self.finished}

    def load_state_dict(self, state: dict) -> None:
        self.finished = state["finished"]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--save-every", type=int, default=10)
    parser.add_argument("--checkpoints", type=Path, required=True, help="a folder that all replicas see")
    options = parser.parse_args()

    accelerator = Accelerator(cpu=not torch.cuda.is_available())

    torch.manual_seed(0)
    x = torch.randn(512, 16)
    loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=16, shuffle=True)
    model = torch.nn.Linear(16, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    steps = Steps()
    accelerator.register_for_checkpointing(steps)

    whole = [int(path.name[5:]) for path in options.checkpoints.glob("step_*") if path.name[5:].isdigit()]
    if whole:
        accelerator.load_state(str(options.checkpoints / f"step_{max(whole)}"))
    rank, world = accelerator.process_index, accelerator.num_processes
    print(f"rank {rank} of {world} starts at step {steps.finished}", flush=True)

    while steps.finished < options.steps:
        epoch, done = divmod(steps.finished, len(loader))
        loader.set_epoch(epoch)
        for batch, wanted in accelerator.skip_first_batches(loader, done):
            loss = torch.nn.functional.mse_loss(model(batch), wanted)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            steps.finished += 1
            if steps.finished % options.save_every == 0:
                folder = options.checkpoints / f"step_{steps.finished}"
                accelerator.save_state(str(folder.with_suffix(".new")))
                accelerator.wait_for_everyone()  # each rank has a file of its own in there
                if accelerator.is_main_process:
                    folder.with_suffix(".new").replace(folder)
                    print(f"saved step {steps.finished}, loss {loss.item():.4f}", flush=True)
                    old = options.checkpoints / f"step_{steps.finished - 3 * options.save_every}"
                    shutil.rmtree(old, ignore_errors=True)
            if steps.finished >= options.steps:
                break
    accelerator.wait_for_everyone()
    print(f"rank {rank} of {world} is through at step {steps.finished}", flush=True)
    accelerator.end_training()


if __name__ == "__main__":
    main()
    os._exit(0)  # the interpreter's own end may abort while gloo's threads free their tensors (pytorch#190489)
