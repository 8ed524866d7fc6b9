"""Names of low-rank adapters. No torch.

The adapter of the weight NAME.weight has two matrices, NAME.lora_a and NAME.lora_b.
"""

from __future__ import annotations

A, B, WEIGHT = ".lora_a", ".lora_b", ".weight"


def is_adapter(name: str) -> bool:
    return name.endswith((A, B))
