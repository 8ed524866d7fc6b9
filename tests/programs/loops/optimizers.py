"""Loops with many optimizers, parameter groups and schedules."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn, optim
from torch.distributed.fsdp import fully_shard
from torch.optim import lr_scheduler

import trainingjob
from loops.common import FEATURES, parallel, perceptron, squares
from loops.run import Run


def train(run: Run, model: nn.Module, state: trainingjob.State, optimizers: list[optim.Optimizer]) -> None:
    for step in range(state.restore(default=0), run.steps):
        loss = squares(run, model, step)
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        run.record(step, loss=run.total(loss))
        state.commit(step, durable=step == run.steps - 1)


def lbfgs(run: Run) -> None:
    model = perceptron()
    optimizer = optim.LBFGS(model.parameters(), lr=0.1, max_iter=4, history_size=3, line_search_fn="strong_wolfe")
    state = trainingjob.State(model=model, optimizer=optimizer, overhead=1000.0)
    for step in range(state.restore(default=0), run.steps):

        def closure(step: int = step) -> torch.Tensor:
            x = torch.randn(12, FEATURES, generator=torch.Generator().manual_seed(step // 4))
            optimizer.zero_grad()
            loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
            loss.backward()
            return loss

        run.record(step, loss=optimizer.step(closure).item())
        state.commit(step, durable=step == run.steps - 1)


def muon(run: Run) -> None:
    """Train matrices with Muon and the rest with AdamW, on FSDP2."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(FEATURES, 16), nn.Tanh(), nn.Linear(16, 1))
    fully_shard(model)
    matrices, rest = [model[0].weight], [model[0].bias, *model[2].parameters()]
    optimizers: list[optim.Optimizer] = [optim.Muon(matrices, lr=0.02), optim.AdamW(rest, lr=0.02)]
    state = trainingjob.State(model=model, muon=optimizers[0], adamw=optimizers[1], overhead=1000.0)
    train(run, model, state, optimizers)


EVERY: dict[str, Any] = {
    "adadelta": lambda parameters: optim.Adadelta(parameters, lr=0.5),
    "adagrad": lambda parameters: optim.Adagrad(parameters, lr=0.05),
    "adafactor": lambda parameters: optim.Adafactor(parameters, lr=0.05),
    "adamax": lambda parameters: optim.Adamax(parameters),
    "amsgrad": lambda parameters: optim.AdamW(parameters, amsgrad=True),
    "asgd": lambda parameters: optim.ASGD(parameters, t0=3),
    "fused": lambda parameters: optim.Adam(parameters, fused=True),
    "rate_in_tensor": lambda parameters: optim.Adam(parameters, lr=torch.tensor(0.01), capturable=False, foreach=False),
    "nadam": lambda parameters: optim.NAdam(parameters, momentum_decay=0.1),
    "radam": lambda parameters: optim.RAdam(parameters),
    "rmsprop": lambda parameters: optim.RMSprop(parameters, centered=True, momentum=0.9),
    "rprop": lambda parameters: optim.Rprop(parameters),
    "sgd": lambda parameters: optim.SGD(parameters, lr=0.01),
}
"""Each of torch's optimizers, by the content of its state."""


def every_optimizer(run: Run) -> None:
    """Train one model, each part of which has an optimizer of another kind."""
    torch.manual_seed(0)
    model = parallel(run, nn.ModuleDict({name: nn.Linear(FEATURES, 3) for name in EVERY}))
    inner = model.module if run.size > 1 else model
    optimizers = {name: make(inner[name].parameters()) for name, make in EVERY.items()}
    state = trainingjob.State(model=model, **optimizers, overhead=1000.0)
    for step in range(state.restore(default=0), run.steps):
        x = torch.randn(12, FEATURES, generator=torch.Generator().manual_seed(step))
        loss = sum((inner[name](x) - x[:, :3]).square().mean() for name in EVERY)
        model.zero_grad()
        loss.backward()
        for optimizer in optimizers.values():
            optimizer.step()
        run.record(step, loss=loss.item())
        state.commit(step, durable=step == run.steps - 1)


