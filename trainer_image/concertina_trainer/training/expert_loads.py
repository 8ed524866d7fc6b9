"""Number of tokens of each expert in a step, over all ranks: for the biases, and for reports.

A bias is raised by the rate if its expert had fewer tokens than the mean, and lowered if it had more (balancing without
an auxiliary loss, Wang et al. 2024). Biases are part of the state, and the same on all ranks, as all read the same
sums.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from concertina_trainer.config.model_config import ModelConfig
from concertina_trainer.model.stages import Stages


class ExpertLoads:
    """Loads of the experts."""

    def __init__(self, model: Stages, config: ModelConfig) -> None:
        experts = config.experts
        self._dense, self._count = (experts.first_dense, experts.count) if experts else (config.layers, 0)
        self._layers, self._rate = config.layers - self._dense, (experts and experts.bias_rate) or 0.0
        self._mixtures = dict(model.mixtures())
        """Mixtures of this rank's stages, by layer."""

    def payload(self, device: torch.device) -> Tensor:
        """Return the loads of this rank's microbatches and layers since the last call, float64 `[layers * experts]`.

        It is empty without experts.
        """
        loads = torch.zeros(self._layers, self._count, dtype=torch.float64, device=device)
        for layer, moe in self._mixtures.items():
            if moe.loads is not None:
                loads[layer - self._dense] = moe.loads
            moe.loads = None
        return loads.flatten()

    @torch.no_grad()
    def update(self, loads: Sequence[float]) -> None:
        """Update the biases by the loads of all ranks. Call this once per step, with the update of the weights."""
        by_layer = self._by_layer(loads)
        for layer, moe in self._mixtures.items():
            if self._rate and moe.router.bias is not None:
                of_layer = by_layer[layer - self._dense]
                moe.router.bias += self._rate * torch.sign(of_layer.mean() - of_layer).to(moe.router.bias)

    def busiest(self, loads: Sequence[float]) -> float | None:
        """Return the greatest load over the mean of its layer, of all layers; 1 if loads are even.

        None without experts.
        """
        return max(
            (float(layer_loads.max() / layer_loads.mean()) for layer_loads in self._by_layer(loads)), default=None
        )

    def _by_layer(self, loads: Sequence[float]) -> Tensor:
        return torch.tensor(loads, dtype=torch.float64).view(self._layers, self._count)
