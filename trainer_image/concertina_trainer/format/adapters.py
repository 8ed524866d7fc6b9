"""Names of low-rank adapters.

The adapter of the weight NAME.weight has two matrices, NAME.lora_a and NAME.lora_b. The weights of a layer's experts
are one tensor NAME. The adapters of these weights are two tensors, NAME_lora_a and NAME_lora_b. The module does not
import torch.
"""

from __future__ import annotations

A, B, WEIGHT = "lora_a", "lora_b", ".weight"


def matrices(weight: str) -> tuple[str, str]:
    """Return the names of the two matrices of a weight's adapter."""
    stem = f"{weight.removesuffix(WEIGHT)}." if weight.endswith(WEIGHT) else f"{weight}_"
    return stem + A, stem + B


def is_adapter(name: str) -> bool:
    return name.endswith((f".{A}", f".{B}", f"_{A}", f"_{B}"))
