"""Mapping between config.json of Hugging Face models and spec.trainer.model of the bundled decoder.

The names and shapes of tensors do not show most of a model's arithmetic, for example the number of attention heads, the
base of the rotary positions, or what is added to a norm's weight. If weights are loaded into a model with other
arithmetic, training runs without an error, but starts from a high loss (decision "Initial weights are checked against
config.json").
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from concertina_state.errors import InvalidInput
from concertina_trainer.config.changes import ABSENT, architecture, resolved
from concertina_trainer.config.model_config import ModelConfig
from concertina_trainer.config.positions_config import RopeScalingType
from concertina_trainer.config.section import Section
from concertina_trainer.format.hf_families import COMMON, DEFAULTS, FAMILIES, NULLABLE, Family
from concertina_trainer.format.hf_positions import OF_POSITIONS, contradictions, positions, positions_json, rope_of
from concertina_trainer.format.hf_windows import windows, windows_json

NAME = "config.json"
MOST_PREDICTION_LAYERS = 16
MOST_BYTES, MOST_NAMED = 1 << 16, 6
NOT_OF_THE_MODEL = ("_name_or_path", "transformers_version", "dtype", "torch_dtype", "use_cache")
"""Fields of config.json that do not affect the model's computation."""
OF_TRAINING = ("sequenceLength", "lora.rank", "lora.alpha", "lora.targets", "lora.dropout", "lora.frozenDtype")
"""Fields of spec.trainer.model that are settings of training, and may differ between runs of the same model."""


@dataclasses.dataclass(frozen=True)
class Described:
    """Model that a config.json describes, and the reasons why the bundled decoder can't compute this model."""

    kind: str
    """Value of the field `model_type`."""
    fields: Mapping[str, object]
    """Values of fields of spec.trainer.model, keyed by the field's path."""
    sources: Mapping[str, str]
    """Name in config.json of each field of spec.trainer.model that has one, keyed by the field's path."""
    problems: Sequence[str]
    """Reasons why the bundled decoder can't compute the model, each as part of a sentence.

    A reason is a feature that the decoder does not have, or a field that is missing.
    """
    prediction_layers: int = 0
    """Number of layers after the last decoder layer that predict further tokens.

    The decoder leaves out these layers.
    """

    @property
    def family(self) -> Family:
        return FAMILIES[self.kind]

    @property
    def left_out(self) -> str:
        """Sentence about the prediction layers that are left out, or "" if there are none."""
        if not self.prediction_layers:
            return ""
        return (
            f"{self.family.prediction_layers} is {self.prediction_layers}: the layers that predict further tokens are "
            "neither loaded, nor trained, nor exported"
        )

    def model(self) -> ModelConfig:
        """Return the described model as the section spec.trainer.model.

        Raises:
            ValidationError: When the fields are not valid for spec.trainer.model.
        """
        return ModelConfig.model_validate(_nested(self.fields))


