"""Loops with further objects beside models and optimizers, and with tensors of many kinds."""

from __future__ import annotations

import random
from collections import Counter, OrderedDict, defaultdict
from typing import Any

import numpy
import torch
from torch import nn

import trainingjob
from loops.common import FEATURES, parallel, perceptron, squares
from loops.run import Run


class Curriculum:
    """Object with a state of its own: sets, tuples, keys that are not strings, tensors, arrays, bytes."""

    def __init__(self) -> None:
        self.seen: set[int] = set()
        self.levels: dict[Any, Any] = {1: "easy", (2, 3): b"hard", None: [1.5, float("inf")]}
        self.losses = torch.zeros(3, dtype=torch.float64)
        self.counts = numpy.zeros((2, 2), dtype=numpy.int16)
        self.best: float | None = None

    def saw(self, step: int, loss: float) -> None:
        self.seen.add(step % 5)
        self.levels[step] = (step, loss)
        self.losses[step % 3] = loss
        self.counts[step % 2, 0] += step
        self.best = loss if self.best is None else min(self.best, loss)

    def state_dict(self) -> dict[str, Any]:
        return dict(vars(self))

    def load_state_dict(self, values: dict[str, Any]) -> None:
        vars(self).update(values)


def own_objects(run: Run) -> None:
    model = parallel(run, perceptron())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    curriculum = Curriculum()
    state = trainingjob.State(model=model, optimizer=optimizer, curriculum=curriculum, overhead=1000.0)
    for step in range(state.restore(default=0), run.steps):
        loss = squares(run, model, step)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        curriculum.saw(step, run.total(loss))
        run.record(step, loss=run.total(loss), best=curriculum.best)
        state.commit(step, durable=step == run.steps - 1)


def metrics(run: Run) -> None:
    """Keep metrics of the whole run in dicts of many kinds."""
    model = parallel(run, perceptron())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    kept: dict[str, Any] = {
        "sum": torch.zeros(()),
        "history": [],
        "counts": Counter(),
        "ordered": OrderedDict(),
        "confusion": numpy.zeros((3, 3), dtype=numpy.int64),
        "best": {"loss": float("inf"), "step": None, "weights": {}},
    }
    state = trainingjob.State(model=model, optimizer=optimizer, metrics=kept, overhead=1000.0)
    for step in range(state.restore(default=0), run.steps):
        loss = squares(run, model, step)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total = run.total(loss)
        kept["sum"] += total
        kept["history"].append(total)
        kept["counts"][step % 3] += 1
        kept["ordered"][f"step {step}"] = total
        kept["confusion"][step % 3, (step + 1) % 3] += 1
        if total < kept["best"]["loss"]:
            kept["best"] = {"loss": total, "step": step, "weights": {"norm": float(len(kept["history"]))}}
        run.record(step, loss=total, sum=kept["sum"], best=kept["best"]["loss"], counts=dict(kept["counts"]))
        state.commit(step, durable=step == run.steps - 1)


def random_numbers(run: Run) -> None:
    """Augment items by random numbers of Python, numpy and torch, and of the script's own generators."""
    random.seed(run.rank)
    numpy.random.seed(run.rank)
    torch.manual_seed(run.rank)
    model = parallel(run, perceptron(nn.Dropout(0.2)))
    torch.manual_seed(100 + run.rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    generator = Generator(run.rank)
    state = trainingjob.State(model=model, optimizer=optimizer, generator=generator, overhead=1000.0)
    for step in range(state.restore(default=0), run.steps):
        drawn = (random.random(), random.gauss(0, 1), numpy.random.rand(), torch.rand(1).item(), generator.draw())
        loss = squares(run, model, step) * drawn[0]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.record_own(step, drawn=drawn, loss=loss.item())
        state.commit(step, durable=step == run.steps - 1)


class Generator:
    """Generators of torch and numpy, one for each rank."""

    def __init__(self, rank: int) -> None:
        self.torch = torch.Generator().manual_seed(rank)
        self.numpy = numpy.random.default_rng(rank)

    def draw(self) -> tuple[float, float]:
        return torch.rand(1, generator=self.torch).item(), self.numpy.random()

    def state_dict(self) -> dict[str, Any]:
        return {"torch": self.torch.get_state(), "numpy": self.numpy.bit_generator.state}

    def load_state_dict(self, values: dict[str, Any]) -> None:
        self.torch.set_state(values["torch"])
        self.numpy.bit_generator.state = values["numpy"]


DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.int64,
    torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
]  # fmt: skip
SHAPES = [(), (0,), (3, 0, 2), (1,), (5, 3)]


