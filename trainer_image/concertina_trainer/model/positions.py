"""Rotary positions (Su et al. 2021, arXiv 2104.09864), and their scaling for longer sequences.

Scaled frequencies are computed as in Hugging Face transformers, for which the models of `initFrom` were published
(transformers 5, modeling_rope_utils.py). The table of cosines and sines depends only on the length and on `Positions`.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable
from typing import TypeAlias

import torch
from torch import Tensor

from concertina_trainer.config.model_config import ModelConfig
from concertina_trainer.config.positions_config import RopeScalingConfig, RopeScalingType, RotaryPairs
from concertina_trainer.model.attention import Context
from concertina_trainer.model.precision import precise


@dataclasses.dataclass(frozen=True)
class Positions:
    """Parameters of a layer's rotary positions."""

    dim: int
    """Number of elements of each head that are rotated."""
    theta: float
    scaling: RopeScalingConfig | None = None
    pairs: RotaryPairs = RotaryPairs.halves

    @staticmethod
    def of(config: ModelConfig, layer: int) -> Positions:
        window = config.window_of(layer)
        if window is not None and window.rope_theta is not None:
            return Positions(config.rotary_dim, window.rope_theta, None, config.rotary_pairs)
        return Positions(config.rotary_dim, config.rope_theta, config.rope_scaling, config.rotary_pairs)


Table: TypeAlias = tuple[Tensor, Tensor]
"""Cosines and sines of the rotation angles, each float32 `[length, dim / 2]`."""


def tables_of(
    layers: Iterable[Positions], length: int, context: Context | None, device: torch.device
) -> dict[Positions, Table]:
    """Return the rotary tables that some layers need for the tokens of this rank, keyed by the layers' `Positions`.

    `length` is the number of tokens of a whole sequence.
    """
    tables = {positions: rotary_table(length, positions, device) for positions in layers}
    if context is None:
        return tables
    rows = context.queries(length, device)
    return {positions: (cos[rows], sin[rows]) for positions, (cos, sin) in tables.items()}


def rotate(x: Tensor, positions: Positions, table: Table) -> Tensor:
    """Apply rotary positions to queries or keys x `[batch, heads, length, head_dim]`.

    `table` contains the cosines and sines of the tokens' angles. Under context parallelism, x contains only the tokens
    of this rank, `[batch, heads, length / size, head_dim]`.
    """
    cos, sin = table
    turned = precise(x[..., : positions.dim])
    if positions.pairs is RotaryPairs.halves:
        first, second = turned.chunk(2, dim=-1)
    else:
        first, second = turned.unflatten(-1, (-1, 2)).unbind(-1)
    parts = first * cos - second * sin, second * cos + first * sin
    rotated = torch.cat(parts, dim=-1) if positions.pairs is RotaryPairs.halves else torch.stack(parts, -1).flatten(-2)
    if positions.dim == x.size(-1):
        return rotated.type_as(x)  # one pass over all heads less, forward and backward
    return torch.cat([rotated.type_as(x), x[..., positions.dim :]], dim=-1)


@functools.lru_cache(maxsize=8)
def rotary_table(length: int, positions: Positions, device: torch.device) -> Table:
    """Return the cosines and sines of the rotation angles, each float32 `[length, dim / 2]`.

    The tables are not buffers of a module, because `to_empty` would leave buffers uninitialized.
    """
    frequencies, factor = scaled(positions, device)
    angles = torch.outer(torch.arange(length, dtype=torch.float32, device=device), frequencies)
    return angles.cos() * factor, angles.sin() * factor


def scaled(positions: Positions, device: torch.device) -> tuple[Tensor, float]:
    """Return the scaled frequencies, float32 `[dim / 2]`, and the factor for cosines and sines."""
    exponents = torch.arange(0, positions.dim, 2, dtype=torch.float32, device=device) / positions.dim
    frequencies, scaling = positions.theta**-exponents, positions.scaling
    if scaling is None:
        return frequencies, 1.0
    if scaling.type is RopeScalingType.linear:
        return frequencies / scaling.factor, 1.0
    if scaling.type is RopeScalingType.llama3:
        return _llama3(frequencies, scaling), 1.0
    default = 0.1 * math.log(scaling.factor) + 1.0
    return _yarn(frequencies, positions, scaling), scaling.attention_factor or default


def _llama3(frequencies: Tensor, scaling: RopeScalingConfig) -> Tensor:
    """Scale frequencies as Llama 3 does: low frequencies are divided by the factor, high ones stay unchanged.

    Frequencies in between are interpolated. Source: transformers, _compute_llama3_parameters.
    """
    assert scaling.original_length is not None
    low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
    turns = scaling.original_length * frequencies / (2 * math.pi)
    unchanged = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return unchanged * frequencies + (1 - unchanged) * frequencies / scaling.factor


def _yarn(frequencies: Tensor, positions: Positions, scaling: RopeScalingConfig) -> Tensor:
    """Scale frequencies as YaRN does: low frequencies are divided by the factor, high ones stay unchanged.

    Frequencies in between are interpolated. Source: Peng et al. 2023, arXiv 2309.00071, section 3.2.
    """
    assert scaling.original_length is not None

    def index(turns: float) -> float:
        """Return the (fractional) index of the frequency that makes `turns` turns in the original length."""
        length = scaling.original_length or 0
        return positions.dim * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(positions.theta))

    low, high = index(scaling.beta_fast), index(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, positions.dim - 1)
    numbers = torch.arange(len(frequencies), dtype=torch.float32, device=frequencies.device)
    divided = ((numbers - low) / (high - low if high != low else 0.001)).clamp(0.0, 1.0)
    return (1 - divided) * frequencies + divided * frequencies / scaling.factor
