"""Shards whose elements are tokens with a weight in the loss: 1 if the token is trained, otherwise 0."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from concertina_trainer.data.tokenizer import TYPES


def element(element_bytes: int) -> np.dtype[Any]:
    """Return the numpy dtype of a token with its weight, given the number of bytes of both."""
    return np.dtype([("token", TYPES[element_bytes - 1]), ("weight", "u1")])


def parts(content: bytes | mmap.mmap, element_bytes: int) -> tuple[NDArray[np.unsignedinteger[Any]], NDArray[np.uint8]]:
    """Return the tokens and the weights of a shard, without a copy."""
    elements = np.frombuffer(content, element(element_bytes))
    return elements["token"], elements["weight"]


def joined(tokens: Sequence[int], weights: NDArray[np.bool_], element_bytes: int) -> bytes:
    """Return tokens and their weights in the format of a shard."""
    elements = np.empty(len(tokens), element(element_bytes))
    elements["token"], elements["weight"] = tokens, weights
    return elements.tobytes()