def dtypes(run: Run) -> None:
    """Save tensors of all dtypes and of odd shapes, in a dict and in a module's buffers."""
    model = nn.Module()
    kept = {}
    for dtype in DTYPES:
        for shape in SHAPES:
            name = f"{str(dtype).partition('.')[2]}_{'x'.join(map(str, shape))}"
            kept[name] = torch.zeros(shape, dtype=dtype)
            model.register_buffer(name, torch.zeros(shape, dtype=dtype))
    state = trainingjob.State(model=model, kept=kept, overhead=1000.0)
    for step in range(state.restore(default=0), run.steps):
        for tensor in (*kept.values(), *model.buffers()):
            new = torch.arange(tensor.numel(), dtype=torch.float32).reshape(tensor.shape) + step
            tensor.copy_((new % 2 if tensor.dtype == torch.bool else new).to(tensor.dtype))
        state.commit(step, durable=step == run.steps - 1)


def half(run: Run) -> None:
    """Train parameters of several dtypes with one optimizer."""
    model = nn.ModuleList([nn.Linear(FEATURES, 8).to(torch.bfloat16), nn.Linear(8, 1, dtype=torch.float64)])
    torch.manual_seed(0)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, foreach=False)
    state = trainingjob.State(model=model, optimizer=optimizer, overhead=1000.0)
    for step in range(state.restore(default=0), run.steps):
        x = torch.randn(12, FEATURES, generator=torch.Generator().manual_seed(step))
        hidden = torch.tanh(model[0](x.to(torch.bfloat16)))
        loss = (model[1](hidden.double()) - x.sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.record(step, loss=loss.item())
        state.commit(step, durable=step == run.steps - 1)


def complex_numbers(run: Run) -> None:
    model = nn.Module()
    torch.manual_seed(0)
    model.weight = nn.Parameter(torch.randn(FEATURES, 3, dtype=torch.complex64))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    kept = {"spectrum": torch.zeros(4, dtype=torch.complex128)}
    state = trainingjob.State(model=model, optimizer=optimizer, kept=kept, overhead=1000.0)
    for step in range(state.restore(default=0), run.steps):
        x = torch.randn(12, FEATURES, generator=torch.Generator().manual_seed(step)).to(torch.complex64)
        loss = ((x @ model.weight).abs() - 1).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        kept["spectrum"] += torch.fft.fft(x[:4, 0])
        run.record(step, loss=loss.item())
        state.commit(step, durable=step == run.steps - 1)


def views(run: Run) -> None:
    """Save entries that share memory: the same tensor twice, a row of another tensor, transposed and strided ones."""
    whole = torch.zeros(4, 6)
    array = numpy.zeros((4, 6))
    kept = {
        "whole": whole,
        "again": whole,
        "row": whole[2],
        "transposed": whole.T,
        "strided": whole[:, ::2],
        "array": array,
        "array_row": array[1],
        "array_transposed": array.T,
    }
    torch.manual_seed(0)
    model = nn.Linear(3, 3)
    weight = model.weight.detach()
    state = trainingjob.State(kept=kept, model=model, weights={"weight": weight}, overhead=1000.0)
    for step in range(state.restore(default=0), run.steps):
        whole += torch.arange(24.0).reshape(4, 6)
        whole[2] *= 0.5
        array += numpy.arange(24.0).reshape(4, 6)
        with torch.no_grad():
            model.weight.add_(0.1).mul_(0.9)
        run.record(step, whole=whole, row=kept["row"], weight=weight, array=array)
        state.commit(step, durable=step == run.steps - 1)


def channels_last(run: Run) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 9, 1))
    model = parallel(run, model.to(memory_format=torch.channels_last))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    state = trainingjob.State(model=model, optimizer=optimizer, overhead=1000.0)
    for step in range(state.restore(default=0), run.steps):
        mine = run.share()
        images = torch.randn(12, 3, 5, 5, generator=torch.Generator().manual_seed(step))[mine.start : mine.stop]
        wanted = images.mean((1, 2, 3), keepdim=False)[:, None]
        loss = run.mean((model(images.to(memory_format=torch.channels_last)) - wanted).square())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.record(step, loss=run.total(loss))
        state.commit(step, durable=step == run.steps - 1)


