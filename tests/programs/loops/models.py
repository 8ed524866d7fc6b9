"""Several models, averages of models, compiled models, shared and frozen parts, and sharded models."""

from __future__ import annotations

import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.utils.parametrizations import spectral_norm, weight_norm
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn, update_bn
from torch.utils.checkpoint import checkpoint

import trainingjob
from loops.common import FEATURES, batch, evaluated, parallel, perceptron, squares
from loops.run import BATCH, Run


def gan(run: Run) -> None:
    torch.manual_seed(0)
    generator = parallel(run, nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, FEATURES)))
    critic = parallel(run, nn.Sequential(nn.Linear(FEATURES, 16), nn.LeakyReLU(), nn.Linear(16, 1)))
    generator_optimizer = torch.optim.Adam(generator.parameters(), lr=0.01, betas=(0.5, 0.9))
    critic_optimizer = torch.optim.SGD(critic.parameters(), lr=0.02, momentum=0.9)
    state = trainingjob.State(
        generator=generator,
        critic=critic,
        generator_optimizer=generator_optimizer,
        critic_optimizer=critic_optimizer,
        overhead=1000.0,
    )
    for step in range(state.restore(default=0), run.steps):
        real, _ = batch(run, step)
        mine = run.share()
        noise = torch.randn(BATCH, 4, generator=torch.Generator().manual_seed(10_000 + step))[mine.start : mine.stop]
        critic_loss = run.mean(nn.functional.softplus(critic(generator(noise).detach()) - critic(real)))
        critic_optimizer.zero_grad()
        critic_loss.backward()
        critic_optimizer.step()
        generator_loss = run.mean(nn.functional.softplus(-critic(generator(noise))))
        generator_optimizer.zero_grad()
        generator_loss.backward()
        generator_optimizer.step()
        run.record(step, critic=run.total(critic_loss), generator=run.total(generator_loss))
        state.commit(step, durable=step == run.steps - 1)


def gan_with_rare_critic(run: Run) -> None:
    """Train the critic in every third step only, so that most commits follow a step of one optimizer."""
    torch.manual_seed(0)
    generator = parallel(run, nn.Linear(4, FEATURES))
    critic = parallel(run, nn.Linear(FEATURES, 1))
    generator_optimizer = torch.optim.Adam(generator.parameters(), lr=0.01)
    critic_optimizer = torch.optim.Adam(critic.parameters(), lr=0.02)
    state = trainingjob.State(
        models=nn.ModuleList([generator, critic]),
        generator_optimizer=generator_optimizer,
        critic_optimizer=critic_optimizer,
        overhead=1000.0,
    )
    for step in range(state.restore(default=0), run.steps):
        real, _ = batch(run, step)
        noise = real[:, :4]
        if step % 3 == 0:
            critic_optimizer.zero_grad()
            run.mean(nn.functional.softplus(critic(generator(noise).detach()) - critic(real))).backward()
            critic_optimizer.step()
        generator_optimizer.zero_grad()
        loss = run.mean(nn.functional.softplus(-critic(generator(noise))))
        loss.backward()
        generator_optimizer.step()
        run.record(step, loss=run.total(loss))
        state.commit(step, durable=step == run.steps - 1)


def ema(run: Run) -> None:
    model = parallel(run, perceptron())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.05, total_steps=run.steps)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    state = trainingjob.State(model=model, average=average, optimizer=optimizer, scheduler=scheduler, overhead=1000.0)
    for step in range(state.restore(default=0), run.steps):
        loss = squares(run, model, step)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        average.update_parameters(model)
        rate, momentum = optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["betas"][0]
        run.record(step, loss=run.total(loss), rate=rate, momentum=momentum)
        state.commit(step, durable=step == run.steps - 1)
    run.finished(evaluation=evaluated(average))


def teacher(run: Run) -> None:
    """Distil a student from a frozen copy of itself, which is updated in every fourth step."""
    student = parallel(run, perceptron())
    target = copy.deepcopy(student.module if run.size > 1 else student).requires_grad_(False)
    optimizer = torch.optim.Adam(student.parameters(), lr=0.01)
    state = trainingjob.State(student=student, target=target, optimizer=optimizer, overhead=1000.0)
    for step in range(state.restore(default=0), run.steps):
        x, y = batch(run, step)
        loss = run.mean((student(x) - y).square() + 0.3 * (student(x) - target(x)).square())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 4 == 3:
            target.load_state_dict((student.module if run.size > 1 else student).state_dict())
        run.record(step, loss=run.total(loss))
        state.commit(step, durable=step == run.steps - 1)


