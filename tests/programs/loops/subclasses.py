"""Tensor subclasses: quantized tensors that consist of several tensors, as those of 8-bit optimizers."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import return_and_correct_aliasing

import trainingjob
from loops.common import FEATURES, parallel, perceptron, squares
from loops.run import Run

aten = torch.ops.aten


class Quantized(torch.Tensor):
    """Tensor of 8-bit numbers with a scale for each row, which can be flattened into plain tensors."""

    @staticmethod
    def __new__(cls, codes: torch.Tensor, scale: torch.Tensor, signed: bool) -> Quantized:
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, device=codes.device, dtype=torch.float32)

    def __init__(self, codes: torch.Tensor, scale: torch.Tensor, signed: bool) -> None:
        self.codes, self.scale, self.signed = codes, scale, signed

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["codes", "scale"], [self.signed]

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, torch.Tensor], attributes: Any, *_: Any) -> Quantized:
        return cls(inner["codes"], inner["scale"], *attributes)

    @classmethod
    def of(cls, values: torch.Tensor) -> Quantized:
        scale = values.abs().amax(-1, keepdim=True) / 127 + 1e-12
        return cls((values / scale).round().to(torch.int8), scale, True)

    def dequantized(self) -> torch.Tensor:
        return self.codes.to(torch.float32) * self.scale

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is aten.copy_.default:
            target, source = args
            if isinstance(target, Quantized):
                new = source if isinstance(source, Quantized) else Quantized.of(source)
                target.codes.copy_(new.codes)
                target.scale.copy_(new.scale)
            else:
                target.copy_(source.dequantized())
            return target
        if func in (aten.detach.default, aten.clone.default, aten._to_copy.default):
            self = args[0]
            made = Quantized(func(self.codes), func(self.scale), self.signed)
            return return_and_correct_aliasing(func, args, kwargs or {}, made)
        if func is aten.t.default:
            return args[0].dequantized().t()
        if func is aten.lerp.Scalar:
            return func(args[0].dequantized(), *args[1:])
        raise NotImplementedError(f"Quantized: {func}")


class Opaque(torch.Tensor):
    """Tensor that only its own class can construct."""

    @staticmethod
    def __new__(cls, secret: torch.Tensor) -> Opaque:
        return torch.Tensor._make_wrapper_subclass(cls, secret.shape, dtype=torch.float32)

    def __init__(self, secret: torch.Tensor) -> None:
        self.secret = secret

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is aten.detach.default:
            return return_and_correct_aliasing(func, args, kwargs or {}, Opaque(args[0].secret))
        raise NotImplementedError(f"Opaque: {func}")


class Named(torch.Tensor):
    """Plain tensor with methods of its own, which is restored by its numbers alone."""

    def total(self) -> float:
        return float(self.as_subclass(torch.Tensor).sum())


class EightBit(torch.optim.Optimizer):
    """Optimizer with momentum in 8 bits."""

    def __init__(self, parameters: Any, kind: Any = Quantized.of) -> None:
        super().__init__(parameters, {"lr": 0.02})
        self.kind = kind

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if "momentum" not in state:
                    state["momentum"] = self.kind(torch.zeros_like(parameter))
                if isinstance(state["momentum"], Quantized):
                    new = state["momentum"].dequantized() * 0.9 + parameter.grad
                    state["momentum"].copy_(new)
                    parameter.sub_(group["lr"] * new)


def train(run: Run, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    state = trainingjob.State(model=model, optimizer=optimizer, overhead=1000.0)
    for step in range(state.restore(default=0), run.steps):
        loss = squares(run, model, step)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.record(step, loss=run.total(loss))
        state.commit(step, durable=step == run.steps - 1)


def eight_bit_moments(run: Run) -> None:
    model = parallel(run, perceptron())
    train(run, model, EightBit(model.parameters()))


def torchao_moments(run: Run) -> None:
    from torchao.optim import AdamW8bit
    from torchao.optim.subclass_8bit import OptimState8bit

    torch.compile = lambda function, **options: function  # Compiling its step takes a minute.
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(FEATURES, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
    model = parallel(run, model)
    optimizer = AdamW8bit(model.parameters(), lr=0.01)
    train(run, model, optimizer)
    assert any(isinstance(state["exp_avg"], OptimState8bit) for state in optimizer.state.values())


class Frozen(nn.Module):
    """Linear layer with a frozen weight in 8 bits below a trained one, as with QLoRA."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.out = nn.Linear(16, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(torch.tanh(x @ self.weight.dequantized().T))


def eight_bit_weights(run: Run) -> None:
    torch.manual_seed(2 if run.restarted else 0)
    model = Frozen(Quantized.of(torch.randn(16, FEATURES)))
    train(run, model, torch.optim.AdamW(model.out.parameters(), lr=0.02))


def eight_bit_in_dict(run: Run) -> None:
    model = perceptron()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    kept = {"average": Quantized.of(torch.zeros(4, FEATURES))}
    state = trainingjob.State(model=model, optimizer=optimizer, kept=kept, overhead=1000.0)
    for step in range(state.restore(default=0), run.steps):
        loss = squares(run, model, step)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        kept["average"].copy_(kept["average"].dequantized() * 0.9 + step)
        run.record(step, loss=loss.item(), average=kept["average"].dequantized())
        state.commit(step, durable=step == run.steps - 1)


def opaque_weight(run: Run) -> None:
    model = perceptron()
    model.secret = nn.Parameter(Opaque(torch.ones(3)), requires_grad=False)
    train(run, model, torch.optim.AdamW([*model[0].parameters(), *model[2].parameters()], lr=0.02))


def opaque_moments(run: Run) -> None:
    model = perceptron()
    train(run, model, EightBit(model.parameters(), Opaque))


def named(run: Run) -> None:
    model = perceptron()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    kept = {"sums": torch.zeros(4).as_subclass(Named)}
    state = trainingjob.State(model=model, optimizer=optimizer, kept=kept, overhead=1000.0)
    for step in range(state.restore(default=0), run.steps):
        loss = squares(run, model, step)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        kept["sums"] += step
        run.record(step, loss=loss.item(), sums=kept["sums"].total())
        state.commit(step, durable=step == run.steps - 1)


def sparse_in_dict(run: Run) -> None:
    model = perceptron()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    kept = {"graph": torch.eye(4).to_sparse()}
    state = trainingjob.State(model=model, optimizer=optimizer, kept=kept, overhead=1000.0)
    for step in range(state.restore(default=0), run.steps):
        state.commit(step, durable=step == run.steps - 1)


def on_meta(run: Run) -> None:
    """Leave a part of the model on the meta device, without memory."""
    model = perceptron()
    model.register_buffer("table", torch.empty(3, device="meta"))
    train(run, model, torch.optim.Adam(model.parameters(), lr=0.02))


def quantized_by_torch(run: Run) -> None:
    model = perceptron()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    kept = {"codes": torch.quantize_per_tensor(torch.randn(4), 0.1, 0, torch.qint8)}
    state = trainingjob.State(model=model, optimizer=optimizer, kept=kept, overhead=1000.0)
    for step in range(state.restore(default=0), run.steps):
        state.commit(step, durable=step == run.steps - 1)
