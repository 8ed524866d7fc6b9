"""AdamW on each rank's own shards, and the learning rate as a pure function of the step."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from concertina_state.errors import InvalidInput
from concertina_trainer.config.optimizer_config import OptimizerConfig, Schedule

REMAINING: Mapping[Schedule, Callable[[float], float]] = {
    Schedule.cosine: lambda progress: (1 + math.cos(math.pi * progress)) / 2,
    Schedule.linear: lambda progress: 1 - progress,
    Schedule.constant: lambda progress: 1.0,
    Schedule.warmup_stable_decay: lambda progress: 1 - math.sqrt(progress),
}
"""Functions that describe how the learning rate falls from its peak to its minimum, by schedule.

Each function maps the progress of the schedule (0 to 1) to the learning rate (1 is the peak, 0 is the minimum).
"""


def learning_rate(step: int, steps: int, config: OptimizerConfig) -> float:
    """Return the learning rate of step `step` of `steps`, counted from 0.

    The rate rises linearly during the warm-up. Then it follows the schedule, which ends at the last step.
    """
    warmup, minimum = config.resolved_warmup_steps(steps), config.min_learning_rate
    if step < warmup:
        return config.learning_rate * (step + 1) / warmup
    begin = warmup
    if config.schedule is Schedule.warmup_stable_decay:
        begin = max(warmup, steps - 1 - config.resolved_decay_steps(steps))
    progress = min(1.0, max(0, step - begin) / max(1, steps - 1 - begin))
    return minimum + (config.learning_rate - minimum) * REMAINING[config.schedule](progress)


def local(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a DTensor, which shares the DTensor's memory, or a plain tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def first_holder(tensor: Tensor) -> bool:
    """Return whether this rank is the first of the ranks that hold the same shard of `tensor`.

    Several ranks hold the same shard if the DTensor is replicated in a dimension of its mesh.
    """
    if not isinstance(tensor, DTensor):
        return True
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None
    return all(
        coordinate_index == 0 or not isinstance(placement, Replicate)
        for coordinate_index, placement in zip(coordinate, tensor.placements, strict=True)
    )


class Parameters(Protocol):
    """Parameters of a model, sharded or not, as one rank has them."""

    def named_parameters(self) -> Iterable[tuple[str, nn.Parameter]]: ...

    def counts(self, name: str, parameter: Tensor) -> bool:
        """Return whether this rank is the first of the ranks that hold the same shard of the parameter."""
        ...


class ShardedAdamW:
    """AdamW on this rank's shards, as plain tensors.

    The update is elementwise, so no rank needs the shard of another rank. Plain tensors avoid DTensor's dispatch, which
    takes longer than the arithmetic of a small model. The constructor creates the optimizer state with the given number
    of steps (decision "AdamW on local tensors").

    With `exact`, each operation rounds once, so the resulting bits do not depend on how a parameter is cut into shards.
    The bits of torch's own kernels depend on the shards, because these kernels compute the last few elements of a
    tensor with other instructions than the elements before (measured, fused on CPU: one bit of `exp_avg_sq`).
    """

    def __init__(self, model: Parameters, config: OptimizerConfig, step: int, exact: bool = False) -> None:
        self._exact = exact
        trained = ((name, p) for name, p in model.named_parameters() if p.requires_grad)
        self._sharded = {name: p for name, p in trained if local(p.detach()).numel()}
        self._counted = {name for name, p in self._sharded.items() if model.counts(name, p)}
        self._local = {name: nn.Parameter(local(p.detach())) for name, p in self._sharded.items()}
        if not self._local:
            raise InvalidInput(
                "there are more workers than trainable rows of weights: use fewer replicas or a larger model."
            )
        matrices = [p for p in self._local.values() if p.dim() > 1]
        vectors = [p for p in self._local.values() if p.dim() <= 1]
        groups = [
            {"params": matrices, "weight_decay": config.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ]
        self._adam = torch.optim.AdamW(
            [group for group in groups if group["params"]],
            lr=0.0,
            betas=(config.betas[0], config.betas[1]),
            eps=config.epsilon,
            fused=True,
        )
        for parameter in self._local.values():
            self._adam.state[parameter] = {
                # float32, because the fused kernel on a GPU reads the step as float32, whatever torch's default dtype
                # is.
                "step": torch.tensor(float(step), dtype=torch.float32, device=parameter.device),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }

    @torch.no_grad()
    def _step_exactly(self, group: dict[str, Any]) -> None:
        """Apply AdamW (Loshchilov, Hutter 2019, algorithm 2) in operations that IEEE 754 rounds correctly."""
        parameters = [p for p in group["params"] if p.grad is not None]
        if not parameters:
            return
        states = [self._adam.state[p] for p in parameters]
        gradients, rate, (beta1, beta2) = [p.grad for p in parameters], group["lr"], group["betas"]
        first, second = ([state[kind] for state in states] for kind in ("exp_avg", "exp_avg_sq"))
        for state in states:
            state["step"] += 1
        step = states[0]["step"].item()
        torch._foreach_mul_(first, beta1)
        torch._foreach_add_(first, torch._foreach_mul(gradients, 1 - beta1))
        torch._foreach_mul_(second, beta2)
        torch._foreach_add_(second, torch._foreach_mul(torch._foreach_mul(gradients, gradients), 1 - beta2))
        scale = torch._foreach_sqrt(second)
        torch._foreach_div_(scale, math.sqrt(1 - beta2**step))
        torch._foreach_add_(scale, group["eps"])
        moves = torch._foreach_mul(first, rate / (1 - beta1**step))
        torch._foreach_div_(moves, scale)
        torch._foreach_mul_(parameters, 1 - rate * group["weight_decay"])
        torch._foreach_sub_(parameters, moves)

    def moments(self) -> dict[str, dict[str, Tensor]]:
        """Return the moments by kind (`exp_avg`, `exp_avg_sq`) and by parameter name, as shards of this rank.

        Parameters of which this rank has no elements are left out.
        """
        return {
            kind: {name: self._adam.state[p][kind] for name, p in self._local.items()}
            for kind in ("exp_avg", "exp_avg_sq")
        }

    def set_step(self, step: int) -> None:
        for parameter in self._local.values():
            self._adam.state[parameter]["step"].fill_(float(step))

    def gradients(self) -> list[Tensor]:
        """Return the gradients of this rank's shards."""
        return [local(p.grad) for p in self._sharded.values() if p.grad is not None]

    def counted_gradients(self) -> list[Tensor]:
        """Return the gradients of those shards that this rank is the first to hold.

        Several ranks may hold copies of a shard. A sum over all ranks counts each gradient once.
        """
        return [local(p.grad) for n, p in self._sharded.items() if p.grad is not None and n in self._counted]

    def drop_gradients(self) -> None:
        for parameter in self._sharded.values():
            parameter.grad = None

    def update(self, rate: float, gradient_scale: float) -> None:
        """Apply one step of AdamW with the learning rate `rate`, and drop the gradients.

        The gradients have been reduced over ranks. They are multiplied by `gradient_scale` first.
        """
        for name, parameter in self._sharded.items():
            self._local[name].grad = local(parameter.grad) if parameter.grad is not None else None
            parameter.grad = None
        gradients = [p.grad for p in self._local.values() if p.grad is not None]
        if gradient_scale != 1.0 and gradients:
            torch._foreach_mul_(gradients, gradient_scale)
        for group in self._adam.param_groups:
            group["lr"] = rate
            if self._exact:
                self._step_exactly(group)
        if not self._exact:
            self._adam.step()
        for parameter in self._local.values():
            parameter.grad = None