def every_scheduler(run: Run) -> None:
    """Use schedules per step, and per epoch of four steps, each with an optimizer of its own."""
    torch.manual_seed(0)
    makes = {
        "step": lambda o: lr_scheduler.StepLR(o, 2, 0.5),
        "milestones": lambda o: lr_scheduler.MultiStepLR(o, [1, 3, 7], 0.5),
        "function": lambda o: lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)),
        "factor": lambda o: lr_scheduler.MultiplicativeLR(o, lambda step: 0.9),
        "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 6),
        "restarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 2, 2),
        "cycle": lambda o: lr_scheduler.CyclicLR(o, 0.001, 0.1, step_size_up=3, mode="exp_range", gamma=0.9),
        "one_cycle": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=run.steps + 1),
        "sequence": lambda o: lr_scheduler.SequentialLR(
            o, [lr_scheduler.LinearLR(o, 0.1, total_iters=3), lr_scheduler.PolynomialLR(o, 9, 2.0)], [4]
        ),
        "chain": lambda o: lr_scheduler.ChainedScheduler(
            [lr_scheduler.ConstantLR(o, 0.1, 3), lr_scheduler.ExponentialLR(o, 0.9)]
        ),
    }
    model = nn.ModuleDict({name: nn.Linear(FEATURES, 1) for name in makes})
    optimizers = {name: optim.SGD(model[name].parameters(), lr=0.05, momentum=0.9) for name in makes}
    schedulers = {name: make(optimizers[name]) for name, make in makes.items()}
    state = trainingjob.State(
        model=model,
        **{f"{name}_optimizer": each for name, each in optimizers.items()},
        **{f"{name}_scheduler": each for name, each in schedulers.items()},
        overhead=1000.0,
    )
    for step in range(state.restore(default=0), run.steps):
        x = torch.randn(12, FEATURES, generator=torch.Generator().manual_seed(step))
        loss = sum((each(x) - x.sum(1, keepdim=True)).square().mean() for each in model.values())
        model.zero_grad()
        loss.backward()
        for optimizer in optimizers.values():
            optimizer.step()
        for name, scheduler in schedulers.items():
            if name not in ("step", "milestones") or step % 4 == 3:
                scheduler.step()
        rates = {name: each.param_groups[0]["lr"] for name, each in optimizers.items()}
        run.record(step, loss=loss.item(), rates=rates)
        state.commit(step, durable=step == run.steps - 1)


def unfrozen_by_progress(run: Run) -> None:
    """Train the first layer from the fifth step on. A restarted run finds out whether that step is over."""
    unfreezing(run, lambda progress: progress is not None and progress["unfrozen"])


def unfrozen_at_once(run: Run) -> None:
    """Create all groups at the start of a restarted run."""
    unfreezing(run, lambda progress: run.restarted)


def unfrozen_too_late(run: Run) -> None:
    """Add the group in a restarted run only at the step at which the first run added it."""
    unfreezing(run, lambda progress: False)


def unfreezing(run: Run, already: Any) -> None:
    model = perceptron()
    first, last = model[0], model[-1]
    for parameter in first.parameters():
        parameter.requires_grad_(False)
    model = parallel(run, model, find_unused_parameters=True)
    optimizer = optim.AdamW(last.parameters(), lr=0.02, weight_decay=0.1)
    progress: dict[str, Any] = {"unfrozen": False}
    state = trainingjob.State(model=model, optimizer=optimizer, progress=progress, overhead=1000.0)

    def unfreeze() -> None:
        for parameter in first.parameters():
            parameter.requires_grad_(True)
        optimizer.add_param_group({"params": list(first.parameters()), "lr": 0.01, "weight_decay": 0.0})
        progress["unfrozen"] = True

    if already(state.peek("progress")):
        unfreeze()
    for step in range(state.restore(default=0), run.steps):
        if step == 4 and not progress["unfrozen"]:
            unfreeze()
        loss = squares(run, model, step)
        optimizer.zero_grad()
        loss.backward()
        for parameter in first.parameters():  # DDP does not know these parameters.
            if parameter.grad is not None and run.size > 1:
                torch.distributed.all_reduce(parameter.grad)
                parameter.grad /= run.size
        optimizer.step()
        run.record(step, loss=run.total(loss))
        state.commit(step, durable=step == run.steps - 1)


