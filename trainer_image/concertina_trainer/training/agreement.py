"""Agreement of all ranks on the result of a step, by one small all-reduce.

Every value is a sum over ranks, so that one operation suffices. If the sum of a flag is above 0, at least one rank has
set the flag. If the sum is the number of ranks, every rank has set it. The result is read before the weights are
updated, so a loss that is not finite never changes the weights, and all ranks act on the same result after the same
step (decision "One all-reduce a step, read before the update").
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from concertina_protocol import StepPart
from concertina_state.saving import StepFlags
from concertina_trainer.parallel.group import DistContext
from concertina_trainer.parallel.summing import Sums


@dataclasses.dataclass(frozen=True)
class StepResult:
    """Result of one step. It is the same on all ranks."""

    loss: float
    """Mean loss of the global batch."""
    squared_norm: float
    flags: StepFlags
    digests: tuple[float, ...] = ()
    """Payload of `Digests`, summed over ranks."""
    work: tuple[float, ...] = ()
    """Payload of `Balance`, summed over ranks."""
    loads: tuple[float, ...] = ()
    """Payload of `ExpertLoads`, summed over ranks."""


def agree(
    world: DistContext,
    sums: Sums,
    losses: Sequence[Tensor],
    gradients: Sequence[Tensor],
    flags: StepFlags,
    *payloads: Tensor,
) -> StepResult:
    """Return the result of a step, by one all-reduce of a few float64 values over all ranks.

    `payloads` are the vectors of `Digests`, `Balance` and `ExpertLoads`, in this order. A payload may be empty.
    """
    # Made on the host. Making it on the device would wait for the backward pass, and the all-reduce would be queued
    # late.
    counts = torch.tensor(dataclasses.astuple(flags), dtype=torch.float64).to(world.device, non_blocking=True)
    squares = sums.squares(gradients).to(world.device, non_blocking=True)  # gradients may be in host memory
    parts = [sums.losses(losses), squares, counts, *payloads]
    payload = torch.cat(parts)
    with world.times.measured(StepPart.ALL_REDUCE):
        dist.all_reduce(payload)
    numbers = iter(payload.tolist())  # on a GPU, one copy and so one wait
    loss, squared, raised, *others = [list(itertools.islice(numbers, len(part))) for part in parts]
    all_flags = StepFlags(*(round(count) for count in raised))
    return StepResult(sums.loss(loss), sums.squared_norm(squared), all_flags, *map(tuple, others))
