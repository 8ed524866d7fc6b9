"""Hugging Face Accelerate with its state saved by `trainingjob`.

torchrun --standalone --nproc-per-node 2 hf_accelerate_state.py
"""

import argparse
import os

import torch
from accelerate import Accelerator, DataLoaderConfiguration
from torch.utils.data import DataLoader, TensorDataset

import trainingjob.accelerate


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args()

    # The loader's batch is that of all ranks: the same in any world.
    batches = DataLoaderConfiguration(split_batches=True)
    accelerator = Accelerator(cpu=not torch.cuda.is_available(), dataloader_config=batches)
    torch.manual_seed(0)
    x = torch.randn(512, 16)
    loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=48, shuffle=True)
    model = torch.nn.Linear(16, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    state = trainingjob.accelerate.register(accelerator)
    step = state.restore(default=0)
    while step < options.steps:
        for inputs, wanted in state.batches(loader):
            loss = torch.nn.functional.mse_loss(model(inputs), wanted)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            state.commit(step - 1, durable=step == options.steps)
            if step == options.steps:
                break
    print(f"rank {accelerator.process_index} is through at step {step}", flush=True)


if __name__ == "__main__":
    main()
    os._exit(0)  # the interpreter's own end may abort while gloo's threads free their tensors (pytorch#190489)
