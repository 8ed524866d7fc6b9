"""Scripts with something that can't be saved, or that would be saved twice."""

from __future__ import annotations

import torch
from torch import nn

import trainingjob
from loops.common import parallel, perceptron, squares
from loops.run import Run


def train(run: Run, model: nn.Module, optimizer: torch.optim.Optimizer, *states: trainingjob.State) -> None:
    for step in range(max(state.restore(default=0) for state in states), run.steps):
        loss = squares(run, model, step)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.record(step, loss=run.total(loss))
        for state in states:
            state.commit(step, durable=step == run.steps - 1)


def two_states(run: Run) -> None:
    model = parallel(run, perceptron())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    first = trainingjob.State(model=model, overhead=1000.0)
    second = trainingjob.State(optimizer=optimizer, overhead=1000.0)
    train(run, model, optimizer, first, second)


def two_states_in_two_folders(run: Run) -> None:
    model = parallel(run, perceptron())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    first = trainingjob.State(model=model, folder="model", overhead=1000.0)
    second = trainingjob.State(optimizer=optimizer, folder="optimizer", overhead=1000.0)
    train(run, model, optimizer, first, second)


def plain(run: Run) -> None:
    model = parallel(run, perceptron())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    train(run, model, optimizer, trainingjob.State(model=model, optimizer=optimizer, overhead=1000.0))


def object_left_out(run: Run) -> None:
    """Leave out, in a restarted run, the scheduler that was saved."""
    model = parallel(run, perceptron())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    more = {} if run.restarted else {"scheduler": scheduler}
    train(run, model, optimizer, trainingjob.State(model=model, optimizer=optimizer, **more, overhead=1000.0))


def object_added(run: Run) -> None:
    """Add, in a restarted run, a scheduler that was not saved."""
    model = parallel(run, perceptron())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    more = {"scheduler": scheduler} if run.restarted else {}
    train(run, model, optimizer, trainingjob.State(model=model, optimizer=optimizer, **more, overhead=1000.0))


def layer_left_out(run: Run) -> None:
    """Leave out a layer of the model in a restarted run."""
    model = perceptron(nn.Linear(16, 16)) if not run.restarted else perceptron()
    model = nn.ModuleDict({"first": model[0], "last": model[-1], **({} if run.restarted else {"middle": model[1]})})

    def forward(x: torch.Tensor) -> torch.Tensor:
        x = model["first"](x)
        return model["last"](torch.tanh(model["middle"](x) if "middle" in model else x))

    model.forward = forward  # type: ignore[method-assign]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    train(run, model, optimizer, trainingjob.State(model=model, optimizer=optimizer, overhead=1000.0))


def layer_added(run: Run) -> None:
    model = perceptron(nn.Linear(16, 16)) if run.restarted else perceptron()
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.02)
    train(run, model, optimizer, trainingjob.State(model=model, optimizer=optimizer, overhead=1000.0))


def buffer_left_out(run: Run) -> None:
    """Create, in a restarted run, a model without running means."""
    norm = nn.BatchNorm1d(16, track_running_stats=not run.restarted)
    model = parallel(run, perceptron(norm))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    train(run, model, optimizer, trainingjob.State(model=model, optimizer=optimizer, overhead=1000.0))


def another_width(run: Run) -> None:
    torch.manual_seed(0)
    width = 24 if run.restarted else 16
    model = nn.Sequential(nn.Linear(7, width), nn.Tanh(), nn.Linear(width, 1))
    model = parallel(run, model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    train(run, model, optimizer, trainingjob.State(model=model, optimizer=optimizer, overhead=1000.0))


def another_type(run: Run) -> None:
    """Use parameters of another precision in a restarted run."""
    model = perceptron()
    if run.restarted:
        model = model.to(torch.float64)
        model.register_forward_pre_hook(lambda _, inputs: tuple(each.double() for each in inputs))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    train(run, model, optimizer, trainingjob.State(model=model, optimizer=optimizer, overhead=1000.0))


def another_optimizer(run: Run) -> None:
    """Continue with Adam from the state of SGD."""
    model = parallel(run, perceptron())
    kinds = torch.optim.Adam, torch.optim.SGD
    kind = kinds[0] if run.restarted else kinds[1]
    optimizer = kind(model.parameters(), lr=0.02)
    train(run, model, optimizer, trainingjob.State(model=model, optimizer=optimizer, overhead=1000.0))


def parameters_differ(run: Run) -> None:
    """Begin with different weights on each rank, without averaging gradients."""
    torch.manual_seed(run.rank)
    model = nn.Linear(7, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    train(run, model, optimizer, trainingjob.State(model=model, optimizer=optimizer, overhead=1000.0))


def moments_differ(run: Run) -> None:
    """Average the weights after each step instead of the gradients, so that moments differ between ranks."""
    torch.manual_seed(0)
    model = nn.Linear(7, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    state = trainingjob.State(model=model, optimizer=optimizer, overhead=1000.0)
    for step in range(state.restore(default=0), run.steps):
        loss = squares(run, model, step)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for parameter in model.parameters():
                torch.distributed.all_reduce(parameter)
                parameter /= run.size
        run.record(step, loss=run.total(loss))
        state.commit(step, durable=step == run.steps - 1)


def unsaveable_value(run: Run) -> None:
    model = perceptron()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    kept = {"function": print}
    train(run, model, optimizer, trainingjob.State(model=model, optimizer=optimizer, kept=kept, overhead=1000.0))


def other_optimizer_steps(run: Run) -> None:
    """Give State an optimizer that is never stepped, because the script has created another one since."""
    model = perceptron()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    state = trainingjob.State(model=model, optimizer=optimizer, overhead=1000.0)
    train(run, model, torch.optim.Adam(model.parameters(), lr=0.02), state)
