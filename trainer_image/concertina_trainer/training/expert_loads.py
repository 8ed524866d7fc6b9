"""Number of tokens of each expert in a step, summed over all ranks, for the router's biases and for reports.

After each step, an expert's bias is raised by the rate if the expert had fewer tokens than the mean of its layer, and
lowered by the rate if it had more (balancing without an auxiliary loss, Wang et al. 2024). Biases are saved with the
state. They are the same on all ranks, because all ranks compute them from the same sums.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from concertina_trainer.config.model_config import ModelConfig
from concertina_trainer.model.stages import Stages


class ExpertLoads:
    """Loads of the experts: the number of tokens that each expert was chosen for in a step."""

    def __init__(self, model: Stages, config: ModelConfig) -> None:
        experts = config.experts
        self._dense, self._count = (experts.first_dense, experts.count) if experts else (config.layers, 0)
        self._layers, self._rate = config.layers - self._dense, (experts and experts.bias_rate) or 0.0
        self._mixtures = dict(model.mixtures())
        """Mixtures of experts in this rank's pipeline stages, keyed by the number of the layer."""

    def payload(self, device: torch.device) -> Tensor:
        """Return the loads of this rank's microbatches since the last call, float64 `[layers * experts]`.

        The payload omits layers without experts, and contains zeros for layers of other pipeline stages. The payload is
        empty if the model has no experts.
        """
        loads = torch.zeros(self._layers, self._count, dtype=torch.float64, device=device)
        for layer, moe in self._mixtures.items():
            if moe.loads is not None:
                loads[layer - self._dense] = moe.loads
            moe.loads = None
        return loads.flatten()

    @torch.no_grad()
    def update(self, loads: Sequence[float]) -> None:
        """Update the router's biases from `loads`, which are summed over all ranks.

        Call this once per step, together with the update of the weights.
        """
        by_layer = self._by_layer(loads)
        for layer, moe in self._mixtures.items():
            if self._rate and moe.router.bias is not None:
                of_layer = by_layer[layer - self._dense]
                moe.router.bias += self._rate * torch.sign(of_layer.mean() - of_layer).to(
                    moe.router.bias, non_blocking=True
                )

    def busiest(self, loads: Sequence[float]) -> float | None:
        """Return the ratio of the busiest expert's load to its layer's mean load, the maximum over all layers.

        The ratio is 1 if loads are even. The result is None if the model has no experts, or if no token has a weight.
        """
        layers = [loads[begin : begin + self._count] for begin in range(0, len(loads), self._count or 1)]
        return max((max(layer) * len(layer) / sum(layer) for layer in layers if sum(layer)), default=None)

    def _by_layer(self, loads: Sequence[float]) -> Tensor:
        return torch.tensor(loads, dtype=torch.float64).view(self._layers, self._count)
