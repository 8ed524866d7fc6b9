"""Changes of spec.trainer since a state was saved, and whether training can resume from the state. No torch.

Names and shapes of tensors do not determine most of a model's arithmetic: how many heads share a row of weights, the
base of the rotary positions, how experts are scored. They say nothing about the order of the data either. So both are
compared by the configuration that the state carries (decision "A resumed run keeps its model and its order of data").
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from typing import Any

from concertina_trainer.config.model_config import ModelConfig
from concertina_trainer.config.trainer import TrainerConfig

MAY_CHANGE = ("from", "experts.balanceLoss", "experts.biasRate")
"""Fields of the model that affect where it is described or how it is trained, but not what it computes."""
ABSENT = object()
LONGEST = 200
"""Maximum characters of a value in a sentence."""


@dataclasses.dataclass(frozen=True)
class Change:
    """Change of one field."""

    field: str
    """Path below spec.trainer."""
    saved: str
    now: str

    def __str__(self) -> str:
        return f"{self.field} {self.saved} -> {self.now}"


def identity_changes(saved: TrainerConfig, now: TrainerConfig) -> list[Change]:
    """Return the changes with which training cannot resume: of the model's arithmetic, and of the order of the data.

    A sample's position counts sequences, and the seed shuffles them, so both belong to the order of the data. Data
    sets, their mixture and `data.documents` have a digest of their own.
    """
    return list(_changes(_identity(saved), _identity(now)))


def other_changes(saved: TrainerConfig, now: TrainerConfig) -> list[Change]:
    """Return all other changes. Training resumes with the new values."""
    refused = {change.field for change in identity_changes(saved, now)}
    return [change for change in _changes(_settings(saved), _settings(now)) if change.field not in refused]


def architecture(model: ModelConfig) -> dict[str, Any]:
    """Return the fields that determine what the model computes, by path, with the values that absent ones mean."""
    fields = {name: value for name, value in resolved(model).items() if name not in MAY_CHANGE}
    if model.experts is not None:
        fields["experts.biasRate"] = "absent" if model.experts.bias_rate is None else "present"
        if not model.experts.first_dense:
            del fields["hiddenDim"]  # no layer has a feed-forward of that width
    return fields


def _identity(config: TrainerConfig) -> dict[str, Any]:
    fields = {f"model.{name}": value for name, value in architecture(config.model).items()}
    return {**fields, "seed": config.seed}


def _settings(config: TrainerConfig) -> dict[str, Any]:
    """Return all fields except `reproduction`, with the resolved defaults of the fields of `model`."""
    dumped = config.model_dump(mode="json", by_alias=True, exclude_none=True, exclude={"reproduction", "model"})
    model = {f"model.{name}": value for name, value in resolved(config.model).items()}
    return {**dict(_flat(dumped)), **model}


def resolved(model: ModelConfig) -> dict[str, Any]:
    """Return the fields by path, with defaults that depend on other fields: stating such a default is no change."""
    dumped = model.model_dump(mode="json", by_alias=True, exclude_none=True, exclude={"options", "size"})
    dumped |= {"kvHeads": model.resolved_kv_heads, "hiddenDim": model.resolved_hidden_dim}
    if model.resolved_head_dim == model.dim / model.heads:
        dumped.pop("headDim", None)
    if model.options:
        dumped["options"] = model.options
    if model.experts is not None:
        dumped["experts"] |= {"hiddenDim": model.expert_dim}
    if model.lora is not None:
        dumped["lora"] |= {"targets": sorted(set(model.lora.targets))}
    return dict(_flat(dumped))


def _flat(fields: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in fields.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _changes(saved: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[Change]:
    for field in sorted({*saved, *now}):
        before, after = saved.get(field, ABSENT), now.get(field, ABSENT)
        if before != after:
            yield Change(field, _shown(before), _shown(after))


def _shown(value: object) -> str:
    if value is ABSENT:
        return "absent"
    text = json.dumps(value)
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}..."
