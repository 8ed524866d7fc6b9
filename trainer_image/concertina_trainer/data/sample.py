"""Sample of the training data, as the function named by `trainer.data.transform` receives and returns it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclasses.dataclass
class Sample:
    """One sequence of the training data.

    A sequence has one element more than `trainer.model.sequenceLength`. If its documents are shorter, the sequence ends
    with zeros.
    """

    tokens: NDArray[np.int64]
    """Token ids `[length + 1]`, or zeros if the data have no token ids."""
    fields: dict[str, NDArray[Any]]
    """Values of other fields, `[length + 1]` or `[length + 1, width]`, keyed by the field's name."""
    position: int
    """Position of the sample in the order of the data."""


Transform = Callable[[Sample, np.random.Generator | None], Sample]
"""Function that `trainer.data.transform` names.

The function receives a sample, and a generator of random numbers that depends only on the run's seed and the sample's
position. In an evaluation, the function receives None instead of the generator. It returns a sample whose arrays have
the same shapes, and may have different values.
"""


class Refused(Exception):
    """Error that a transform failed, or that its result is not a sample of the same shape."""


def transformed(transform: Transform, sample: Sample, seed: int | None, vocab_size: int) -> Sample:
    """Return the result of the transform for a sample. `seed` is None in an evaluation.

    Raises:
        Refused: When the transform fails, or its result can't be used.
    """
    shapes = {name: (array.shape, array.dtype) for name, array in _arrays(sample).items()}
    random = None if seed is None else np.random.Generator(np.random.Philox(key=[seed, sample.position]))
    try:
        result = transform(sample, random)
    except Exception as error:
        raise Refused(f"it raised {type(error).__name__}: {str(error)[:300]}") from error
    if not isinstance(result, Sample):
        raise Refused(f"it returned a {type(result).__name__}, and it must return the Sample")
    if not isinstance(result.fields, dict):
        raise Refused(f"it returned a Sample whose fields are a {type(result.fields).__name__}, and not a dict")
    arrays = _arrays(result)
    if arrays.keys() != shapes.keys():
        raise Refused(f"it returned the fields {', '.join(arrays)}, and they must be {', '.join(shapes)}")
    for name, (shape, dtype) in shapes.items():
        array = arrays[name]
        if (
            not isinstance(array, np.ndarray)
            or array.shape != shape
            or not np.can_cast(array.dtype, dtype, "same_kind")
            or (array.dtype == np.uint64 and dtype.kind == "i")
        ):
            is_array = isinstance(array, np.ndarray)
            found = f"{array.dtype} {list(array.shape)}" if is_array else type(array).__name__
            raise Refused(f"it returned {name} as {found}, and it must be {dtype} {list(shape)}")
        arrays[name] = array.astype(dtype, copy=False)
        if dtype.kind == "f" and not np.isfinite(arrays[name]).all():
            raise Refused(f"it returned values of {name} that are not finite")
    tokens = arrays.pop("tokens")
    if vocab_size and not 0 <= int(tokens.min()) <= int(tokens.max()) < vocab_size:
        raise Refused(
            f"it returned tokens from {tokens.min()} to {tokens.max()}, and they must be from 0 to {vocab_size - 1}"
        )
    return Sample(tokens, {name.removeprefix("fields."): array for name, array in arrays.items()}, sample.position)


def _arrays(sample: Sample) -> dict[str, Any]:
    return {"tokens": sample.tokens, **{f"fields.{name}": array for name, array in sample.fields.items()}}
