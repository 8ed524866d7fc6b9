"""Initial weights: each element depends only on the seed, the weight's name and the element's position.

A rank computes only the elements of its own shards, and training begins with the same bits in every layout. The random
bits come from Philox, which computes its n-th block without the blocks before it (Salmon et al. 2011, Parallel Random
Numbers: As Easy as 1, 2, 3). A normal number is the quantile of a uniform number, so each normal number needs exactly
32 random bits.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from concertina_state.format.read_plan import Box
from concertina_trainer.config.model_config import ModelConfig
from concertina_trainer.format import adapters

RESIDUAL = (
    "attention.output.weight", "feed_forward.down.weight", "feed_forward.experts.down",
    "feed_forward.shared.down.weight",
)  # fmt: skip
"""Weights whose products are added to the residual stream."""
PER_BLOCK = 8
"""Number of normal numbers that one Philox block of 256 bits yields."""
AT_ONCE = 1 << 20
"""Number of elements to compute at once. An element takes 20 bytes of temporary memory."""


def initial_value(name: str, whole: Sequence[int], box: Box, config: ModelConfig, seed: int) -> Tensor:
    """Return the initial values of one box (rectangular part) of the decoder's weight `name`, float32 on CPU.

    `whole` is the shape of the whole weight, and the box is a range of indices in each of its dimensions. Norms begin
    as a multiplication by 1, and biases are 0. Matrices are normal; those that write into the residual stream have a
    smaller standard deviation. The matrix B of an adapter is 0, so the product of the adapter's two matrices is 0.
    """
    if name.endswith(("_bias", ".sinks")):  # the biases of experts are matrices
        return torch.zeros(box.shape, dtype=torch.float32)
    if len(whole) == 1:
        zero = name.endswith(".bias") or config.norm_offset
        return torch.full(box.shape, 0.0 if zero else 1.0, dtype=torch.float32)
    if name.endswith(adapters.B):
        return torch.zeros(box.shape, dtype=torch.float32)
    if name.endswith(adapters.A):
        return normal(name, whole, box, seed, 1 / math.sqrt(3 * whole[-1]))
    return normal(name, whole, box, seed, 0.02 / math.sqrt(2 * config.layers) if name.endswith(RESIDUAL) else 0.02)


def usual(name: str, whole: Sequence[int], box: Box, seed: int) -> Tensor:
    """Return the default initial values for a custom model: biases are 0, other vectors 1, other weights normal."""
    if len(whole) == 1:
        return torch.full(box.shape, 0.0 if name.endswith("bias") else 1.0, dtype=torch.float32)
    return normal(name, whole, box, seed, 0.02)


def normal(name: str, whole: Sequence[int], box: Box, seed: int, deviation: float) -> Tensor:
    """Return one box (rectangular part) of a tensor of normal random numbers with mean 0, float32 on CPU.

    `deviation` is the standard deviation. The numbers depend only on the name, the seed, and their positions in the
    whole tensor of shape `whole`.
    """
    value = torch.empty(box.shape, dtype=torch.float32)
    key = int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:16], "little")
    flat, offset = value.view(-1), 0
    for begin, end in _runs(whole, box):
        for first in range(begin, end, AT_ONCE):
            last = min(end, first + AT_ONCE)
            flat[offset : offset + last - first] = _normal(key, first, last)
            offset += last - first
    return value.mul_(deviation)


def _runs(whole: Sequence[int], box: Box) -> Iterator[tuple[int, int]]:
    """Yield the elements of a part of a tensor as ranges [begin, end) of the tensor's elements in row-major order.

    `whole` is the shape of the tensor, and `box` is the part.
    """
    inner = len(whole)  # the box has all of the dimensions from here on
    while inner and box.shape[inner - 1] == whole[inner - 1]:
        inner -= 1
    cut = max(0, inner - 1)  # the last partial dimension still gives a contiguous range
    strides = [math.prod(whole[axis + 1 :]) for axis in range(len(whole))]
    length = math.prod(box.shape[cut:])
    for index in itertools.product(*(range(o, o + n) for o, n in zip(box.offsets[:cut], box.shape, strict=False))):
        begin = sum(i * stride for i, stride in zip(index, strides, strict=False)) + box.offsets[cut] * strides[cut]
        yield begin, begin + length


def _normal(key: int, begin: int, end: int) -> Tensor:
    """Return the elements [begin, end) of the infinite sequence of standard normal numbers for `key`, float64."""
    first = begin // PER_BLOCK
    blocks = -(-end // PER_BLOCK) - first
    bits = np.random.Philox(key=key, counter=first).random_raw(blocks * PER_BLOCK // 2).astype("<u8", copy=False)
    uniform = torch.from_numpy(bits.view("<u4").astype(np.float64)).add_(0.5).div_(2**32)
    skipped = begin - first * PER_BLOCK
    normal: Tensor = torch.special.ndtri(uniform[skipped : skipped + end - begin])
    return normal
