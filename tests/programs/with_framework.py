"""Loop of a framework that saves its state, with dropout, shuffled data and several epochs.

It prints each step's loss over all ranks, and the items that each rank was given.

    with_framework.py lightning|transformers|accelerate [--batch N | --each N]

N is the batch of all ranks in any world, or the batch of each rank.
"""

import argparse
import os
import time

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

ITEMS = 60
WORLD, RANK = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))


class Items(Dataset):
    def __len__(self) -> int:
        return ITEMS

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        x = torch.randn(7, generator=torch.Generator().manual_seed(index))
        return {"x": x, "labels": x.sum(0, keepdim=True), "index": torch.tensor(index)}


class Model(torch.nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(7, 33), torch.nn.Tanh(), torch.nn.Dropout(dropout), torch.nn.Linear(33, 1)
        )

    def forward(self, x, labels, index):
        return {"loss": (self.layers(x) - labels).square().mean()}


def say(line: str) -> None:
    os.write(1, f"{line}\n".encode())  # The value is complete on each rank.


def started(step: int) -> None:
    say(f"rank {RANK} of {WORLD} starts at step {step}")


GIVEN: list[torch.Tensor] = []
"""Indexes of the batches since the last step."""


def trained(step: int, epoch: int, loss: torch.Tensor) -> None:
    """Print that `step`, counted from 0, is finished."""
    index = torch.cat(GIVEN)
    GIVEN.clear()
    items = ",".join(str(each) for each in sorted(index.tolist()))
    say(f"step {step} rank {RANK} epoch {epoch} items {items}")
    total = loss.detach().clone() * len(index)
    count = torch.tensor(float(len(index)))
    if WORLD > 1:
        dist.all_reduce(total)
        dist.all_reduce(count)
    if RANK == 0:
        say(f"step {step} loss {(total / count).item():.9f}")
    if step == options.stop:
        os._exit(0)
    if not os.path.exists(f"{os.environ['HOME']}/hurry"):
        time.sleep(options.pause)


def with_lightning() -> None:
    import lightning

    import trainingjob.lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = Model(options.dropout)

        def on_train_start(self) -> None:
            started(self.trainer.global_step)

        def training_step(self, batch, _):
            GIVEN.append(batch["index"])
            return self.model(**batch)["loss"]

        def on_train_batch_end(self, outputs, batch, _) -> None:
            if len(GIVEN) == options.accumulate or self.trainer.is_last_batch:
                trained(self.trainer.global_step - 1, self.trainer.current_epoch, outputs["loss"])

        def validation_step(self, batch, _) -> None:
            self.log("validated", self.model(**batch)["loss"], sync_dist=True)

        def on_validation_end(self) -> None:
            say(f"validated at {self.trainer.global_step}")

        def configure_optimizers(self):
            optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.7)]

    trainer = lightning.Trainer(
        max_steps=options.steps,
        max_epochs=-1,
        devices=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        num_nodes=int(os.environ.get("GROUP_WORLD_SIZE", "1")),
        strategy="ddp" if WORLD > 1 or options.always_ddp else "auto",
        accelerator="cpu",
        accumulate_grad_batches=options.accumulate,
        callbacks=[trainingjob.lightning.Callback(overhead=1000.0)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        num_sanity_val_steps=0,
    )
    loader = DataLoader(Items(), size(), shuffle=True, num_workers=options.workers)
    trainer.fit(Module(), loader, DataLoader(torch.utils.data.Subset(Items(), range(12)), 6))


def with_transformers() -> None:
    from transformers import Trainer, TrainerCallback, TrainingArguments

    import trainingjob.transformers

    class Tell(TrainerCallback):
        def on_step_begin(self, args, state, control, **_) -> None:
            if not hasattr(self, "begun"):
                self.begun = started(state.global_step)

        def on_step_end(self, args, state, control, **_) -> None:
            trained(state.global_step - 1, int(state.epoch - 1e-6), self.loss)

    class Telling(Trainer):
        def compute_loss(self, model, inputs, **more):
            loss = super().compute_loss(model, inputs, **more)
            tell.loss = loss
            GIVEN.append(inputs["index"])
            return loss

    tell = Tell()
    arguments = TrainingArguments(
        output_dir="unused",
        max_steps=options.steps,
        per_device_train_batch_size=size(),
        gradient_accumulation_steps=options.accumulate,
        learning_rate=0.01,
        lr_scheduler_type="inverse_sqrt",
        dataloader_num_workers=options.workers,
        save_strategy="no",
        logging_steps=5,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=False,
        remove_unused_columns=False,
        ddp_find_unused_parameters=False,
    )
    torch.manual_seed(0)
    trainer = Telling(model=Model(options.dropout), args=arguments, train_dataset=Items(), callbacks=[tell])
    trainingjob.transformers.train(trainer, overhead=1000.0)


def with_accelerate() -> None:
    from accelerate import Accelerator, DataLoaderConfiguration

    import trainingjob.accelerate

    # With split_batches, schedulers step once a step; without it, they step as many times as there are ranks.
    configuration = DataLoaderConfiguration(split_batches=not options.each)
    accelerator = Accelerator(cpu=True, dataloader_config=configuration)
    model = Model(options.dropout)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 30, gamma=0.7)
    loader = DataLoader(Items(), options.each or options.batch, shuffle=True, num_workers=options.workers)
    model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
    state = trainingjob.accelerate.register(accelerator, overhead=1000.0)
    step = state.restore(default=0)
    started(step)
    while step < options.steps:
        for batch in state.batches(loader):
            GIVEN.append(batch["index"])
            loss = model(**batch)["loss"]
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            trained(step, loader.iteration, loss)
            state.commit(step, durable=step == options.steps - 1)
            step += 1
            if step == options.steps:
                break


def size() -> int:
    return options.each or options.batch // WORLD


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("framework", choices=["lightning", "transformers", "accelerate"])
    parser.add_argument("--steps", type=int, default=10**9)
    parser.add_argument("--stop", type=int, help="end at once when that step is finished, before it is kept")
    parser.add_argument("--pause", type=float, default=0.0)
    parser.add_argument("--batch", type=int, default=12)
    parser.add_argument("--each", type=int, default=0)
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--always-ddp", action="store_true")
    options = parser.parse_args()
    torch.manual_seed(0)
    globals()[f"with_{options.framework}"]()
    say(f"rank {RANK} of {WORLD} is through")
    os._exit(0)
