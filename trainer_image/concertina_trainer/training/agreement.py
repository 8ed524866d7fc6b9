"""What all ranks must know of each other, in the one small all-reduce of each step.

Everything is a sum, so that one operation does: a flag is agreed when its sum is above 0, and something holds on
every rank when its sum is the world's size. The result is read before the weights are updated, so a loss that is not
finite never reaches them, and all ranks act on the same word after the same step.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from concertina_trainer.parallel.parallel import World
from concertina_trainer.parallel.summing import Sums


@dataclasses.dataclass(frozen=True)
class Said:
    """One rank's flags; as the result of the all-reduce, how many ranks raised them."""

    drain: int = 0
    """Rank 0: stop after this step."""
    drain_durable: int = 0
    checkpoint_due: int = 0
    """Rank 0: checkpoint.everySeconds have passed."""
    copied_last: int = 0
    """This rank's last snapshot is complete on its peer."""
    copied_before: int = 0
    """The one before it is."""
    shipping: int = 0
    """A part of this rank is still on its way to storage."""


@dataclasses.dataclass(frozen=True)
class Agreed:
    loss: float
    """Over the global batch."""
    squared_norm: float
    said: Said
    digests: tuple[float, ...] = ()
    """See `digests`."""
    work: tuple[float, ...] = ()
    """See `balance`."""


def agree(
    world: World, sums: Sums, losses: Sequence[Tensor], gradients: Sequence[Tensor], said: Said, *words: Tensor
) -> Agreed:
    """One all-reduce of a few float64; `words`: those of `digests` and `balance`, which may be empty."""
    flags = torch.tensor(dataclasses.astuple(said), dtype=torch.float64, device=world.device)
    parts = [sums.losses(losses), sums.squares(gradients), flags, *words]
    word = torch.cat(parts)
    with world.waits.measured():
        dist.all_reduce(word)
    loss, squares, counts, *seen = (part.tolist() for part in word.split([len(part) for part in parts]))
    return Agreed(
        sums.loss(loss), sums.squared_norm(squares), Said(*(round(count) for count in counts)), *map(tuple, seen)
    )
