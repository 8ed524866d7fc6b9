"""Changes of spec.trainer since a state was saved, and whether training can resume from the state.

The names and shapes of tensors do not show most of a model's arithmetic, for example the number of attention heads, the
base of the rotary positions, or how experts are scored. They do not show the order of the data either. The
configuration that is saved with the state is therefore compared with the present one (decision "A resumed run keeps its
model and its order of data"). The module does not import torch.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from typing import Any

from concertina_trainer.config.model_config import ModelConfig
from concertina_trainer.config.optimizer_config import OptimizerConfig
from concertina_trainer.config.trainer import TrainerConfig

MAY_CHANGE = ("from", "hf", "experts.balanceLoss", "experts.biasRate")
"""Fields of spec.trainer.model that may change when training resumes: they don't affect the model's arithmetic."""
ABSENT = object()
LONGEST = 200
"""Maximum number of characters of a value in a message."""


@dataclasses.dataclass(frozen=True)
class Change:
    """Change of one field of spec.trainer between a saved state's configuration and the present one."""

    field: str
    """Path of the field below spec.trainer."""
    saved: str
    now: str

    def __str__(self) -> str:
        return f"{self.field} {self.saved} -> {self.now}"


def identity_changes(saved: TrainerConfig, now: TrainerConfig) -> list[Change]:
    """Return the changes of the configuration that prevent training from resuming, sorted by field.

    These are changes of the model's arithmetic, of the order of the data, or of the optimizer's state. The sequence
    length, the seed and the number of groups decide the order of the data: a sample's position counts sequences, and
    the seed shuffles the sequences within groups. The data sets, their mixture and `data.documents` are not compared
    here, because they have a digest of their own.
    """
    return list(_changes(_identity(saved), _identity(now)))


def other_changes(saved: TrainerConfig, now: TrainerConfig) -> list[Change]:
    """Return the changes that do not prevent training from resuming. A resumed run uses the new values."""
    refused = {change.field for change in identity_changes(saved, now)}
    return [change for change in _changes(_settings(saved), _settings(now)) if change.field not in refused]


def architecture(model: ModelConfig) -> dict[str, Any]:
    """Return the fields that determine the model's arithmetic, keyed by path. Absent fields have their defaults."""
    fields = {name: value for name, value in resolved(model).items() if name not in MAY_CHANGE}
    if model.experts is not None:
        fields["experts.biasRate"] = "absent" if model.experts.bias_rate is None else "present"
        if not model.experts.first_dense:
            del fields["hiddenDim"]  # no layer has a feed-forward of that width
    return fields


def _identity(config: TrainerConfig) -> dict[str, Any]:
    fields = {f"model.{name}": value for name, value in architecture(config.model).items()}
    return {**fields, "seed": config.seed, "data.groups": config.data.groups, **_optimizer_state(config.optimizer)}


def _optimizer_state(optimizer: OptimizerConfig) -> dict[str, Any]:
    """Return the fields that determine the number and the meaning of the optimizer's moments, keyed by path.

    The names of moments do not tell optimizers apart: Adam and RAdam have moments of the same names.
    """
    needed = {field for field in optimizer.kind.moments.values() if field is not None}
    values = optimizer.hyperparameters
    return {
        "optimizer.name": optimizer.name.value,
        "optimizer.momentsPrecision": optimizer.moments_precision.value,
        "optimizer.emaDecay": "absent" if optimizer.ema_decay is None else "present",
        **{f"optimizer.{field}": "above 0" if values[field] else "0" for field in needed},
    }


def _settings(config: TrainerConfig) -> dict[str, Any]:
    """Return all fields except `reproduction`, keyed by path. Absent fields of `model` have their defaults."""
    dumped = config.model_dump(mode="json", by_alias=True, exclude_none=True, exclude={"reproduction", "model"})
    model = {f"model.{name}": value for name, value in resolved(config.model).items()}
    return {**dict(_flat(dumped)), **model}


def resolved(model: ModelConfig) -> dict[str, Any]:
    """Return the model's fields, keyed by path, with computed values for defaults that depend on other fields.

    The result is therefore the same for a job that sets a field to its default value and for a job that omits the
    field.
    """
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
