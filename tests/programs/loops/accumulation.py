"""Loops with gradient accumulation over several micro-batches, and loops in which a scaler skips steps."""

from __future__ import annotations

import contextlib

import torch
from torch import nn

import trainingjob
from loops.common import batch, parallel, perceptron, squares
from loops.run import BATCH, Run

MICRO_BATCHES = 4


def by_step(run: Run) -> None:
    """Commit once per optimizer step."""
    model = parallel(run, perceptron())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    state = trainingjob.State(model=model, optimizer=optimizer, overhead=1000.0)
    for step in range(state.restore(default=0), run.steps):
        optimizer.zero_grad()
        total = 0.0
        for micro in range(MICRO_BATCHES):
            last = micro == MICRO_BATCHES - 1
            with contextlib.nullcontext() if last or run.size == 1 else model.no_sync():
                loss = squares(run, model, step * MICRO_BATCHES + micro, step) / MICRO_BATCHES
                loss.backward()
            total += loss.item()
        optimizer.step()
        run.record(step, loss=run.total(total))
        state.commit(step, durable=step == run.steps - 1)


def by_micro_batch(run: Run) -> None:
    """Count micro-batches, and commit after each of them."""
    model = parallel(run, perceptron())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    seen = {"micro_batches": 0, "steps": 0}
    state = trainingjob.State(model=model, optimizer=optimizer, scheduler=scheduler, seen=seen, overhead=1000.0)
    for micro in range(state.restore(default=0), run.steps):
        last = micro % MICRO_BATCHES == MICRO_BATCHES - 1
        with contextlib.nullcontext() if last or run.size == 1 else model.no_sync():
            loss = squares(run, model, micro) / MICRO_BATCHES
            loss.backward()
        seen["micro_batches"] += 1
        if last:
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            seen["steps"] += 1
        run.record(micro, loss=run.total(loss), rate=optimizer.param_groups[0]["lr"], seen=dict(seen))
        state.commit(micro, durable=micro == run.steps - 1)


def zeroed_first(run: Run) -> None:
    """Commit after each micro-batch, and zero the gradients before an accumulation instead of after the step."""
    model = parallel(run, perceptron())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    state = trainingjob.State(model=model, optimizer=optimizer, overhead=1000.0)
    for micro in range(state.restore(default=0), run.steps):
        if micro % MICRO_BATCHES == 0:
            optimizer.zero_grad()
        loss = squares(run, model, micro) / MICRO_BATCHES
        loss.backward()
        if micro % MICRO_BATCHES == MICRO_BATCHES - 1:
            optimizer.step()
        run.record(micro, loss=run.total(loss))
        state.commit(micro, durable=micro == run.steps - 1)


def scaled(run: Run) -> None:
    """Train with GradScaler, autocast and ReduceLROnPlateau."""
    model = parallel(run, perceptron())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.5)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=3)
    state = trainingjob.State(model=model, optimizer=optimizer, scheduler=scheduler, scaler=scaler, overhead=1000.0)
    for step in range(state.restore(default=0), run.steps):
        x, y = batch(run, step)
        with torch.autocast("cpu", torch.bfloat16):
            output = model(x)
        loss = run.mean((output.float() - y).square())
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        total = run.total(loss)
        scheduler.step(total)
        scale, rate = scaler.get_scale(), optimizer.param_groups[0]["lr"]
        run.record(step, loss=total, norm=norm.item(), scale=scale, rate=rate)
        state.commit(step, durable=step == run.steps - 1)


OVERFLOWS = (4, 5)


def overflowing(run: Run) -> None:
    """Let the scaler skip two steps with infinite gradients, and halve its scale after each."""
    model = parallel(run, perceptron())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=3)
    seen = {"items": 0}
    state = trainingjob.State(model=model, optimizer=optimizer, scaler=scaler, seen=seen, overhead=1000.0)
    for step in range(state.restore(default=0), run.steps):
        loss = squares(run, model, step)
        optimizer.zero_grad()
        scaler.scale(loss * (torch.inf if step in OVERFLOWS else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
        seen["items"] += BATCH
        run.record(step, loss=run.total(loss), scale=scaler.get_scale())
        state.commit(step, durable=step == run.steps - 1)


def uneven(run: Run) -> None:
    """Train epochs of five micro-batches, with an optimizer step at the end of each, after an accumulation of one."""
    model = parallel(run, perceptron())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    state = trainingjob.State(model=model, optimizer=optimizer, overhead=1000.0)
    for micro in range(state.restore(default=0), run.steps):
        place = micro % 5
        loss = squares(run, model, micro)
        loss.backward()
        if place in (3, 4):
            optimizer.step()
            optimizer.zero_grad()
        run.record(micro, loss=run.total(loss))
        state.commit(micro, durable=micro == run.steps - 1)


def closure(run: Run) -> None:
    """Compute gradients in the closure that the optimizer's step calls."""
    model = parallel(run, perceptron())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, nesterov=True)
    state = trainingjob.State(model=model, optimizer=optimizer, overhead=1000.0)
    for step in range(state.restore(default=0), run.steps):

        def loss_of_step(step: int = step) -> torch.Tensor:
            optimizer.zero_grad()
            loss = squares(run, model, step)
            loss.backward()
            return loss

        run.record(step, loss=run.total(optimizer.step(loss_of_step)))
        state.commit(step, durable=step == run.steps - 1)