def read(text: bytes, where: str) -> Described:
    """Return the model that the contents of a config.json describe. `where` is the file's URI, for messages.

    Raises:
        InvalidInput: When the bundled decoder does not compute this model. The message names each problem.
    """
    try:
        found = described(json.loads(text))
        if not found.problems:
            found.model()
    except ValidationError as error:
        problem = "; ".join(f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors())
        raise InvalidInput(
            f"{where} describes a model that the bundled decoder does not support: {problem[:300]}."
        ) from error
    except (ValueError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise InvalidInput(f"{where} can't be read as a config.json: {str(error)[:300]}.") from error
    if found.problems:
        raise InvalidInput(
            f"{where} describes a model that the bundled decoder does not support: {'; '.join(found.problems)}."
        )
    return found


def fields_of(text: bytes, where: str) -> dict[str, Any]:
    """Return the fields of a config.json that describe the model. `where` is the file's URI, for messages.

    The fields in NOT_OF_THE_MODEL are left out.

    Raises:
        InvalidInput: When the text is not a JSON object, or too long to be saved with the state.
    """
    if len(text) > MOST_BYTES:
        raise InvalidInput(f"{where} has {len(text)} bytes, and at most {MOST_BYTES} are supported.")
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidInput(f"{where} can't be read as a config.json: {str(error)[:300]}.") from error
    if not isinstance(fields, dict):
        raise InvalidInput(f"{where} can't be read as a config.json: it is not an object.")
    return {name: value for name, value in fields.items() if name not in NOT_OF_THE_MODEL}


def check_fields(text: bytes, where: str, options: Mapping[str, Any]) -> None:
    """Check that a config.json has the same fields as the model of `model.hf`, whose fields are `options`.

    Raises:
        InvalidInput: When a field differs. The message names each such field and both values.
    """
    there = fields_of(text, where)
    differing = [name for name in sorted({*there, *options}) if there.get(name, ABSENT) != options.get(name, ABSENT)]
    if differing:
        clauses = (
            f"{name} is {_shown(there.get(name, ABSENT))}, and {_shown(options.get(name, ABSENT))} in the model"
            for name in differing[:MOST_NAMED]
        )
        raise InvalidInput(
            f"the initial weights belong to another model than spec.trainer.model.hf: in {where} {'; '.join(clauses)}."
        )


def check(text: bytes, where: str, model: ModelConfig) -> Described:
    """Check that the contents of a config.json describe `model`, and return the model that they describe.

    Raises:
        InvalidInput: When a field differs. The message names each such field, both values, and the setting to change.
    """
    found = read(text, where)
    _refuse(_differences(found.model(), model, found.sources), where)
    return found


def filled(model: ModelConfig, found: ModelConfig, where: str) -> ModelConfig:
    """Return the described model `found`, with the fields of `model` that are not part of the architecture.

    These fields are the sequence length, adapters, and how experts are balanced.

    Args:
        model: Section spec.trainer.model. Any field of the architecture in this section must have the value of `found`.
        found: Model that the config.json at `model.from` describes.
        where: URI of the config.json, for messages.

    Raises:
        InvalidInput: When a field of `model` has another value than in `found`. The message names each such field, both
            values, and what to do.
    """
    experts = found.experts
    if experts is not None and model.experts is not None:
        balancing, rate = model.experts, model.experts.bias_rate
        loss = (balancing if "balance_loss" in balancing.model_fields_set else experts).balance_loss
        of_training = {"balance_loss": loss, "bias_rate": experts.bias_rate if rate is None else rate}
        experts = experts.model_copy(update=of_training)
    of_spec = {"from_": model.from_, "sequence_length": model.sequence_length, "lora": model.lora, "experts": experts}
    whole = found.model_copy(update=of_spec)
    values = resolved(whole)
    problems = [
        f"{path} is {_shown(values.get(path, ABSENT))}, and spec.trainer.model.{path} is {_shown(value)}: "
        "remove the field from spec.trainer.model"
        for path, value in _stated(model)
        if not path.startswith("lora.") and not _equal(values.get(path, ABSENT), value)
    ]
    if problems:
        raise InvalidInput(f"spec.trainer.model differs from the model of {where}: there {'; '.join(problems)}.")
    return ModelConfig.model_validate(whole.model_dump(by_alias=True))


def _stated(section: Section, prefix: str = "") -> Iterator[tuple[str, object]]:
    """Yield the path and the value of each field of `section` that does not have its default value."""
    for name, field in type(section).model_fields.items():
        value, path = getattr(section, name), f"{prefix}{field.alias}"
        if isinstance(value, Section):
            yield from _stated(value, f"{path}.")
        elif value != field.default:
            yield path, value


def check_ours(stored: ModelConfig, where: str, model: ModelConfig) -> None:
    """Check that `stored`, the model of a checkpoint of this trainer, has the same arithmetic as `model`.

    Raises:
        InvalidInput: When a field differs. The message names each such field, both values, and the setting to change.
    """
    _refuse(_differences(stored, model, {}), where)


def family_of(model: ModelConfig) -> tuple[str, Family] | None:
    """Return the model_type and the Family of the first family with the arithmetic of this model, or None."""
    for kind, family in FAMILIES.items():
        if not list(_lost(kind, model)):
            return kind, family
    return None


def config_json(model: ModelConfig) -> dict[str, Any]:
    """Return the config.json that describes this model, for the first model family with the same arithmetic.

    Raises:
        InvalidInput: When no family has the same arithmetic.
    """
    found = family_of(model)
    if found is None:
        lost = {kind: list(_lost(kind, model)) for kind in FAMILIES}
        nearest = min(lost, key=lambda kind: len(lost[kind]))
        raise InvalidInput(
            "this model can't be exported, because no supported Hugging Face model computes the same. The "
            f"nearest is {nearest}, which does not support these values of {', '.join(lost[nearest])}."
        )
    return _written(found[0], model)


def described(config: Mapping[str, Any]) -> Described:
    """Return the model that a config.json describes, with all reasons why the bundled decoder can't compute it."""
    kind = config.get("model_type")
    if kind not in FAMILIES:
        fact = f"model_type is {_shown(kind)}" if kind else "model_type is missing"
        return Described("", {}, {}, [f"{fact}, and the bundled decoder supports {', '.join(FAMILIES)}"])
    family = FAMILIES[kind]
    values = _with_defaults(config, family)
    sources = {path: name for name, path in {**COMMON, **family.fields}.items()}
    needed = [name for name in sources.values() if name not in NULLABLE]
    problems = [f"{name} is missing: add the value of the model" for name in needed if values.get(name) is None]
    problems += [
        _not_built(name, values[name], f"only {_shown(only)}")
        for name, only in family.only.items()
        if not _equal(values[name], only)
    ]
    if config.get("quantization_config"):
        only = "only weights that are not quantized: dequantize the weights first"
        problems.append(_not_built("quantization_config", config["quantization_config"], only))
    problems += [
        _not_built(name, config[name], "no dropout")
        for name in ("attention_dropout", "resid_pdrop", "embd_pdrop")
        if config.get(name)
    ]
    problems += contradictions(config, "rope_local_base_freq" in family.fields)
    of_positions = positions(values, rope_of(config))
    of_windows = windows(values, family)
    problems += [*of_positions.problems, *of_windows.problems]
    fields = {path: values.get(name) for path, name in sources.items()}
    fields |= {**of_positions.fields, **of_windows.fields, **family.fixed}
    if family.shared_width is not None:
        shared = _multiple(values[family.shared_width], fields["experts.hiddenDim"])
        fields["experts.shared"], sources["experts.shared"] = shared, family.shared_width
        if shared is None:
            only = f"a multiple of the width of an expert, which is {_shown(fields['experts.hiddenDim'])}"
            problems.append(_not_built(family.shared_width, values[family.shared_width], only))
    more = config.get(family.prediction_layers or "") or 0
    if not isinstance(more, int) or isinstance(more, bool) or not 0 <= more <= MOST_PREDICTION_LAYERS:
        problems.append(_not_built(str(family.prediction_layers), more, f"0 to {MOST_PREDICTION_LAYERS}"))
    return Described(kind, fields, {**sources, **of_positions.sources, **of_windows.sources}, problems, more)


def _multiple(value: object, unit: object) -> int | None:
    """Return the positive whole number n for which n * `unit` equals `value`, or None if there is no such n."""
    if not isinstance(value, int) or not isinstance(unit, int) or value <= 0 or unit <= 0 or value % unit:
        return None
    return value // unit


def _with_defaults(config: Mapping[str, Any], family: Family) -> dict[str, Any]:
    """Return the fields of config.json, with the defaults of transformers for fields that are absent.

    A field can be absent because the file is older than the field. A null value is treated as absent, except in the
    fields NULLABLE, num_key_value_heads and head_dim.
    """
    present = {name: value for name, value in config.items() if value is not None}
    present |= {name: present[other] for other, name in family.other_names.items() if other in present}
    width, heads = present.get("hidden_size"), present.get("num_attention_heads")
    head_dim = width // heads if isinstance(width, int) and isinstance(heads, int) and heads else None
    of_width = {"num_key_value_heads": heads, "head_dim": head_dim}
    nulls: dict[str, object] = {name: None for name in NULLABLE if name in config}
    nulls |= {name: value for name, value in of_width.items() if name in config}
    return {**DEFAULTS, **of_width, **family.defaults, **nulls, **present, **rope_of(config)}


def _written(kind: str, model: ModelConfig) -> dict[str, Any]:
    """Return a config.json of the family `kind` with the values of `model`.

    Values for which the family has no field are left out, so the result may describe a different model (see `_lost`).
    """
    family, values = FAMILIES[kind], resolved(model)
    sources = {**COMMON, **family.fields}
    length: float = model.sequence_length
    if model.rope_scaling is not None and model.rope_scaling.type is RopeScalingType.yarn:
        # Older versions of transformers compute the factor of YaRN from this.
        length = values["ropeScaling.factor"] * values["ropeScaling.originalLength"]
    known = {name: path for name, path in sources.items() if path in values or name in NULLABLE}
    return {
        "architectures": [family.architecture],
        "model_type": kind,
        "attention_dropout": 0.0,
        "max_position_embeddings": round(length),
        "use_cache": True,
        "pad_token_id": None,  # a family's default may be beyond the vocabulary
        **{name: value for name, value in family.only.items() if name not in OF_POSITIONS},
        **({family.prediction_layers: 0} if family.prediction_layers else {}),
        **({family.shared_width: model.shared_width} if family.shared_width else {}),
        **{name: values.get(path) for name, path in known.items()},
        "head_dim": model.resolved_head_dim,
        **positions_json(model),
        **windows_json(model, family),
    }


def _lost(kind: str, model: ModelConfig) -> Iterator[str]:
    """Yield the fields of a model whose values a config.json of the family `kind` can't express."""
    found = described(_written(kind, model))
    if FAMILIES[kind].whole_heads and model.dim % model.heads:
        yield "dim"
    if found.problems:
        yield from found.problems
        return
    try:
        yield from (path for path, _, _ in _different(found.model(), model))
    except ValidationError as error:
        yield from (".".join(map(str, each["loc"])) for each in error.errors())


def _different(stored: ModelConfig, model: ModelConfig) -> Iterator[tuple[str, object, object]]:
    """Yield the fields in which the models' arithmetic differs.

    A field is given as its path, its value in `stored`, and its value in `model`.
    """
    first, second = architecture(stored), architecture(model)
    for path in sorted({*first, *second}):
        value, current = first.get(path, ABSENT), second.get(path, ABSENT)
        same_adapters = path != "lora.alpha" or value is ABSENT or current is ABSENT
        if not _equal(value, current) and not (path in OF_TRAINING and same_adapters):
            yield path, value, current


def _differences(stored: ModelConfig, model: ModelConfig, sources: Mapping[str, str]) -> Sequence[str]:
    """Return part of an error message for each field in which the two models compute differently.

    `sources` maps the path of a field of spec.trainer.model to the name of the field in config.json. A part of the
    message uses the name in config.json if there is one, and the path otherwise.
    """
    clauses = []
    for path, value, current in _different(stored, model):
        is_there = _shown(value)
        what = "remove it" if value is ABSENT else f"set it to {is_there}"
        clauses.append(
            f"{sources.get(path, path)} is {is_there}, and spec.trainer.model.{path} is {_shown(current)}: {what}"
        )
    return clauses


def _refuse(problems: Sequence[str], where: str) -> None:
    if problems:
        raise InvalidInput(
            f"the initial weights belong to another model than spec.trainer.model: in {where} {'; '.join(problems)}."
        )


def _nested(fields: Mapping[str, object]) -> dict[str, Any]:
    nested: dict[str, Any] = {}
    for path, value in fields.items():
        *sections, name = path.split(".")
        target = nested
        for section in sections:
            target = target.setdefault(section, {})
        target[name] = value
    return nested


def _not_built(name: str, value: object, ours: str) -> str:
    return f"{name} is {_shown(value)}, and the bundled decoder supports {ours}"


def _shown(value: object) -> str:
    if value is ABSENT:
        return "absent"
    text = json.dumps(value)
    return text if len(text) < 200 else text[:200] + " ..."


def _equal(first: object, second: object) -> bool:
    if isinstance(first, float | int) and isinstance(second, float | int) and not isinstance(first, bool):
        return math.isclose(first, second, rel_tol=1e-9)
    return first == second
