"""Models on a GPU, with parts on the CPU. Without a GPU, a mixed model is wholly on the CPU."""

from __future__ import annotations

import torch
from torch import nn

import trainingjob
from loops.common import FEATURES, batch, parallel
from loops.run import BATCH, Run


def mixed(run: Run) -> None:
    """Train a model on a GPU, with a sparse table, its optimizer, and an average of the model's weights on the CPU."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    table = parallel(run, nn.Embedding(11, 8, sparse=True))
    rest = parallel(run, nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 11)).to(device))
    sparse_optimizer = torch.optim.SparseAdam(table.parameters(), lr=0.02)
    optimizer = torch.optim.AdamW(rest.parameters(), lr=0.02)  # Moments are on the GPU, step counts on the CPU.
    average = [parameter.detach().cpu().clone() for parameter in rest.parameters()]
    kept = {"average": average, "losses": torch.zeros(4, device=device)}
    state = trainingjob.State(
        table=table, rest=rest, sparse_optimizer=sparse_optimizer, optimizer=optimizer, kept=kept, overhead=1000.0
    )
    for step in range(state.restore(default=0), run.steps):
        mine = run.share()
        tokens = torch.randint(11, (BATCH, 5), generator=torch.Generator().manual_seed(step))[mine.start : mine.stop]
        run.consumed(step, [step * BATCH + row for row in mine])
        scores = rest(table(tokens[:, :-1]).to(device)).flatten(0, 1)
        losses = nn.functional.cross_entropy(scores, tokens[:, 1:].flatten().to(device), reduction="none")
        loss = run.mean(losses) / (tokens.shape[1] - 1)
        sparse_optimizer.zero_grad()
        optimizer.zero_grad()
        loss.backward()
        sparse_optimizer.step()
        optimizer.step()
        for mean, parameter in zip(average, rest.parameters(), strict=True):
            mean.lerp_(parameter.detach().cpu(), 0.1)
        total = run.total(loss.cpu())
        kept["losses"][step % 4] = total
        run.record(step, loss=total, average=average[0], losses=kept["losses"])
        state.commit(step, durable=step == run.steps - 1)


def synchronized(run: Run) -> None:
    """Train with torch's SyncBatchNorm, which does not support CPU tensors."""
    torch.manual_seed(0)
    # There is no bias before the norm: its gradient would be only rounding, which AdamW scales up.
    layers = [nn.Linear(FEATURES, 16, bias=False), nn.SyncBatchNorm(16), nn.Tanh(), nn.Linear(16, 1)]
    model = nn.Sequential(*layers)
    model = parallel(run, model.cuda())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    state = trainingjob.State(model=model, optimizer=optimizer, overhead=1000.0)
    for step in range(state.restore(default=0), run.steps):
        x, y = batch(run, step)
        loss = run.mean((model(x.cuda()) - y.cuda()).square())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.record(step, loss=run.total(loss.cpu()))
        state.commit(step, durable=step == run.steps - 1)
