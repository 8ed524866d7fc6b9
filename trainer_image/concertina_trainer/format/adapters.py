"""Names of low-rank adapters.

The adapter of the weight NAME.weight has two matrices, NAME.lora_a and NAME.lora_b. The module does not import torch.
"""

from __future__ import annotations

A, B, WEIGHT = ".lora_a", ".lora_b", ".weight"


def is_adapter(name: str) -> bool:
    return name.endswith((A, B))
