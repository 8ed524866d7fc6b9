"""`data.balance: Speed`: each rank's share of a batch follows its measured speed.

The measurement is the one that identifies stragglers (`Heartbeat.busy`): the time of a rank in a step without waiting
for other ranks, but with its wait for data. The all-reduce of a step has the median of a window of each rank at an
index of its own. So all ranks read the same bits, compute the same shares by the same pure function, and change them at
the same batch. Nothing of this is saved: every round begins with even shares.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import torch
from torch import Tensor

from concertina_trainer.data.read.batches import Batches, Microbatch
from concertina_trainer.training.shares import Shares, even, rebalanced

WINDOW = 10
"""Number of steps in a window. A window is longer than the batches that are prepared ahead, so a change of shares is in
effect before the next window ends."""
_SHOWN = 8


class Balance:
    """Shares of the ranks. If `on` is False, shares stay even, and nothing is sent."""

    def __init__(self, on: bool, batches: Batches, micro_size: int, rank: int) -> None:
        self._on, self._batches, self._micro, self._rank = on, batches, micro_size, rank
        self._plan = batches.plan
        self.shares = even(self._plan.global_size, self._plan.world)
        self._busy: float | None = None
        self._seconds: list[float] = []
        """Seconds per sequence, of each step since the last window."""

    @property
    def reported(self) -> Shares:
        """Sequences of each rank for the status; empty if they do not follow its speed."""
        return self.shares if self._on else ()

    def worked(self, microbatches: Sequence[Microbatch], busy: float) -> None:
        """Record what a step computed, and the seconds of own work in this round.

        The first step warms up. All ranks count the same steps, whatever they measure, as the payload must have the
        same length everywhere.
        """
        if self._on and self._busy is not None:
            rows = sum(len(batch.tokens) for batch in microbatches)
            self._seconds.append(max(1e-9, busy - self._busy) / rows)
        self._busy = busy

    def payload(self, device: torch.device) -> Tensor:
        """Return float64 values for the all-reduce.

        They are empty, or at the end of a window `[ranks]` with this rank's seconds per sequence.
        """
        if len(self._seconds) < WINDOW:
            return torch.empty(0, dtype=torch.float64, device=device)
        seconds_by_rank = torch.zeros(self._plan.world, dtype=torch.float64)
        seconds_by_rank[self._rank] = statistics.median(self._seconds)
        self._seconds.clear()
        return seconds_by_rank.to(device)

    def decide(self, payload: Sequence[float]) -> str:
        """Change the shares if that pays, and return a sentence about it, else an empty one.

        The change begins with a batch that no rank has begun to prepare.
        """
        shares = rebalanced(self.shares, payload) if payload else self.shares
        if shares == self.shares:
            return ""
        self.shares = shares
        self._batches.change(self._plan.shared_out(shares, self._micro))
        milliseconds = [round(1000 * seconds, 1) for seconds in payload]
        return f"balance: sequences a step by rank are {_listed(shares)}; each takes ms {_listed(milliseconds)}"


def _listed(numbers: Sequence[float]) -> str:
    if len(numbers) <= _SHOWN:
        return " ".join(map(str, numbers))
    return f"{' '.join(map(str, numbers[:_SHOWN]))} ... (from {min(numbers)} to {max(numbers)})"
