"""Mapping of rotary positions between config.json and spec.trainer.model.

Versions of transformers have written the settings of rotary positions in three places: at the top level, in
rope_scaling, and in rope_parameters.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

from concertina_trainer.config.model_config import ModelConfig
from concertina_trainer.config.positions_config import RopeScalingType

SCALINGS: Mapping[str, tuple[RopeScalingType, Mapping[str, str]]] = {
    "linear": (RopeScalingType.linear, {"factor": "factor"}),
    "llama3": (
        RopeScalingType.llama3,
        {
            "factor": "factor",
            "low_freq_factor": "lowFrequencyFactor",
            "high_freq_factor": "highFrequencyFactor",
            "original_max_position_embeddings": "originalLength",
        },
    ),
    "yarn": (
        RopeScalingType.yarn,
        {
            "factor": "factor",
            "original_max_position_embeddings": "originalLength",
            "beta_fast": "betaFast",
            "beta_slow": "betaSlow",
            "truncate": "truncate",
            "attention_factor": "attentionFactor",
        },
    ),
}
"""Types of position scaling, keyed by the value of rope_type in config.json.

Each value is the type in this project, and a mapping from fields of config.json to fields of ropeScaling.
"""
OF_POSITIONS = ("rope_type", "partial_rotary_factor")
"""Fields of config.json that `positions_json` writes."""
OPTIONAL = ("beta_fast", "beta_slow", "truncate", "attention_factor")
NO_SCALING = ("rope_theta", "rope_type", "rope_local_base_freq", "rope_local_type", "partial_rotary_factor")
"""Fields of config.json about rotary positions that are not parameters of a scaling."""


@dataclasses.dataclass(frozen=True)
class Part:
    """Some fields of spec.trainer.model that a config.json describes, and reasons why they can't be used."""

    fields: dict[str, object]
    """Values of fields of spec.trainer.model, keyed by the field's path."""
    sources: dict[str, str]
    """Names in config.json of fields of spec.trainer.model, keyed by the field's path."""
    problems: Sequence[str]


def rope_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields in rope_scaling and rope_parameters. Null counts as absent."""
    parameters = config.get("rope_parameters") or {}
    given = {**(config.get("rope_scaling") or {}), **parameters.get("full_attention", parameters)}
    rope = {name: value for name, value in given.items() if value is not None}
    if "type" in rope:
        rope.setdefault("rope_type", rope.pop("type"))
    if local := parameters.get("sliding_attention"):
        rope |= {"rope_local_base_freq": local["rope_theta"], "rope_local_type": local.get("rope_type", "default")}
    return rope


def contradictions(config: Mapping[str, Any], windows_have_their_own: bool) -> list[str]:
    """Return part of a sentence about each field to which this config.json gives several different values.

    A config.json can contain a field in several places. Each version of transformers reads some of these places, and
    `rope_of` reads others.

    Args:
        config: Fields of config.json.
        windows_have_their_own: Whether the family uses separate rotary positions in layers with a window.
    """
    scaling, parameters = config.get("rope_scaling") or {}, config.get("rope_parameters") or {}
    problems = []
    if scaling and parameters and scaling != parameters:
        problems.append("rope_scaling and rope_parameters differ: remove the one that is wrong for the model")
    if windows_have_their_own and parameters and not {"full_attention", "sliding_attention"} & set(parameters):
        problems.append(
            "rope_parameters has neither full_attention nor sliding_attention: this model family needs one of them"
        )
    name = "original_max_position_embeddings"
    length, inner = config.get(name), rope_of(config)
    if length is not None and inner.get("rope_type") in ("llama3", "yarn") and inner.get(name) != length:
        problems.append(
            f"{name} is {json.dumps(length)} at the top level and {json.dumps(inner.get(name))} among the "
            "position fields: set both to the value of the model"
        )
    return problems


def positions(values: Mapping[str, Any], rope: Mapping[str, Any]) -> Part:
    """Return the rotary positions that a config.json describes.

    Args:
        values: Fields of config.json, with the family's defaults, and with the fields of `rope`.
        rope: Result of `rope_of`.
    """
    sources = {"ropeTheta": "rope_theta", "rotaryShare": "partial_rotary_factor"}
    fields: dict[str, object] = {path: values[name] for path, name in sources.items()}
    kind = rope.get("rope_type", "default")
    if rope.get("rope_local_type", "default") != "default":
        problem = (
            f"rope_type of sliding_attention is {rope['rope_local_type']}, and the bundled decoder "
            "supports only default"
        )
        return Part(fields, sources, [problem])
    if kind == "default":
        return Part(fields, sources, [])
    if kind not in SCALINGS:
        known = ", ".join(SCALINGS)
        problem = f"rope_type is {json.dumps(kind)}, and the bundled decoder supports {known}"
        return Part(fields, sources, [problem])
    type, names = SCALINGS[kind]
    fields["ropeScaling.type"], sources["ropeScaling.type"] = type.value, "rope_type"
    sources |= {f"ropeScaling.{path}": name for name, path in names.items()}
    fields |= {f"ropeScaling.{path}": rope[name] for name, path in names.items() if name in rope}
    missing = [name for name in names if name not in rope and name not in OPTIONAL]
    ignored = {"attention_factor"} if kind == "linear" else set()  # by transformers
    unknown = sorted(set(rope) - set(names) - set(NO_SCALING) - ignored)
    return Part(fields, sources, [
        *(f"{name} of the rope_type {kind} is missing: add the value of the model" for name in missing),
        *(f"{name} is {json.dumps(rope[name])}, and the bundled decoder does not support it" for name in unknown),
    ])  # fmt: skip


def positions_json(model: ModelConfig) -> dict[str, Any]:
    """Return the fields of config.json for the model's rotary positions.

    All versions of transformers can read the result.
    """
    unscaled = {"rope_theta": model.rope_theta, "partial_rotary_factor": model.rotary_share}
    scaling = model.rope_scaling
    if scaling is None:
        return unscaled
    names = {type: (kind, fields) for kind, (type, fields) in SCALINGS.items()}
    kind, fields = names[scaling.type]
    values = scaling.model_dump(mode="json", by_alias=True, exclude_none=True)
    written = {name: values[path] for name, path in fields.items() if path in values}
    return {**unscaled, "rope_scaling": {"rope_type": kind, **written}}
