"""Attention windows in config.json."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from concertina_trainer.config.model_config import ModelConfig
from concertina_trainer.format.hf_families import Family
from concertina_trainer.format.hf_positions import Part

WINDOW, FULL = "sliding_attention", "full_attention"
"""Values that the list layer_types of config.json can contain."""


def windows(values: Mapping[str, Any], family: Family) -> Part:
    """Return the attention windows that a config.json describes.

    `values` contains the fields of config.json, and the family's defaults for absent fields.
    """
    size, layers = values.get("sliding_window"), values.get("num_hidden_layers")
    if family.needs_window and size is None:
        return Part({}, {}, ["sliding_window is null, and the bundled decoder needs a number in this model family"])
    if not family.windows or size is None or layers is None:
        return Part({}, {}, [])
    types, pattern, every = values.get("layer_types"), values.get("sliding_window_pattern"), family.full_every
    problems = []
    if family.window_pattern:
        every = pattern or every
    elif pattern is not None and pattern != every:
        problems.append(f"sliding_window_pattern is {json.dumps(pattern)}, and this model family has no such field")
    # The bounds of num_hidden_layers are not checked yet: no list may be made of it.
    if types is not None and types != layer_types(len(types), every) and family.full_every:
        every = types.index(FULL) + 1 if FULL in types else None
    if every == 1 or (types is not None and (len(types) != layers or types != layer_types(len(types), every))):
        where = "full attention in every n-th layer" if family.full_every else "a window in each layer"
        name, value = ("sliding_window_pattern", pattern) if types is None else ("layer_types", types)
        problems.append(
            f"{name} is {json.dumps(value)[:200]}, and in this model family the bundled decoder supports only {where}"
        )
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
