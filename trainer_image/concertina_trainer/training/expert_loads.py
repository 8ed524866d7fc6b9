"""How many tokens each expert has had in a step, over all ranks: what biases follow, and what is told of it.

A bias is raised by the rate where its expert had fewer than the mean, and lowered where it had more (balancing without
an auxiliary loss, Wang et al. 2024). It is part of the state, and the same on all ranks: all read the same sums."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from concertina_trainer.config.model import ExpertsConfig
from concertina_trainer.model.stages import Stages


class ExpertLoads:
    def __init__(self, model: Stages, config: ExpertsConfig | None) -> None:
        self._mixtures, self._rate = list(model.mixtures()), (config and config.bias_rate) or 0.0

    def payload(self, device: torch.device) -> Tensor:
        """Of this rank's microbatches since the last time, float64 [layers * experts]; empty without experts."""
        taken = [moe.loads for moe in self._mixtures if moe.loads is not None]
        for moe in self._mixtures:
            moe.loads = None
        return torch.cat(taken).double() if taken else torch.empty(0, dtype=torch.float64, device=device)

    @torch.no_grad()
    def update(self, loads: Sequence[float]) -> None:
        """Of all ranks: once a step, with the weights."""
        for moe, of_layer in zip(self._mixtures, self._by_layer(loads), strict=True):
            if self._rate and moe.router.bias is not None:
                moe.router.bias += self._rate * torch.sign(of_layer.mean() - of_layer).to(moe.router.bias)

    def busiest(self, loads: Sequence[float]) -> float | None:
        """The greatest load over the mean of its layer, of all layers; 1 where loads are even. None without experts."""
        return max((float(each.max() / each.mean()) for each in self._by_layer(loads)), default=None)

    def _by_layer(self, loads: Sequence[float]) -> list[Tensor]:
        return list(torch.tensor(loads, dtype=torch.float64).view(len(self._mixtures), -1)) if loads else []
