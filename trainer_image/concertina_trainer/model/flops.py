"""How much there is to compute, and how much a device can."""

from __future__ import annotations

from typing import TYPE_CHECKING

from concertina_trainer.config.model import ModelConfig

if TYPE_CHECKING:
    import torch

PEAK_FLOPS = {"A100": 312e12, "H100": 989e12, "H200": 989e12, "B200": 2250e12}
"""Dense bfloat16 operations a second by device, as the vendor states them."""


def peak_flops(device: torch.device) -> float | None:
    """Of one device; None where it is not in the table."""
    import torch  # `concertina plan` counts operations without it

    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    return next((peak for model, peak in PEAK_FLOPS.items() if model in name), None)


def token_flops(config: ModelConfig) -> float:
    """Operations of one token's forward and backward: 6 a weight that it meets, 4 where it is frozen (it has no
    gradient), and attention's 12 * layers * dim * length / 2."""
    frozen = config.weights - config.trained_weights
    weights = 6.0 * config.active_weights - 2.0 * frozen
    return weights + 6.0 * config.layers * config.dim * config.sequence_length
