"""Summation of gradients, losses and the squared norm of the gradient, over microbatches and ranks.

`PlainSums` is fast: each rank adds up the gradients of its microbatches, and one reduce-scatter adds up the sums of all
ranks. With a different number of ranks, the same numbers are added in a different order, so results differ by rounding.

`OrderedSums` gives the same bits for any number of ranks (decision "Bitwise determinism sums in batch order"):

- Gradients: the global batch is cut into the same microbatches m0, m1, ... for any number of ranks, and these are
  assigned to the ranks in turn (`BatchPlan.fixed`). In turn i, W ranks compute the microbatches iW ... iW+W-1. Then an
  all-to-all gives each rank its shard of all W gradients, and the rank adds them to its sum one after another. The sum
  is ((m0 + m1) + m2) + ... for any W.
- Losses: each microbatch has its own element in the all-reduce of the step, and all ranks add up the elements in order.
- Squared norm: the squares in each row of a parameter are added in a fixed tree, because no layout splits a row. The
  sums of rows are added as fixed-point integers, whose sum does not depend on the order.
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
from concertina_trainer.config.optimizer_config import StatePrecision
from concertina_trainer.config.trainer import TrainerConfig
from concertina_trainer.data.read.batch import BatchPlan
from concertina_trainer.layouts import reduces_each
from concertina_trainer.model.stages import Stages
from concertina_trainer.parallel.group import DistContext
from concertina_trainer.parallel.step_times import Allocating, StepTimes

WORDS, BITS = 5, 32
"""Format of a squared norm: a fixed-point number of WORDS digits with BITS bits each.

The last digit counts 2**LEAST.
"""
LEAST = -96
PIECE = 4 << 20
"""Number of elements of a gradient to copy to float64 at a time."""
_TOO_MUCH = 2.0 ** (LEAST + BITS * WORDS + 16)
"""Sum of squares from which a row counts as infinite, because its top digit would not fit into BITS bits."""


class Sums(Protocol):
    """Losses and squared gradient norms in the all-reduce of a step.

    `losses` and `squares` return the payload of this rank, float64. An all-reduce sums the payloads over all ranks.
    `loss` and `squared_norm` compute the results from these sums.
    """

    def begin(self, model: nn.Module, index: int, count: int) -> None:
        """Prepare for microbatch `index` of `count`."""
        ...

    def finish(self, gradients: Sequence[Tensor]) -> None:
        """Complete the gradients after the last microbatch of the step."""
        ...

    def losses(self, microbatches: Sequence[Tensor]) -> Tensor: ...

    def squares(self, gradients: Sequence[Tensor]) -> Tensor: ...

    def loss(self, payload: Sequence[float]) -> float: ...

    def squared_norm(self, payload: Sequence[float]) -> float: ...


class PlainSums:
    """Sums in no fixed order. A rank without losses or gradients adds nothing."""

    def __init__(self, device: torch.device, each: bool, rounded: bool = False) -> None:
        """Choose when gradients are reduced over ranks.

        If `each` is True, the gradients of each microbatch are reduce-scattered at once. If `each` is False, each rank
        adds up the unsharded gradients of its microbatches, and reduce-scatters the sum after the last microbatch. This
        takes less communication, but every rank needs memory for the gradients of the whole model.

        `rounded` says whether gradients are reduced in bfloat16. If so, `each` is True, and copies of the weights
        (HSDP) also exchange the gradients of each microbatch, because FSDP would sum the gradients of several
        microbatches in bfloat16.
        """
        self._device, self._each, self._rounded = device, each, rounded
        self._prepared: tuple[nn.Module, bool] | None = None
        """Model that is prepared for a microbatch, and True if this microbatch is the last one of the step.

        None before.
        """

    def begin(self, model: nn.Module, index: int, count: int) -> None:
        """Prepare for microbatch `index` of `count`.

        With several copies of the weights (HSDP), the copies exchange gradients only after the last microbatch, unless
        gradients are rounded.
        """
        assert isinstance(model, FSDPModule)
        last = index == count - 1
        if self._prepared == (model, last):  # FSDP's setters visit all modules of the model
            return
        self._prepared = model, last
        model.set_requires_gradient_sync(last or self._each)
        model.set_requires_all_reduce(last or self._rounded)
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
    """Sums in the order of the global batch, with the same bits for any number of ranks."""

    def __init__(self, model: Stages, plan: BatchPlan, rank: int, times: StepTimes) -> None:
        self._plan, self._rank = plan, rank
        self._parameters = [
            parameter for _, parameter in model.named_parameters()
        ]  # the sharded parameters; between microbatches, modules hold gathered ones
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
        if self._plan.world > 1:  # with one rank, FSDP copies the gradients and adds them up in the same order itself
            for parameter in self._parameters:
                parameter.grad = None

    def finish(self, gradients: Sequence[Tensor]) -> None:
        """Add 0.0 to each gradient, which turns -0.0 into 0.0 and changes no other value.

        With several ranks, a sum begins with 0.0 and can't become -0.0 if all its terms are -0.0. With one rank, FSDP
        begins the sum with the first term, so the sum can become -0.0. Without the addition of 0.0, the bits would
        depend on the number of ranks.
        """
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
        """Return the sum of squares of this rank's gradients, float64 `[WORDS + 1]`.

        The elements are the digits of a fixed-point number, and the number of rows whose sum is not finite.
        """
        rows = torch.cat([_row_sums(part.double().square()) for gradient in gradients for part in _pieces(gradient)])
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


def _pieces(gradient: Tensor) -> tuple[Tensor, ...]:
    """Divide a gradient into pieces of whole rows, so that only one piece at a time is copied to float64."""
    return torch.split(gradient, max(1, PIECE * len(gradient) // max(1, gradient.numel())))


def _row_sums(values: Tensor) -> Tensor:
    """Return the sum of each row, float64 `[rows]`, by repeatedly adding the second half of the columns to the first.

    These additions are elementwise, so the bits of one row's sum do not depend on the other rows.
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
    """Reduce-scatter that adds the gradients of all ranks to the previous sum, in the order of ranks.

    The class implements FSDP2's ReduceScatter protocol by an all-to-all and local additions.
    """

    def __init__(self, times: StepTimes) -> None:
        self._times = times
        self._sum: Tensor | None = None
        self.fresh = True
        """True if the next sum begins from zero, as for the first microbatch of a step."""
        self.taken = 0
        """Number of ranks whose contributions are added. Contributions of further ranks are padding."""

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
    weights = model.own.weights if model.own else None
    rounded = config.gradient_precision is StatePrecision.bfloat16
    return PlainSums(world.device, reduces_each(config, world.parallelism, weights), rounded)
