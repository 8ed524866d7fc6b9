"""Summation of gradients, losses and the gradient's norm over microbatches and ranks.

`PlainSums` is the fast way: each rank adds up its microbatches, and one reduce-scatter adds up the ranks. In another
world the same numbers are added in another order, so results differ by rounding.

`OrderedSums` gives the same bits in every world (decision "Bitwise determinism sums in batch order"). In all worlds the
batch is cut into the same microbatches, which are assigned to the ranks in turn (`BatchPlan.fixed`), so that round i of
W ranks computes microbatches iW ... iW+W-1. After each round every rank receives its part of all W gradients
(all-to-all) and adds them to its sum one after another: the sum is ((m0 + m1) + m2) + ... for any W. Losses are sent
one by one. The squared norm is added up per row of a parameter (no world cuts rows), in a fixed tree, and rows are
added as fixed-point integers, for which order does not matter.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from concertina_protocol import StepPart
from concertina_trainer.config.trainer import TrainerConfig
from concertina_trainer.data.read.batch import BatchPlan
from concertina_trainer.layouts import frees_weights
from concertina_trainer.model.stages import Stages
from concertina_trainer.parallel.group import DistContext
from concertina_trainer.parallel.step_times import Allocating, StepTimes

WORDS, BITS = 5, 32
"""Format of a squared norm: a fixed-point number of WORDS digits of BITS bits each, the last one worth 2**LEAST."""
LEAST = -96
_TOO_MUCH = 2.0 ** (LEAST + BITS * WORDS + 16)
"""Limit from which a row's sum of squares counts as infinite, because its top digit would not fit."""


class Sums(Protocol):
    """Values of the step's all-reduce.

    `losses` and `squares` return payloads of float64, which are added up over the ranks. `loss` and `squared_norm` read
    the sums.
    """

    def begin(self, model: nn.Module, index: int, count: int) -> None:
        """Prepare for microbatch `index` of `count`."""
        ...

    def finish(self, gradients: Sequence[Tensor]) -> None:
        """Finish the gradients after the last microbatch."""
        ...

    def losses(self, microbatches: Sequence[Tensor]) -> Tensor: ...

    def squares(self, gradients: Sequence[Tensor]) -> Tensor: ...

    def loss(self, payload: Sequence[float]) -> float: ...

    def squared_norm(self, payload: Sequence[float]) -> float: ...


class PlainSums:
    """Sums in any order. A rank may have nothing to add."""

    def __init__(self, device: torch.device, each: bool) -> None:
        """Choose how gradients are added up.

        If `each`, each microbatch's gradients are cut over ranks at once. Otherwise they are added up whole, which
        takes less communication, and memory for all of the model's gradients.
        """
        self._device, self._each = device, each

    def begin(self, model: nn.Module, index: int, count: int) -> None:
        """Prepare for microbatch `index` of `count`. Copies (HSDP) exchange gradients only with the last one."""
        assert isinstance(model, FSDPModule)
        last = index == count - 1
        model.set_requires_gradient_sync(last or self._each)
        model.set_requires_all_reduce(last)
        model.set_is_last_backward(last)

    def finish(self, gradients: Sequence[Tensor]) -> None: ...

    def losses(self, microbatches: Sequence[Tensor]) -> Tensor:
        if not microbatches:
            return torch.zeros(1, dtype=torch.float64, device=self._device)
        return torch.stack(list(microbatches)).double().sum().view(1)

    def squares(self, gradients: Sequence[Tensor]) -> Tensor:
        if not gradients:
            return torch.zeros(1, dtype=torch.float64, device=self._device)
        return torch.stack(torch._foreach_norm(list(gradients))).double().square().sum().view(1)

    def loss(self, payload: Sequence[float]) -> float:
        return payload[0]

    def squared_norm(self, payload: Sequence[float]) -> float:
        return payload[0]


