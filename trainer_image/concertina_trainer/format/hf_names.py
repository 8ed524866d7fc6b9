"""Names of the bundled decoder's weights in a family of Hugging Face models.

Exports are written with these names, and `initFrom` reads checkpoints with these names.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence

from concertina_state.format.read_plan import Box
from concertina_trainer.config.model_config import ModelConfig, Projection
from concertina_trainer.format.hf_families import ENDS, EXPERT, NAMES, Family

MODEL = "model."
"""Prefix of the names of weights in this trainer's checkpoints. Moments have other prefixes."""
_LAYER = r"blocks\.(\d+)\.(.+)"
_THEIR_LAYER = r"model\.layers\.(\d{1,9})\.(.+)"


@dataclasses.dataclass(frozen=True)
class OwnName:
    """Name of a weight in this project, without the prefix MODEL."""

    name: str
    expert: int | None = None
    """Number of the expert whose part of the weight the tensor contains, or None for the whole weight."""


@dataclasses.dataclass(frozen=True)
class Place:
    """Position of a file's tensor within a tensor of a module of transformers."""

    name: str
    """Name of the module's tensor."""
    whole: tuple[int, ...] = ()
    """Shape of the module's whole tensor, if the file's tensor is only a part of it."""
    box: Box | None = None
    """Part of the module's tensor that the file's tensor contains, or None for the whole tensor.

    In the file, a part lacks the first dimension.
    """


def theirs(name: str, family: Family) -> str | None:
    """Return the Hugging Face name of a weight (without the prefix MODEL), or None if the family has no such weight.

    The name contains EXPERT if there is a tensor for each expert. Several weights have the same Hugging Face name if
    one tensor contains the rows of all of these weights.
    """
    if (layer := re.fullmatch(_LAYER, name)) is None:
        return ENDS.get(name)
    inner = _names(family).get(layer[2])
    return None if inner is None else f"model.layers.{layer[1]}.{inner}"


def ours(name: str, family: Family) -> Sequence[OwnName]:
    """Return this project's names for a Hugging Face tensor, or an empty list if the decoder has no such weight.

    For a tensor that contains the rows of several weights, the result is the names of these weights in the order of the
    rows.
    """
    if (layer := re.fullmatch(_THEIR_LAYER, name)) is None:
        return [OwnName(own) for own, other in ENDS.items() if other == name]
    if layer[2] in family.fused:
        return [OwnName(f"blocks.{layer[1]}.{own}") for own in family.fused[layer[2]]]
    for own, other in _names(family).items():
        if match := re.fullmatch(re.escape(other).replace(re.escape(EXPERT), r"(\d+)"), layer[2]):
            return [OwnName(f"blocks.{layer[1]}.{own}", int(match[1]) if match.groups() else None)]
    return []


def layer_of(name: str) -> int | None:
    """Return the number of the layer to which a Hugging Face tensor belongs, or None if it belongs to none."""
    layer = re.fullmatch(_THEIR_LAYER, name)
    return None if layer is None else int(layer[1])


def rows(name: str, model: ModelConfig) -> int:
    """Return the number of rows of a weight that shares a Hugging Face tensor with other weights."""
    return model.shape(Projection(name.split(".")[-2].capitalize()))[1]


def rank_in_tensor(name: str, family: Family) -> int:
    """Return the index of a weight among the weights that share its Hugging Face tensor.

    `name` is the name in this trainer's checkpoints. The index is 0 for a weight with a tensor of its own.
    """
    inner = name.removeprefix(MODEL).split(".", 2)[-1]
    return next((parts.index(inner) for parts in family.fused.values() if inner in parts), 0)


def _names(family: Family) -> dict[str, str]:
    fused = {own: other for other, parts in family.fused.items() for own in parts}
    return {**NAMES, **family.names, **fused}
