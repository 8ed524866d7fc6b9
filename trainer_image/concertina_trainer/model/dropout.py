"""Dropout masks that are computed from a hash of each element's position instead of random numbers.

A hash decides whether an element of an adapter's input is dropped. The hash is computed from the run's seed, the
token's sample, the token's position in the sample, the layer, the matrix (and its expert), and the element's column. A
token therefore has the same mask in every parallel layout, in a repeated step, and in a recomputation in the backward
pass (decision "Dropout masks are hashes of positions").

Keys are integers below 2**32 in int64. The key of a part (for example a layer) is derived from the key of the whole
(for example a token).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from concertina_data.order import key_of

_BITS = 32
_LOW = 2**_BITS - 1
_FACTORS = 0x7FEB352D, 0x846CA68B - 2**_BITS
_OF_DROPOUT = 3
"""Number that separates hashes of samples for dropout from other hashes with the run's seed."""


def keys_of_tokens(samples: Sequence[int], seed: int, rows: int, length: int, device: torch.device) -> Tensor:
    """Return the key of each token of a microbatch, int64 `[rows, length]`.

    Args:
        samples: Position in the run's order of each row that is not padding. A sample has a different position in each
            epoch, so its keys also differ between epochs.
        seed: Seed of the run.
        rows: Number of rows, including padding.
        length: Length of whole sequences.
        device: Device of the result. The host does not wait for the device.
    """
    numbers = [key_of(seed, _OF_DROPOUT, sample) for sample in samples] + [0] * (rows - len(samples))
    low, high = (
        torch.stack([torch.full((1,), half, device=device) for half in halves])
        for halves in ([number & _LOW for number in numbers], [number >> _BITS for number in numbers])
    )
    return _mixed(_mixed(torch.arange(length, device=device) ^ low) ^ high)


def derived(keys: Tensor, number: int | Tensor) -> Tensor:
    """Return the keys of one part of each object to which a key in `keys` belongs.

    A part is a layer, a matrix or an expert, and `number` is the part's number.
    """
    return _mixed(keys ^ number)


def keep_mask(keys: Tensor, columns: range, rate: float) -> Tensor:
    """Return whether each element is kept, bool `[*keys.shape, len(columns)]`.

    `columns` are the numbers of the columns in the whole input, and `rate` is the probability with which an element is
    dropped.
    """
    of_columns = _mixed(torch.arange(columns.start, columns.stop, device=keys.device))
    mask: Tensor = _mixed(keys.unsqueeze(-1) ^ of_columns) >= round(rate * 2**_BITS)
    return mask


def _mixed(x: Tensor) -> Tensor:
    """Mix the bits of each integer below 2**32, by the function lowbias32 of Wellons (hash-prospector, 2018).

    The factors are below 2**31 in magnitude, so no product overflows int64, and the result is the same on every device.
    """
    x = x ^ (x >> 16)
    x = x.mul_(_FACTORS[0]).bitwise_and_(_LOW)
    x = x.bitwise_xor_(x >> 15)
    x = x.mul_(_FACTORS[1]).bitwise_and_(_LOW)
    return x.bitwise_xor_(x >> 16)
