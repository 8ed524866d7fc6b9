"""Model of NeMo with its configuration, optimizer and schedule, in Lightning's trainer like NeMo's own collections.

torchrun --standalone --nproc-per-node 2 nemo_model.py --checkpoints /tmp/nemo
"""

import argparse
import os
from pathlib import Path

import lightning.pytorch
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from nemo.core.classes import ModelPT
from omegaconf import DictConfig, OmegaConf
from torch.utils.data import DataLoader, TensorDataset

CONFIG = {
    "features": 16,
    "train_ds": {"items": 512, "batch_size": 16},
    "optim": {"name": "adamw", "lr": 0.01, "sched": {"name": "CosineAnnealing", "warmup_steps": 10, "min_lr": 0.001}},
}


class Model(ModelPT):
    def __init__(self, cfg: DictConfig, trainer: lightning.pytorch.Trainer) -> None:
        super().__init__(cfg=cfg, trainer=trainer)
        self.layer = torch.nn.Linear(cfg.features, 1)

    def setup_training_data(self, config: DictConfig) -> None:
        x = torch.randn(config["items"], CONFIG["features"], generator=torch.Generator().manual_seed(0))
        self._train_dl = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), config["batch_size"], shuffle=True)

    def setup_validation_data(self, config: DictConfig) -> None:
        pass

    @classmethod
    def list_available_models(cls) -> list:
        return []

    def training_step(self, batch, _):
        x, wanted = batch
        return torch.nn.functional.mse_loss(self.layer(x), wanted)


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
    keep = ModelCheckpoint(options.checkpoints, every_n_train_steps=options.save_every, save_last=True)
    trainer = lightning.pytorch.Trainer(
        max_steps=options.steps,
        max_epochs=-1,
        devices=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        num_nodes=int(os.environ.get("GROUP_WORLD_SIZE", "1")),
        strategy="ddp",
        callbacks=[keep, Tell()],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Model(OmegaConf.create(CONFIG), trainer), ckpt_path="last")
    rank, world = trainer.global_rank, trainer.world_size
    print(f"rank {rank} of {world} is through at step {trainer.global_step}", flush=True)


if __name__ == "__main__":
    main()
    os._exit(0)  # the interpreter's own end may abort while gloo's threads free their tensors (pytorch#190489)
