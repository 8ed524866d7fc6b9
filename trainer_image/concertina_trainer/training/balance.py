"""`data.balance: Speed`: each rank's share of a batch follows its measured speed.

The speed comes from the measurement that also identifies slow ranks (`Heartbeat.busy`). The measurement is the rank's
time in a step, including waits for data, but excluding waits for other ranks. At the end of a window of steps, each
rank contributes its median to the all-reduce of the step, in an element of its own. All ranks therefore read the same
values, compute the same shares, and change the shares at the same batch. Shares are not saved: every round begins with
even shares.

A round is a period in which a fixed set of replicas trains.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import torch
from torch import Tensor

from concertina_trainer.data.read.batches import Batches, Microbatch
from concertina_trainer.training.shares import Shares, even, rebalanced

WINDOW = 10
"""Number of steps in a window.

A window is longer than the number of batches that are prepared ahead, so that a change of shares is in effect before
the next window ends.
"""
_SHOWN = 8


class Balance:
    """Each rank's share of the global batch, in sequences.

    If `on` is False, shares stay even, and the ranks exchange no measurements.
    """

    def __init__(self, on: bool, batches: Batches, micro_size: int, rank: int) -> None:
        self._on, self._batches, self._micro, self._rank = on, batches, micro_size, rank
        self._plan = batches.plan
        self.shares = even(self._plan.global_size, self._plan.world)
        self._busy: float | None = None
        self._seconds: list[float] = []
        """Seconds of this rank's own work per sequence, for each step since the end of the last window."""

    @property
    def reported(self) -> Shares:
        """Number of sequences of each rank, for the job's status; empty if shares do not follow speed."""
        return self.shares if self._on else ()

    def worked(self, microbatches: Sequence[Microbatch], busy: float) -> None:
        """Record the microbatches of a step, and `busy`, the seconds of this rank's own work since the round began.

        The first step is not recorded, because it includes the warm-up. All ranks must record the same steps, so that
        their payloads for the all-reduce have the same length.
        """
        if self._on and self._busy is not None:
            rows = sum(len(batch.tokens) for batch in microbatches)
            self._seconds.append(max(1e-9, busy - self._busy) / rows)
        self._busy = busy

    def payload(self, device: torch.device) -> Tensor:
        """Return this rank's payload for the all-reduce of the step, float64.

        At the end of a window, the payload is `[ranks]`: this rank's median of seconds per sequence at the rank's own
        index, and zeros at all other indices. After any other step, the payload is empty.
        """
        if len(self._seconds) < WINDOW:
            return torch.empty(0, dtype=torch.float64, device=device)
        seconds_by_rank = torch.zeros(self._plan.world, dtype=torch.float64)
        seconds_by_rank[self._rank] = statistics.median(self._seconds)
        self._seconds.clear()
        return seconds_by_rank.to(device, non_blocking=True)

    def decide(self, payload: Sequence[float]) -> str:
        """Change the shares if this shortens steps enough. Return a sentence about the change, or "" without a change.

        `payload` is the sum of all ranks' payloads. The new shares begin with a batch that no rank has begun to
        prepare.
        """
        shares = rebalanced(self.shares, payload) if payload else self.shares
        if shares == self.shares:
            return ""
        self.shares = shares
        self._batches.change(self._plan.shared_out(shares, self._micro))
        milliseconds = [round(1000 * seconds, 1) for seconds in payload]
        return (
            f"balance: sequences per step by rank: {_listed(shares)}; milliseconds per sequence: "
            f"{_listed(milliseconds)}"
        )


def _listed(numbers: Sequence[float]) -> str:
    if len(numbers) <= _SHOWN:
        return " ".join(map(str, numbers))
    return f"{' '.join(map(str, numbers[:_SHOWN]))} ... (from {min(numbers)} to {max(numbers)})"
