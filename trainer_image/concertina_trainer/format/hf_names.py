"""Names of the bundled decoder's weights in a family of Hugging Face models.

Export writes these names, and initFrom reads them.
"""

from __future__ import annotations

import dataclasses
import re

from concertina_trainer.format.hf_families import ENDS, EXPERT, NAMES, Family

MODEL = "model."
"""Prefix of the names of weights in a checkpoint. Moments have other prefixes."""
_LAYER = r"blocks\.(\d+)\.(.+)"
_THEIR_LAYER = r"model\.layers\.(\d+)\.(.+)"


@dataclasses.dataclass(frozen=True)
class OwnName:
    """Name of a weight in this project (without MODEL)."""

    name: str
    expert: int | None = None
    """Number of the expert whose part of the weight it is, or None for the whole weight."""


def theirs(name: str, family: Family) -> str | None:
    """Return the Hugging Face name of a weight (without MODEL), with EXPERT if there is a tensor for each expert.

    None if the family has no such weight.
    """
    if (layer := re.fullmatch(_LAYER, name)) is None:
        return ENDS.get(name)
    inner = _names(family).get(layer[2])
    return None if inner is None else f"model.layers.{layer[1]}.{inner}"


def ours(name: str, family: Family) -> OwnName | None:
    """Return this project's name of a Hugging Face weight, or None if there is none."""
    if (layer := re.fullmatch(_THEIR_LAYER, name)) is None:
        return next((OwnName(own) for own, other in ENDS.items() if other == name), None)
    for own, other in _names(family).items():
        if match := re.fullmatch(re.escape(other).replace(re.escape(EXPERT), r"(\d+)"), layer[2]):
            return OwnName(f"blocks.{layer[1]}.{own}", int(match[1]) if match.groups() else None)
    return None


def _names(family: Family) -> dict[str, str]:
    return {**NAMES, **family.names}