def swa(run: Run) -> None:
    model = parallel(run, perceptron(nn.BatchNorm1d(16)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    average, begins = AveragedModel(model), 4
    scheduler, averaging = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9), SWALR(optimizer, swa_lr=0.01)
    state = trainingjob.State(
        model=model,
        average=average,
        optimizer=optimizer,
        scheduler=scheduler,
        averaging=averaging,
        overhead=1000.0,
    )
    for step in range(state.restore(default=0), run.steps):
        loss = squares(run, model, step)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step < begins:
            scheduler.step()
        else:
            average.update_parameters(model)
            averaging.step()
        run.record(step, loss=run.total(loss), rate=optimizer.param_groups[0]["lr"])
        state.commit(step, durable=step == run.steps - 1)
    rows = torch.randn(40, FEATURES, generator=torch.Generator().manual_seed(5))
    update_bn(rows.split(10), average)
    run.finished(evaluation=evaluated(average))


def compiled(run: Run) -> None:
    torch.manual_seed(run.rank)
    model = torch.compile(parallel(run, perceptron(nn.Dropout(0.3))), backend="eager")
    torch.manual_seed(100 + run.rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    state = trainingjob.State(model=model, optimizer=optimizer, overhead=1000.0)
    for step in range(state.restore(default=0), run.steps):
        loss = squares(run, model, step)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.record(step, loss=run.total(loss))
        state.commit(step, durable=step == run.steps - 1)


class Tied(nn.Module):
    """Model whose output weight is the embedding's, and whose first layer is frozen."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(11, 8)
        self.first = nn.Linear(8, 8).requires_grad_(False)
        self.second = nn.Linear(8, 8)
        self.output = nn.Linear(8, 11, bias=False)
        self.output.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.output(torch.tanh(self.second(torch.tanh(self.first(self.embedding(tokens))))))


def tokens_of(run: Run, step: int) -> torch.Tensor:
    tokens = torch.randint(11, (BATCH, 5), generator=torch.Generator().manual_seed(step))
    mine = run.share()
    run.consumed(step, [step * BATCH + row for row in mine])
    return tokens[mine.start : mine.stop]


def next_tokens(run: Run, model: nn.Module, step: int) -> torch.Tensor:
    tokens = tokens_of(run, step)
    scores = model(tokens[:, :-1]).flatten(0, 1)
    losses = nn.functional.cross_entropy(scores, tokens[:, 1:].flatten(), reduction="none")
    return run.mean(losses) / (tokens.shape[1] - 1)


def language(run: Run, model: nn.Module) -> None:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.02)
    state = trainingjob.State(model=model, optimizer=optimizer, overhead=1000.0)
    for step in range(state.restore(default=0), run.steps):
        loss = next_tokens(run, model, step)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.record(step, loss=run.total(loss))
        state.commit(step, durable=step == run.steps - 1)


def tied_ddp(run: Run) -> None:
    language(run, parallel(run, Tied()))


def tied_fsdp2(run: Run) -> None:
    model = Tied()
    fully_shard(model.second)
    fully_shard(model)
    language(run, model)


def sparse(run: Run) -> None:
    """Train an embedding with sparse gradients by an optimizer of its own."""
    torch.manual_seed(0)
    embedding = parallel(run, nn.Embedding(11, 8, sparse=True))
    rest = parallel(run, nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 11)))
    sparse_optimizer = torch.optim.SparseAdam(embedding.parameters(), lr=0.02)
    optimizer = torch.optim.AdamW(rest.parameters(), lr=0.02)
    state = trainingjob.State(
        embedding=embedding,
        rest=rest,
        sparse_optimizer=sparse_optimizer,
        optimizer=optimizer,
        overhead=1000.0,
    )
    for step in range(state.restore(default=0), run.steps):
        tokens = tokens_of(run, step)
        scores = rest(embedding(tokens[:, :-1])).flatten(0, 1)
        losses = nn.functional.cross_entropy(scores, tokens[:, 1:].flatten(), reduction="none")
        loss = run.mean(losses) / (tokens.shape[1] - 1)
        sparse_optimizer.zero_grad()
        optimizer.zero_grad()
        loss.backward()
        sparse_optimizer.step()
        optimizer.step()
        run.record(step, loss=run.total(loss))
        state.commit(step, durable=step == run.steps - 1)


def few_rows(run: Run) -> None:
    """Train with FSDP2 and fewer rows than ranks, so that some ranks hold no part of several tensors of one shape."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(FEATURES, 2), nn.Tanh(), nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 1))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    plain(run, model, torch.optim.AdamW(model.parameters(), lr=0.02))


def fsdp1(run: Run) -> None:
    if run.size == 1:  # FSDP needs a process group, which a single rank under torchrun has too.
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    model = FullyShardedDataParallel(perceptron(), device_id=torch.device("cpu"), use_orig_params=True)
    plain(run, model, torch.optim.AdamW(model.parameters(), lr=0.02))


def hybrid(run: Run) -> None:
    """Train with FSDP2 over two ranks, and with copies of that (HSDP)."""
    mesh = init_device_mesh("cpu", (run.size // 2, 2), mesh_dim_names=("replicate", "shard"))
    model = perceptron()
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    plain(run, model, torch.optim.AdamW(model.parameters(), lr=0.02))


def plain(run: Run, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    state = trainingjob.State(model=model, optimizer=optimizer, overhead=1000.0)
    for step in range(state.restore(default=0), run.steps):
        loss = squares(run, model, step)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.record(step, loss=run.total(loss))
        state.commit(step, durable=step == run.steps - 1)


class Block(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(self.down(torch.relu(self.up(self.norm(x)))))


def tensor_parallel(run: Run, dropout: float = 0.0) -> None:
    """Train with FSDP2 over tensor parallelism of two ranks. A batch is divided among the groups."""
    groups = run.size // 2
    mesh = init_device_mesh("cpu", (groups, 2), mesh_dim_names=("data", "tensor"))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(FEATURES, 8), Block(dropout), nn.Linear(8, 1))
    parallelize_module(model[1], mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    fully_shard(model[1], mesh=mesh["data"])
    fully_shard(model, mesh=mesh["data"])
    torch.manual_seed(run.rank // 2)  # Dropout is the same within a group.
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    state = trainingjob.State(model=model, optimizer=optimizer, overhead=1000.0)
    group = run.rank // 2
    for step in range(state.restore(default=0), run.steps):
        mine = slice(BATCH * group // groups, BATCH * (group + 1) // groups)
        x = torch.randn(BATCH, FEATURES, generator=torch.Generator().manual_seed(step))[mine]
        loss = (model(x) - x.sum(1, keepdim=True)).square().sum() / BATCH * groups
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.record(step, loss=run.total(loss))
        state.commit(step, durable=step == run.steps - 1)


def tensor_parallel_with_dropout(run: Run) -> None:
    tensor_parallel(run, dropout=0.2)


def normed(run: Run) -> None:
    """Train weights with parametrizations, one of which keeps vectors of its own in buffers."""
    torch.manual_seed(0)
    model = nn.Sequential(spectral_norm(nn.Linear(FEATURES, 16)), nn.Tanh(), weight_norm(nn.Linear(16, 1)))
    model = parallel(run, model)
    plain(run, model, torch.optim.Adam(model.parameters(), lr=0.01))


def checkpointed(run: Run) -> None:
    """Recompute activations with dropout in the backward pass, with the same random numbers."""
    torch.manual_seed(0)
    first, second = nn.Linear(FEATURES, 16), nn.Linear(16, 1)
    body = nn.Sequential(nn.Tanh(), nn.Dropout(0.3))
    torch.manual_seed(run.rank)
    model = parallel(run, nn.ModuleList([first, second]))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    state = trainingjob.State(model=model, optimizer=optimizer, overhead=1000.0)
    inner = model.module if run.size > 1 else model
    for step in range(state.restore(default=0), run.steps):
        x, y = batch(run, step)
        loss = run.mean((inner[1](checkpoint(body, inner[0](x), use_reentrant=False)) - y).square())
        optimizer.zero_grad()
        loss.backward()
        if run.size > 1:
            for parameter in model.parameters():
                torch.distributed.all_reduce(parameter.grad)
                parameter.grad /= run.size
        optimizer.step()
        run.record(step, loss=run.total(loss))
        state.commit(step, durable=step == run.steps - 1)


def lazy(run: Run) -> None:
    """Train a module that derives its shape from the first batch."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.LazyLinear(16), nn.Tanh(), nn.LazyLinear(1))
    model(torch.zeros(1, FEATURES))
    model = parallel(run, model)
    plain(run, model, torch.optim.Adam(model.parameters(), lr=0.01))


def recurrent(run: Run) -> None:
    torch.manual_seed(0)
    model = parallel(run, nn.ModuleDict({"memory": nn.LSTM(FEATURES, 8, num_layers=2), "out": nn.Linear(8, 1)}))
    inner = model.module if run.size > 1 else model
    optimizer = torch.optim.RMSprop(model.parameters(), lr=0.01, momentum=0.5, centered=True)
    state = trainingjob.State(model=model, optimizer=optimizer, overhead=1000.0)
    for step in range(state.restore(default=0), run.steps):
        x, y = batch(run, step)
        hidden, _ = inner["memory"](x.expand(3, -1, -1))
        loss = run.mean((inner["out"](hidden[-1]) - y).square())
        optimizer.zero_grad()
        loss.backward()
        for parameter in model.parameters():
            if run.size > 1:
                torch.distributed.all_reduce(parameter.grad)
                parameter.grad /= run.size
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        run.record(step, loss=run.total(loss), norm=norm.item())
        state.commit(step, durable=step == run.steps - 1)
