"""A DataLoader with a DistributedSampler whose position is saved with the state."""

import argparse
import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import trainingjob


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args()

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    x = torch.randn(40, 8)
    dataset = TensorDataset(x, x.sum(1, keepdim=True))
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, 4, sampler=sampler)
    epochs = options.steps // len(loader)
    model = DistributedDataParallel(torch.nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    progress = {"epoch": 0, "step": 0}
    state = trainingjob.State(model=model, optimizer=optimizer, progress=progress)
    state.restore()
    for epoch in range(progress["epoch"], epochs):
        progress["epoch"] = epoch
        sampler.set_epoch(epoch)
        for inputs, wanted in state.batches(loader):
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(inputs), wanted).backward()
            optimizer.step()
            progress["step"] += 1
            state.commit(progress["step"] - 1, durable=progress["step"] == epochs * len(loader))
    print(f"rank {dist.get_rank()} is through at step {progress['step']}", flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