def grouped(run: Run, *groups: dict[str, Any]) -> None:
    """Train with `groups`: names of parameters, and options."""
    model = perceptron()
    named = dict(model.named_parameters())
    given = [{**group, "params": [named[name] for name in group["params"]]} for group in groups]
    optimizer = optim.AdamW(given, lr=0.02)
    model = parallel(run, model)
    state = trainingjob.State(model=model, optimizer=optimizer, overhead=1000.0)
    train(run, model, state, [optimizer])


DECAY = {"params": ["0.weight", "2.weight"], "weight_decay": 0.5, "lr": 0.05}
NO_DECAY = {"params": ["0.bias", "2.bias"], "weight_decay": 0.0}


def groups_in_another_order(run: Run) -> None:
    grouped(run, *((NO_DECAY, DECAY) if run.restarted else (DECAY, NO_DECAY)))


def parameters_in_another_order(run: Run) -> None:
    turned = {**DECAY, "params": DECAY["params"][::-1]}
    grouped(run, *((turned, NO_DECAY) if run.restarted else (DECAY, NO_DECAY)))


def group_split(run: Run) -> None:
    """Split the old groups: each new group has parameters of one of them."""
    first, second = ({**DECAY, "params": [name]} for name in DECAY["params"])
    grouped(run, *((first, NO_DECAY, second) if run.restarted else (DECAY, NO_DECAY)))


def groups_merged(run: Run) -> None:
    """Merge two old groups with different rates into one new group."""
    merged = {"params": [*DECAY["params"], *NO_DECAY["params"]]}
    grouped(run, *((merged,) if run.restarted else (DECAY, NO_DECAY)))


def parameter_moved(run: Run) -> None:
    """Exchange two parameters between groups, which keep their sizes."""
    moved = ({**DECAY, "params": ["0.weight", "2.bias"]}, {**NO_DECAY, "params": ["0.bias", "2.weight"]})
    grouped(run, *(moved if run.restarted else (DECAY, NO_DECAY)))


def parameter_left_out(run: Run) -> None:
    """Leave out a parameter that the old optimizer trained."""
    fewer = {**NO_DECAY, "params": ["0.bias"]}
    grouped(run, *((DECAY, fewer) if run.restarted else (DECAY, NO_DECAY)))


def made_before_conversion(run: Run) -> None:
    """Create the optimizer before the model is converted to float64."""
    model = perceptron()
    optimizer = optim.Adam(model.parameters(), lr=0.02)
    model.to(torch.float64)
    wrapped = nn.Sequential(model)
    wrapped.register_forward_pre_hook(lambda _, inputs: tuple(each.double() for each in inputs))
    model = parallel(run, wrapped)
    state = trainingjob.State(model=model, optimizer=optimizer, overhead=1000.0)
    train(run, model, state, [optimizer])


def replaced(run: Run) -> None:
    """Replace the last layer in the fourth step by a new one, also in the optimizer's group."""
    model = perceptron()
    optimizer = optim.AdamW(model.parameters(), lr=0.02)
    state = trainingjob.State(model=model, optimizer=optimizer, overhead=1000.0)
    for step in range(state.restore(default=0), run.steps):
        if step == 3:
            torch.manual_seed(7)
            model[-1] = nn.Linear(16, 1)
            optimizer.param_groups[0]["params"] = list(model.parameters())
        loss = squares(run, model, step)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.record(step, loss=loss.item())
        state.commit(step, durable=step == run.steps - 1)


