"""PyTorch Lightning with its state saved by a callback of `trainingjob`.

torchrun --standalone --nproc-per-node 2 lightning_state.py
"""

import argparse
import os

import lightning
import torch
from torch.utils.data import DataLoader, TensorDataset

import trainingjob.lightning


class Model(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(16, 1)

    def training_step(self, batch, _):
        x, wanted = batch
        return torch.nn.functional.mse_loss(self.layer(x), wanted)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args()

    torch.manual_seed(0)
    x = torch.randn(512, 16)
    batch = 64 // int(os.environ.get("WORLD_SIZE", "1"))  # of all ranks, the same in any world
    loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch, shuffle=True)
    trainer = lightning.Trainer(
        max_steps=options.steps,
        strategy="ddp",
        devices=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),  # Lightning wants to know the world
        num_nodes=int(os.environ.get("GROUP_WORLD_SIZE", "1")),
        enable_checkpointing=False,
        callbacks=[trainingjob.lightning.Callback()],
        logger=False,
        enable_progress_bar=False,
    )
    trainer.fit(Model(), loader)
    print(f"rank {trainer.global_rank} is through at step {trainer.global_step}", flush=True)


if __name__ == "__main__":
    main()
    os._exit(0)  # the interpreter's own end may abort while gloo's threads free their tensors (pytorch#190489)
