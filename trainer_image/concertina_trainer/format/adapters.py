"""Names of low-rank adapters: those of NAME.weight are NAME.lora_a and NAME.lora_b. No torch."""

from __future__ import annotations

A, B, WEIGHT = ".lora_a", ".lora_b", ".weight"


def is_adapter(name: str) -> bool:
    return name.endswith((A, B))