class OrderedSums:
    """Sums in the order of the batch, which are the same bits in every world."""

    def __init__(self, model: Stages, plan: BatchPlan, rank: int, times: StepTimes) -> None:
        self._plan, self._rank = plan, rank
        self._parameters = [
            parameter for _, parameter in model.named_parameters()
        ]  # the sharded parameters, as the model has others between microbatches
        self._reducers: list[OrderedReduceScatter] = []
        for module in model.modules():
            if isinstance(module, FSDPModule):
                self._reducers.append(OrderedReduceScatter(times))
                module.set_custom_reduce_scatter(self._reducers[-1])  # type: ignore[arg-type]  # as in `step_times`

    def begin(self, model: nn.Module, index: int, count: int) -> None:
        assert isinstance(model, FSDPModule)
        model.set_reshard_after_backward(index == count - 1)
        for reducer in self._reducers:
            reducer.fresh = index == 0
            reducer.taken = min(self._plan.world, self._plan.cuts - index * self._plan.world)
        if (
            self._plan.world > 1
        ):  # otherwise FSDP copies the reduced gradients, and adds them up in the same order itself
            for parameter in self._parameters:
                parameter.grad = None

    def finish(self, gradients: Sequence[Tensor]) -> None:
        """Add 0.0, because a sum that began with -0.0 would differ from one that began with 0.0."""
        torch._foreach_add_(list(gradients), 0.0)

    def losses(self, microbatches: Sequence[Tensor]) -> Tensor:
        payload = torch.zeros(self._plan.cuts, dtype=torch.float64, device=microbatches[0].device)
        for loss, index in zip(microbatches, range(self._rank, self._plan.cuts, self._plan.world), strict=False):
            payload[index] = loss
        return payload

    def loss(self, payload: Sequence[float]) -> float:
        total = 0.0
        for part in payload:
            total += part
        return total

    def squares(self, gradients: Sequence[Tensor]) -> Tensor:
        """Return the digits, and the number of rows that are not finite."""
        rows = torch.cat([_row_sums(gradient.double().square()) for gradient in gradients])
        bad = ~(rows < _TOO_MUCH)
        remainder = rows.masked_fill(bad, 0.0)
        digits = []
        for k in range(WORDS):
            unit = 2.0 ** (LEAST + BITS * (WORDS - 1 - k))
            digit = torch.trunc(remainder / unit)
            remainder = remainder - digit * unit
            digits.append(digit.long().sum())
        *sums, infinite = torch.stack([*digits, bad.sum()]).tolist()
        carried = _digits(_whole(sums))
        return torch.tensor([*carried, infinite], dtype=torch.float64, device=rows.device)

    def squared_norm(self, payload: Sequence[float]) -> float:
        *digits, infinite = (round(part) for part in payload)
        return math.inf if infinite else math.ldexp(_whole(digits), LEAST)


def _row_sums(values: Tensor) -> Tensor:
    """Return the sum of each row, float64 `[rows]`, by adding halves to halves.

    This is elementwise, so no row's bits depend on the others.
    """
    if values.dim() < 2:
        return values
    values = values.reshape(values.size(0), -1)
    while (width := values.size(1)) > 1:
        half = width // 2
        folded = values[:, :half] + values[:, half : 2 * half]
        if width % 2:
            folded[:, 0] += values[:, -1]
        values = folded
    return values[:, 0]


def _whole(digits: Sequence[int]) -> int:
    total = 0
    for digit in digits:
        total = (total << BITS) + digit
    return total


def _digits(whole: int) -> list[int]:
    low = [(whole >> (BITS * k)) % (1 << BITS) for k in range(WORDS - 1)]
    return [whole >> (BITS * (WORDS - 1)), *reversed(low)]


class OrderedReduceScatter(Allocating):
    """Sum so far plus each rank's contribution, in the order of ranks (FSDP2's ReduceScatter protocol)."""

    def __init__(self, times: StepTimes) -> None:
        self._times = times
        self._sum: Tensor | None = None
        self.fresh = True
        """Whether the sum begins from zero."""
        self.taken = 0
        """Number of ranks whose contributions count. The rest is padding."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        received = torch.empty_like(input_tensor)
        with self._times.measured(StepPart.REDUCE_SCATTER):
            dist.all_to_all_single(received, input_tensor, group=group)
        parts = received.view(-1, output_tensor.numel())[: self.taken]
        if self.fresh or self._sum is None:
            output_tensor.zero_()
        else:
            output_tensor.copy_(self._sum)
        for part in parts:
            output_tensor.add_(part)
        self._sum = output_tensor


def sums(config: TrainerConfig, model: Stages, plan: BatchPlan, world: DistContext) -> Sums:
    if config.bitwise:
        return OrderedSums(model, plan, world.rank, world.times)
    # If there is no memory for whole weights, there is none for whole gradients.
    weights = model.own.weights if model.own else None
    return PlainSums(world.device, each=frees_weights(config, world.parallelism, weights))
