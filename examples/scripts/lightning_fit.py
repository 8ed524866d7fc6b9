"""PyTorch Lightning: ModelCheckpoint with save_last, and ckpt_path="last".

torchrun --standalone --nproc-per-node 2 lightning_fit.py --checkpoints /tmp/lightning
"""

import argparse
import os
from pathlib import Path

import lightning
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch.utils.data import DataLoader, TensorDataset


class Model(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(16, 1)

    def training_step(self, batch, _):
        x, wanted = batch
        return torch.nn.functional.mse_loss(self.layer(x), wanted)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class Tell(Callback):
    def on_train_start(self, trainer, module) -> None:
        print(f"rank {trainer.global_rank} of {trainer.world_size} starts at step {trainer.global_step}", flush=True)

    def on_save_checkpoint(self, trainer, module, checkpoint) -> None:
        if trainer.is_global_zero:
            print(f"saved step {trainer.global_step}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--save-every", type=int, default=10)
    parser.add_argument("--checkpoints", type=Path, required=True, help="a folder that all replicas see")
    options = parser.parse_args()

    torch.manual_seed(0)
    x = torch.randn(512, 16)
    loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=16, shuffle=True)
    keep = ModelCheckpoint(options.checkpoints, every_n_train_steps=options.save_every, save_last=True)
    trainer = lightning.Trainer(
        max_steps=options.steps,
        max_epochs=-1,
        # Lightning wants to know the world that torchrun has made.
        devices=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        num_nodes=int(os.environ.get("GROUP_WORLD_SIZE", "1")),
        strategy="ddp",
        callbacks=[keep, Tell()],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Model(), loader, ckpt_path="last")
    rank, world = trainer.global_rank, trainer.world_size
    print(f"rank {rank} of {world} is through at step {trainer.global_step}", flush=True)


if __name__ == "__main__":
    main()
    os._exit(0)  # the interpreter's own end may abort while gloo's threads free their tensors (pytorch#190489)