def numpy_arrays(run: Run) -> None:
    """Save a dict of numpy arrays without an optimizer, as users of JAX do: arrays are replaced in the dict."""
    random_ = numpy.random.default_rng(0)
    kept: dict[str, Any] = {
        "weights": random_.standard_normal((FEATURES, 1)),
        "moments": {"first": numpy.zeros((FEATURES, 1)), "second": numpy.zeros((FEATURES, 1))},
        "steps": 0,
    }
    state = trainingjob.State(kept=kept, overhead=1000.0)
    for step in range(state.restore(default=0), run.steps):
        x = numpy.random.default_rng(step).standard_normal((12, FEATURES))
        error = x @ kept["weights"] - x.sum(1, keepdims=True)
        gradient = x.T @ error / len(x)
        first = 0.9 * kept["moments"]["first"] + 0.1 * gradient
        second = 0.99 * kept["moments"]["second"] + 0.01 * gradient**2
        kept["weights"] = kept["weights"] - 0.1 * first / (numpy.sqrt(second) + 1e-3)
        kept["moments"] = {"first": first, "second": second}
        kept["steps"] += 1
        run.record(step, loss=float((error**2).mean()), steps=kept["steps"])
        state.commit(step, durable=step == run.steps - 1)


def growing_values(run: Run) -> None:
    """Save values that grow tenfold, and arrays that appear and change their size."""
    model = perceptron()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    kept: dict[str, Any] = {"log": [], "replay": {}}
    state = trainingjob.State(model=model, optimizer=optimizer, kept=kept, overhead=1000.0)
    for step in range(state.restore(default=0), run.steps):
        loss = squares(run, model, step)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        kept["log"] += [f"{loss.item():.6f} at {step}"] * 40 * (step + 1)
        run.record(step, loss=loss.item(), lines=len(kept["log"]))
        state.commit(step, durable=step == run.steps - 1)


def replay_buffer(run: Run) -> None:
    """Save a growing list of tensors. A restarted run has none of them yet."""
    model = perceptron()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    kept: dict[str, Any] = {"replay": []}
    state = trainingjob.State(model=model, optimizer=optimizer, kept=kept, overhead=1000.0)
    for step in range(state.restore(default=0), run.steps):
        kept["replay"].append(torch.randn(FEATURES, generator=torch.Generator().manual_seed(step)))
        x = torch.stack(kept["replay"])
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.record(step, loss=loss.item(), length=len(kept["replay"]))
        state.commit(step, durable=step == run.steps - 1)


def numbers_of_each_rank(run: Run) -> None:
    """Save values in a dict that are not arrays and that each rank has for itself."""
    model = parallel(run, perceptron())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    kept: dict[str, Any] = {"items": 0, "ranks": [run.rank], "names": defaultdict(int)}
    state = trainingjob.State(model=model, optimizer=optimizer, kept=kept, overhead=1000.0)
    for step in range(state.restore(default=0), run.steps):
        loss = squares(run, model, step)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        kept["items"] += len(run.share()) * (1 + run.rank)
        kept["ranks"].append(step)
        kept["names"][f"step {step}"] += 1
        run.record(step, loss=run.total(loss))
        run.record_own(step, items=kept["items"])
        state.commit(step, durable=step == run.steps - 1)
