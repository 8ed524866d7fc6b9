"""Attention windows in config.json."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from concertina_trainer.config.model_config import ModelConfig
from concertina_trainer.format.hf_families import Family
from concertina_trainer.format.hf_positions import Part

WINDOW, FULL = "sliding_attention", "full_attention"
"""Values in the list layer_types."""


def windows(values: Mapping[str, Any], family: Family) -> Part:
    """Return the attention windows that a config.json describes. `values` has its fields and the family's defaults."""
    size, layers = values.get("sliding_window"), values.get("num_hidden_layers")
    if not family.windows or size is None or layers is None:
        return Part({}, {}, [])
    every = values.get("sliding_window_pattern") or family.full_every
    types = values.get("layer_types") or layer_types(layers, every)
    if types != layer_types(layers, every):
        every = types.index(FULL) + 1 if FULL in types else None
    problems = []
    if types != layer_types(layers, every) or every == 1:
        problems = [f"layer_types is {json.dumps(types)[:200]}, and the bundled decoder has every n-th layer full"]
    sources = {"window.size": "sliding_window", "window.fullEvery": "layer_types"}
    return Part({"window.size": size, "window.fullEvery": every}, sources, problems)


def windows_json(model: ModelConfig, family: Family) -> dict[str, Any]:
    """Return the fields of config.json for the model's attention windows."""
    if not family.windows:
        return {}
    if model.window is None:
        return {"sliding_window": None}
    types = {"layer_types": layer_types(model.layers, model.window.full_every)} if family.full_every else {}
    return {"sliding_window": model.window.size, **types}


def layer_types(layers: int, full_every: int | None) -> list[str]:
    """Return the list layer_types, in which every `full_every`-th layer has full attention."""
    return [FULL if full_every and (layer + 1) % full_every == 0 else WINDOW for layer in range(layers)]
