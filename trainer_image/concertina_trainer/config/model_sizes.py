"""Named sizes of the decoder, with the figures of published models.

The module does not import torch.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any


class ModelSize(enum.StrEnum):
    """Size of the decoder, by its number of parameters."""

    toy = "10M"
    """nanoGPT's character model (config/train_shakespeare_char.py), with the feed-forward network of this decoder."""
    tiny = "135M"
    """HuggingFaceTB/SmolLM-135M."""
    small = "1B"
    """meta-llama/Llama-3.2-1B, without its scaling of rotary positions for sequences longer than 8192 tokens."""
    medium = "3B"
    """meta-llama/Llama-3.2-3B, without its scaling of rotary positions for sequences longer than 8192 tokens."""
    large = "8B"
    """meta-llama/Meta-Llama-3-8B."""
    huge = "70B"
    """meta-llama/Meta-Llama-3-70B."""
    experts = "8x7B"
    """mistralai/Mixtral-8x7B-v0.1."""


OF_DATA = ("vocabSize", "sequenceLength")
"""Fields that a job may set in addition to a named size, because they belong to its data and its batch."""
_LLAMA = {"kvHeads": 8, "vocabSize": 128256, "sequenceLength": 8192, "ropeTheta": 500000.0, "normEpsilon": 1e-5}
SIZES: Mapping[ModelSize, Mapping[str, Any]] = MappingProxyType(
    {
        ModelSize.toy: {
            "layers": 6, "dim": 384, "heads": 6, "kvHeads": 6, "hiddenDim": 1024, "tieEmbeddings": True,
            "vocabSize": 256, "sequenceLength": 256, "ropeTheta": 10000.0, "normEpsilon": 1e-5,
        },
        ModelSize.tiny: {
            "layers": 30, "dim": 576, "heads": 9, "kvHeads": 3, "hiddenDim": 1536, "tieEmbeddings": True,
            "vocabSize": 49152, "sequenceLength": 2048, "ropeTheta": 10000.0, "normEpsilon": 1e-5,
        },
        ModelSize.small: {
            **_LLAMA, "layers": 16, "dim": 2048, "heads": 32, "hiddenDim": 8192, "tieEmbeddings": True,
        },
        ModelSize.medium: {
            **_LLAMA, "layers": 28, "dim": 3072, "heads": 24, "hiddenDim": 8192, "tieEmbeddings": True,
        },
        ModelSize.large: {
            **_LLAMA, "layers": 32, "dim": 4096, "heads": 32, "hiddenDim": 14336, "tieEmbeddings": False,
        },
        ModelSize.huge: {
            **_LLAMA, "layers": 80, "dim": 8192, "heads": 64, "hiddenDim": 28672, "tieEmbeddings": False,
        },
        ModelSize.experts: {
            **_LLAMA, "layers": 32, "dim": 4096, "heads": 32, "hiddenDim": 14336, "tieEmbeddings": False,
            "vocabSize": 32000, "ropeTheta": 1000000.0, "experts": {"count": 8, "activePerToken": 2},
        },
    }
)  # fmt: skip
"""Values of fields of spec.trainer.model, by named size."""
WITH_EXPERTS = tuple(size.value for size, fields in SIZES.items() if "experts" in fields)
EXPERTS = {
    "count": 8, "activePerToken": 2, "shared": 0, "sharedGate": False, "firstDense": 0, "scores": "Softmax",
    "shareScale": 1.0,
}  # fmt: skip
"""Fields of the section `experts` in named sizes with experts.

A job with such a named size may set these fields only to these values. The width of an expert is hiddenDim.
"""


def value_of_size(field: str, size: str) -> str:
    """Return a CEL expression for the value of a field in a named size. `size` is the CEL expression for the name."""
    values = ", ".join(f"'{name}': {json.dumps(fields[field])}" for name, fields in SIZES.items())
    return f"{{{values}}}[{size}]"