def grown(run: Run, already: Any) -> None:
    """Add a layer to the model in the fifth step."""
    model = perceptron()
    optimizer = optim.AdamW(model.parameters(), lr=0.02)
    progress: dict[str, Any] = {"grown": False}
    state = trainingjob.State(model=model, optimizer=optimizer, progress=progress, overhead=1000.0)

    def grow() -> None:
        torch.manual_seed(7)
        model.append(nn.Linear(1, 1))
        optimizer.add_param_group({"params": model[-1].parameters(), "lr": 0.01})
        progress["grown"] = True

    if already(state.peek("progress")):
        grow()
    for step in range(state.restore(default=0), run.steps):
        if step == 4 and not progress["grown"]:
            grow()
        loss = squares(run, model, step)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.record(step, loss=loss.item())
        state.commit(step, durable=step == run.steps - 1)


def grown_by_progress(run: Run) -> None:
    grown(run, lambda progress: progress is not None and progress["grown"])


def grown_too_late(run: Run) -> None:
    grown(run, lambda progress: False)


class Lookahead:
    """Wrapper that is not an Optimizer: slow weights that follow those of one."""

    def __init__(self, optimizer: optim.Optimizer, every: int = 3) -> None:
        self.optimizer, self.every, self.steps = optimizer, every, 0
        self.parameters = [each for group in optimizer.param_groups for each in group["params"]]
        self.slow = [each.detach().clone() for each in self.parameters]

    @torch.no_grad()
    def step(self) -> None:
        self.optimizer.step()
        self.steps += 1
        if self.steps % self.every == 0:
            for parameter, slow in zip(self.parameters, self.slow, strict=True):
                slow.lerp_(parameter, 0.5)
                parameter.copy_(slow)

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps, "slow": self.slow}

    def load_state_dict(self, values: dict[str, Any]) -> None:
        self.steps = values["steps"]
        for slow, saved in zip(self.slow, values["slow"], strict=True):
            slow.copy_(saved)


def lookahead(run: Run) -> None:
    model = parallel(run, perceptron())
    inner = optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    optimizer = Lookahead(inner)
    state = trainingjob.State(model=model, optimizer=inner, lookahead=optimizer, overhead=1000.0)
    for step in range(state.restore(default=0), run.steps):
        loss = squares(run, model, step)
        inner.zero_grad()
        loss.backward()
        optimizer.step()
        run.record(step, loss=run.total(loss))
        state.commit(step, durable=step == run.steps - 1)


class Momentum(optim.Optimizer):
    """Optimizer that keeps numbers, lists and tensors of other shapes for a parameter, and one for all."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.02, "schedule": [1.0, 0.5]})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        shared = self.state["shared"]
        shared["steps"] = shared.get("steps", 0) + 1
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state.setdefault("last", []).append(parameter.grad.norm().item())
                state["last"] = state["last"][-3:]
                state["rows"] = state.get("rows", 0.0) * 0.9 + parameter.grad.reshape(len(parameter), -1).norm(dim=1)
                scale = 1 / (1 + sum(state["last"]) + state["rows"].mean())
                parameter.sub_(parameter.grad * scale * group["lr"] * group["schedule"][shared["steps"] % 2])


def own_optimizer(run: Run) -> None:
    model = parallel(run, perceptron())
    optimizer = Momentum(model.parameters())
    state = trainingjob.State(model=model, optimizer=optimizer, overhead=1000.0)
    train(run, model, state, [optimizer])


def without_names(run: Run) -> None:
    """Train tensors that belong to no module that State is given."""
    torch.manual_seed(0)
    weights = [torch.randn(FEATURES, 8, requires_grad=True), torch.randn(8, 1, requires_grad=True)]
    optimizer = optim.Adam(weights, lr=0.02)
    kept = {"weights": [each.detach() for each in weights]}
    state = trainingjob.State(kept=kept, optimizer=optimizer, overhead=1000.0)
    for step in range(state.restore(default=0), run.steps):
        x = torch.randn(12, FEATURES, generator=torch.Generator().manual_seed(step))
        loss = (torch.tanh(x @ weights[0]) @ weights[1] - x.sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.record(step, loss=loss.item())
        state.commit(step, durable=step == run.steps - 1)
