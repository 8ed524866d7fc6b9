"""`data.balance: Speed`: what each rank takes of a batch follows what it is measured to do.

Measured is what stragglers are told by (`Heartbeat.busy`): what a rank does in a step apart from waiting for others,
which its wait for data is part of. The median of a window travels in the step's all-reduce, each rank's in a place of
its own, so all read the same bits, come to the same shares by the same pure function, and change them at the same
batch. Nothing of it is saved: every round begins with even shares.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import torch
from torch import Tensor

from concertina_trainer.data.read.batches import Batches, Microbatch
from concertina_trainer.training.shares import Shares, even, rebalanced

WINDOW = 10
"""Steps. More than batches are prepared ahead, so a change has come into effect before the next one."""
_SHOWN = 8


class Balance:
    """`on` False: shares stay even, and nothing travels."""

    def __init__(self, on: bool, batches: Batches, micro_size: int, rank: int) -> None:
        self._on, self._batches, self._micro, self._rank = on, batches, micro_size, rank
        self._plan = batches.plan
        self.shares = even(self._plan.global_size, self._plan.world)
        self._busy: float | None = None
        self._seconds: list[float] = []
        """A sequence, of each step since the last look."""

    @property
    def reported(self) -> Shares:
        """For the status: sequences of each rank; empty where they don't follow its speed."""
        return self.shares if self._on else ()

    def worked(self, microbatches: Sequence[Microbatch], busy: float) -> None:
        """After a step: what it computed, and seconds of own work of this round. The first step warms up. All ranks
        count the same steps, whatever they measure: what travels must be as long everywhere."""
        if self._on and self._busy is not None:
            rows = sum(len(batch.tokens) for batch in microbatches)
            self._seconds.append(max(1e-9, busy - self._busy) / rows)
        self._busy = busy

    def payload(self, device: torch.device) -> Tensor:
        """float64: nothing, or at the end of a window for each rank its seconds a sequence."""
        if len(self._seconds) < WINDOW:
            return torch.empty(0, dtype=torch.float64, device=device)
        found = torch.zeros(self._plan.world, dtype=torch.float64)
        found[self._rank] = statistics.median(self._seconds)
        self._seconds.clear()
        return found.to(device)

    def decide(self, payload: Sequence[float]) -> str:
        """Takes other shares where they pay, from a batch on that no rank has begun to prepare; says so in a sentence,
        else empty."""
        shares = rebalanced(self.shares, payload) if payload else self.shares
        if shares == self.shares:
            return ""
        self.shares = shares
        self._batches.change(self._plan.shared_out(shares, self._micro))
        milliseconds = [round(1000 * each, 1) for each in payload]
        return f"balance: sequences a step by rank are {_listed(shares)}; each takes ms {_listed(milliseconds)}"


def _listed(numbers: Sequence[float]) -> str:
    if len(numbers) <= _SHOWN:
        return " ".join(map(str, numbers))
    return f"{' '.join(map(str, numbers[:_SHOWN]))} ... (from {min(numbers)} to {max(numbers)})"
