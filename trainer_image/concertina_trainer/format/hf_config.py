"""config.json beside weights to begin with: whether the model in it is the one of spec.trainer.model.

Most of what makes a model's arithmetic is in no tensor's name or shape: how many heads share a row of weights, the base
of the rotary positions, what is added to a norm. Weights that are computed with otherwise train, from a bad loss
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
"""The values of model_type whose names and arithmetic are our decoder's."""
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
"""Their field, and the one of spec.trainer.model that must say the same."""
FIXED = ("head_dim", "hidden_act", "attention_bias", "mlp_bias")
"""Our decoder has one value of these."""


def check(text: bytes, where: str, model: ModelConfig) -> None:
    """Of a file. Raises InvalidInput with each field that differs, both values, and what to set."""
    try:
        check_fields(json.loads(text), where, model)
    except (ValueError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise InvalidInput(f"{where} is no config.json that can be read: {str(error)[:300]}.") from error


def check_fields(config: Mapping[str, Any], where: str, model: ModelConfig) -> None:
    """As `check`."""
    _refuse(tuple(_differences(config, model)), where)


def check_ours(stored: ModelConfig, where: str, model: ModelConfig) -> None:
    """Of a checkpoint of this trainer: with what no config.json says. As `check`."""
    _refuse((*_differences(config_json(stored), model), *_differences_of_ours(stored, model)), where)


def _refuse(problems: Sequence[str], where: str) -> None:
    if problems:
        raise InvalidInput(
            f"the weights to begin with are of another model than spec.trainer.model: in {where} {'; '.join(problems)}."
        )


def _differences_of_ours(stored: ModelConfig, model: ModelConfig) -> Iterator[str]:
    """Of what is in no shape either."""
    pairs: list[tuple[str, object, object]] = []
    if stored.lora and model.lora:
        pairs += [("lora.alpha", stored.lora.alpha, model.lora.alpha)]
    if stored.experts and model.experts:
        theirs, ours = stored.experts, model.experts
        pairs += [
            ("experts.scores", theirs.scores, ours.scores),
            ("experts.activePerToken", theirs.active_per_token, ours.active_per_token),
        ]
    for name, value, mine in pairs:
        if not _equal(value, mine):
            is_there = _shown(value)
            yield f"{name} is {is_there}, and spec.trainer.model.{name} is {_shown(mine)}: set it to {is_there}"


def _differences(config: Mapping[str, Any], model: ModelConfig) -> Iterator[str]:
    kind = config.get("model_type")
    if kind not in KINDS:
        what = f"model_type is {_shown(kind)}" if kind else "model_type is missing"
        yield f"{what}, and the bundled decoder computes as {' and '.join(KINDS)} do: begin with such a model's weights"
        return
    theirs, mine = _with_defaults(config), config_json(model)
    for name, field in OURS.items():
        value = theirs.get(name)
        if value is None:
            yield f"{name} is missing: add what the model has"
        elif not _equal(value, mine[name]):
            theirs_is, ours_is = _shown(value), _shown(mine[name])
            yield f"{name} is {theirs_is}, and spec.trainer.model.{field} is {ours_is}: set it to {theirs_is}"
    for name in FIXED:
        # Where the width itself differs, that has been said.
        derived = name == "head_dim" and theirs["head_dim"] == _head_dim(theirs)
        if not derived and not _equal(theirs[name], mine[name]):
            yield _not_built(name, theirs[name], f"{_shown(mine[name])} alone")
    window = theirs.get("sliding_window")
    if window is not None and model.sequence_length > window:
        yield (f"sliding_window is {_shown(window)}, and in the bundled decoder a token attends to all before it: set "
               f"spec.trainer.model.sequenceLength ({model.sequence_length}) to at most that")  # fmt: skip
    if (scaling := theirs["rope_type"]) != "default":
        named = "rope_parameters" if config.get("rope_parameters") else "rope_scaling"
        yield _not_built(f"rope_type in {named}", scaling, "positions that are not scaled")
    if (part := theirs["partial_rotary_factor"]) != 1:
        yield _not_built("partial_rotary_factor", part, "1 alone")
    if config.get("quantization_config"):
        yield _not_built("quantization_config", config["quantization_config"], "weights that are not quantized")


def _with_defaults(config: Mapping[str, Any]) -> dict[str, Any]:
    """What a file that is older than a field means by its absence, as transformers reads it (null is absence too, but
    for sliding_window); with what is said of positions, which has lain in three places."""
    given = {name: value for name, value in config.items() if value is not None}
    rope = {**given.get("rope_scaling", {}), **given.get("rope_parameters", {})}
    mistral = config["model_type"] == "mistral"
    defaults = {
        "num_key_value_heads": 8 if mistral else given.get("num_attention_heads"),
        "head_dim": _head_dim(given),
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "rope_theta": 10000.0,
        "partial_rotary_factor": 1,
        **({"sliding_window": 4096} if mistral and "sliding_window" not in config else {}),
    }
    return {**defaults, **given, **rope, "rope_type": rope.get("rope_type") or rope.get("type") or "default"}


def _head_dim(config: Mapping[str, Any]) -> int | None:
    width, heads = config.get("hidden_size"), config.get("num_attention_heads")
    return width // heads if isinstance(width, int) and isinstance(heads, int) and heads else None


def _not_built(name: str, value: object, ours: str) -> str:
    return f"{name} is {_shown(value)}, and the bundled decoder has {ours}"


def _shown(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) < 200 else text[:200] + " ..."


def _equal(theirs: object, ours: object) -> bool:
    if isinstance(theirs, float | int) and isinstance(ours, float | int) and not isinstance(theirs, bool):
        return math.isclose(theirs, ours, rel_tol=1e-9)
    return theirs == ours
