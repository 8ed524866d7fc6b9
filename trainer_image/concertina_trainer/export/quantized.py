"""Values of quantized frozen weights, computed by numpy. They equal the values that the trainer computes by torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from concertina_trainer.config.model_config import BLOCK, NORMAL_FLOAT, FrozenDtype

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


def as_quantized(weight: NDArray[np.float32], dtype: FrozenDtype) -> NDArray[np.float32]:
    """Return the values `[rows, columns]` that a matrix of bfloat16 values has after quantization to `dtype`.

    `concertina_trainer.model.quantized` describes the codes.
    """
    import numpy as np

    one = np.float32(1)
    blocks = weight.reshape(len(weight), -1, BLOCK)
    scales = np.abs(blocks).max(2, keepdims=True)
    shares = blocks / np.where(scales == 0, one, scales)
    if dtype is FrozenDtype.int8:  # integers have no -0.0
        values: NDArray[np.float32] = (np.rint(shares * np.float32(127)) + np.float32(0)) * scales * np.float32(1 / 127)
    else:
        codes = np.array(NORMAL_FLOAT, np.float32)
        nearest = np.searchsorted((codes[1:] + codes[:-1]) / np.float32(2), shares).clip(max=len(codes) - 1)
        values = codes[nearest] * scales
    return values.reshape(weight.shape)
