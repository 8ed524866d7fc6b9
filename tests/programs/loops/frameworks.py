"""Training loops of frameworks."""

from __future__ import annotations

from typing import Any

import accelerate
import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
from transformers import Trainer, TrainerCallback, TrainingArguments

import trainingjob.accelerate
import trainingjob.lightning
import trainingjob.transformers
from loops.common import FEATURES, perceptron
from loops.run import BATCH, Run

ITEMS = 60


class Items(Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return ITEMS

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        x = torch.randn(FEATURES, generator=torch.Generator().manual_seed(index))
        return {"x": x, "labels": x.sum(0, keepdim=True), "index": torch.tensor(index)}


class Adversaries(lightning.LightningModule):
    """Module with two optimizers, which are stepped by hand."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.run_ = run
        torch.manual_seed(0)
        self.generator = nn.Sequential(nn.Linear(4, 16), nn.Dropout(0.2), nn.Linear(16, FEATURES))
        self.critic = nn.Sequential(nn.Linear(FEATURES, 16), nn.Dropout(0.2), nn.LeakyReLU(), nn.Linear(16, 1))

    def training_step(self, batch: dict[str, torch.Tensor], place: int) -> None:
        generator, critic = self.optimizers()
        real = batch["x"]
        noise = torch.randn(len(real), 4)
        loss = nn.functional.softplus(self.critic(self.generator(noise).detach()) - self.critic(real)).mean()
        critic.zero_grad()
        self.manual_backward(loss)
        critic.step()
        generated = nn.functional.softplus(-self.critic(self.generator(noise))).mean()
        generator.zero_grad()
        self.manual_backward(generated)
        generator.step()
        step = self.trainer.global_step - 2  # Lightning counts the steps of both optimizers.
        self.run_.record(step, critic=loss.item(), generator=generated.item())
        self.run_.consumed(step, batch["index"].tolist())

    def configure_optimizers(self) -> Any:
        generator = torch.optim.Adam(self.generator.parameters(), lr=0.01)
        return generator, torch.optim.SGD(self.critic.parameters(), lr=0.02, momentum=0.9)


class Regression(lightning.LightningModule):
    def __init__(self, run: Run) -> None:
        super().__init__()
        self.run_ = run
        self.model = perceptron(nn.BatchNorm1d(16), nn.Dropout(0.2))

    def training_step(self, batch: dict[str, torch.Tensor], place: int) -> torch.Tensor:
        loss = (self.model(batch["x"]) - batch["labels"]).square().mean()
        step, rate = self.trainer.global_step, self.trainer.optimizers[0].param_groups[0]["lr"]
        self.run_.record(step, **{f"loss_{place}": loss.item()}, rate=rate)
        self.run_.consumed(step, batch["index"].tolist())
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.7)]


def fit(run: Run, module: lightning.LightningModule, **options: Any) -> None:
    trainer = lightning.Trainer(
        max_steps=run.steps,
        max_epochs=-1,
        accelerator="cpu",
        devices=run.size,
        strategy="ddp" if run.size > 1 else "auto",
        callbacks=[trainingjob.lightning.Callback(overhead=1000.0)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        **options,
    )
    torch.manual_seed(run.rank)
    trainer.fit(module, DataLoader(Items(), BATCH // run.size, shuffle=True))


def lightning_gan(run: Run) -> None:
    fit(run, Adversaries(run))


def lightning_accumulation(run: Run) -> None:
    fit(run, Regression(run), accumulate_grad_batches=4)


class Learner(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.layers = perceptron(nn.Dropout(dropout))

    def forward(self, x: torch.Tensor, labels: torch.Tensor, index: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": (self.layers(x) - labels).square().mean()}


def trainer(run: Run, dropout: float = 0.2) -> None:
    """Train with the Hugging Face Trainer, which accumulates four batches."""
    micro_losses: list[float] = []
    indexes: list[int] = []

    class Tell(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            run.record(state.global_step - 1, loss=list(micro_losses))
            run.consumed(state.global_step - 1, list(indexes))
            micro_losses.clear()
            indexes.clear()

    class Telling(Trainer):
        def compute_loss(self, model: Any, inputs: Any, **more: Any) -> Any:
            loss = super().compute_loss(model, inputs, **more)
            micro_losses.append(loss.item())
            indexes.extend(inputs["index"].tolist())
            return loss

    arguments = TrainingArguments(
        output_dir="unused",
        max_steps=run.steps,
        per_device_train_batch_size=BATCH // run.size,
        gradient_accumulation_steps=4,
        learning_rate=0.01,
        lr_scheduler_type="cosine",
        save_strategy="no",
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=False,
        remove_unused_columns=False,
        ddp_find_unused_parameters=False,
    )
    torch.manual_seed(0)
    telling = Telling(model=Learner(dropout), args=arguments, train_dataset=Items(), callbacks=[Tell()])
    trainingjob.transformers.train(telling, overhead=1000.0)


def trainer_without_dropout(run: Run) -> None:
    trainer(run, dropout=0.0)


def accelerated(run: Run, accumulate: int = 4, dropout: float = 0.0) -> None:
    """Run the loop of docs/script-state.md: a commit for each batch, an optimizer step for four of them."""
    configuration = accelerate.DataLoaderConfiguration(split_batches=True)
    accelerator = accelerate.Accelerator(
        cpu=True, dataloader_config=configuration, gradient_accumulation_steps=accumulate
    )
    torch.manual_seed(0)
    model = Learner(dropout)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.7)
    loader = DataLoader(Items(), BATCH, shuffle=True)
    model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
    state = trainingjob.accelerate.register(accelerator, overhead=1000.0)
    step = state.restore(default=0)
    while step < run.steps:
        for batch in state.batches(loader):
            with accelerator.accumulate(model):
                loss = model(**batch)["loss"]
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            run.consumed(step, batch["index"].tolist())
            run.record(step, rate=scheduler.get_last_lr())
            run.record_own(step, loss=loss.item())
            step += 1
            state.commit(step - 1, durable=step == run.steps)
            if step == run.steps:
                break


def accelerated_with_dropout(run: Run) -> None:
    accelerated(run, dropout=0.2)


def accelerated_by_batch(run: Run) -> None:
    accelerated(run, accumulate=1)
