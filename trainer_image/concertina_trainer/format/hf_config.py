"""Check of config.json beside initial weights: whether its model is the one of spec.trainer.model.

Most of a model's arithmetic is in no tensor's name or shape: how many heads share a row of weights, the base of the
rotary positions, what is added to a norm. Weights of a model with other arithmetic still train, from a bad loss
(decision "Initial weights are checked by config.json").
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from concertina_state.errors import InvalidInput
from concertina_trainer.config.model_config import ModelConfig
from concertina_trainer.format.hf_names import config_json

NAME = "config.json"
KINDS = ("llama", "mistral")
"""Values of model_type whose names and arithmetic are those of the bundled decoder."""
OURS = {
    "num_hidden_layers": "layers",
    "hidden_size": "dim",
    "num_attention_heads": "heads",
    "num_key_value_heads": "kvHeads",
    "intermediate_size": "hiddenDim",
    "vocab_size": "vocabSize",
    "tie_word_embeddings": "tieEmbeddings",
    "rms_norm_eps": "normEpsilon",
    "rope_theta": "ropeTheta",
}
"""Field of config.json, and the field of spec.trainer.model that must have the same value."""
FIXED = ("head_dim", "hidden_act", "attention_bias", "mlp_bias")
"""Fields for which the bundled decoder has one value only."""


def check(text: bytes, where: str, model: ModelConfig) -> None:
    """Check the contents of a file.

    Raises:
        InvalidInput: When a field differs. The message has each such field, both values, and what to set.
    """
    try:
        check_fields(json.loads(text), where, model)
    except (ValueError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise InvalidInput(f"{where} is no config.json that can be read: {str(error)[:300]}.") from error


def check_fields(config: Mapping[str, Any], where: str, model: ModelConfig) -> None:
    """Check the fields of a config.json, as `check` does."""
    _refuse(tuple(_differences(config, model)), where)


def check_ours(stored: ModelConfig, where: str, model: ModelConfig) -> None:
    """Check a checkpoint of this trainer, as `check` does, including fields that no config.json has."""
    _refuse((*_differences(config_json(stored), model), *_differences_of_ours(stored, model)), where)


def _refuse(problems: Sequence[str], where: str) -> None:
    if problems:
        raise InvalidInput(
            f"the weights to begin with are of another model than spec.trainer.model: in {where} {'; '.join(problems)}."
        )


def _differences_of_ours(stored: ModelConfig, model: ModelConfig) -> Iterator[str]:
    """Yield differences in fields that are in no shape and no config.json."""
    pairs: list[tuple[str, object, object]] = []
    if stored.lora and model.lora:
        pairs += [("lora.alpha", stored.lora.alpha, model.lora.alpha)]
    if stored.experts and model.experts:
        stored_experts, ours = stored.experts, model.experts
        pairs += [
            ("experts.scores", stored_experts.scores, ours.scores),
            ("experts.activePerToken", stored_experts.active_per_token, ours.active_per_token),
        ]
    for name, value, current in pairs:
        if not _equal(value, current):
            is_there = _shown(value)
            yield f"{name} is {is_there}, and spec.trainer.model.{name} is {_shown(current)}: set it to {is_there}"


def _differences(config: Mapping[str, Any], model: ModelConfig) -> Iterator[str]:
    kind = config.get("model_type")
    if kind not in KINDS:
        fact = f"model_type is {_shown(kind)}" if kind else "model_type is missing"
        yield f"{fact}, and the bundled decoder computes as {' and '.join(KINDS)} do: begin with such a model's weights"
        return
    file_fields, own_fields = _with_defaults(config), config_json(model)
    for name, field in OURS.items():
        value = file_fields.get(name)
        if value is None:
            yield f"{name} is missing: add what the model has"
        elif not _equal(value, own_fields[name]):
            stored_text, own_text = _shown(value), _shown(own_fields[name])
            yield f"{name} is {stored_text}, and spec.trainer.model.{field} is {own_text}: set it to {stored_text}"
    for name in FIXED:
        # A difference that follows from the width has been reported already.
        derived = name == "head_dim" and file_fields["head_dim"] == _head_dim(file_fields)
        if not derived and not _equal(file_fields[name], own_fields[name]):
            yield _not_built(name, file_fields[name], f"{_shown(own_fields[name])} alone")
    window = file_fields.get("sliding_window")
    if window is not None and model.sequence_length > window:
        yield (f"sliding_window is {_shown(window)}, and in the bundled decoder a token attends to all before it: set "
               f"spec.trainer.model.sequenceLength ({model.sequence_length}) to at most that")  # fmt: skip
    if (scaling := file_fields["rope_type"]) != "default":
        section = "rope_parameters" if config.get("rope_parameters") else "rope_scaling"
        yield _not_built(f"rope_type in {section}", scaling, "positions that are not scaled")
    if (part := file_fields["partial_rotary_factor"]) != 1:
        yield _not_built("partial_rotary_factor", part, "1 alone")
    if config.get("quantization_config"):
        yield _not_built("quantization_config", config["quantization_config"], "weights that are not quantized")


def _with_defaults(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields with the defaults that transformers uses for absent ones.

    A file may be older than a field. Null counts as absent, except for sliding_window. Fields about positions, which
    have been in three places, are merged.
    """
    present = {name: value for name, value in config.items() if value is not None}
    rope = {**present.get("rope_scaling", {}), **present.get("rope_parameters", {})}
    mistral = config["model_type"] == "mistral"
    defaults = {
        "num_key_value_heads": 8 if mistral else present.get("num_attention_heads"),
        "head_dim": _head_dim(present),
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "rope_theta": 10000.0,
        "partial_rotary_factor": 1,
        **({"sliding_window": 4096} if mistral and "sliding_window" not in config else {}),
    }
    return {**defaults, **present, **rope, "rope_type": rope.get("rope_type") or rope.get("type") or "default"}


def _head_dim(config: Mapping[str, Any]) -> int | None:
    width, heads = config.get("hidden_size"), config.get("num_attention_heads")
    return width // heads if isinstance(width, int) and isinstance(heads, int) and heads else None


def _not_built(name: str, value: object, ours: str) -> str:
    return f"{name} is {_shown(value)}, and the bundled decoder has {ours}"


def _shown(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) < 200 else text[:200] + " ..."


def _equal(first: object, second: object) -> bool:
    if isinstance(first, float | int) and isinstance(second, float | int) and not isinstance(first, bool):
        return math.isclose(first, second, rel_tol=1e-9)
    return first == second
