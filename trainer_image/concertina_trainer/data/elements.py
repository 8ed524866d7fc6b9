"""Elements of shards as numpy arrays.

The fields of an element, such as token and time, are adjacent in a shard.
"""

from __future__ import annotations

import json
import mmap
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from concertina_data.data_manifest import TOKEN, Field, short_digest
from concertina_trainer.data.tokenizer import Tokenizer

Fields = dict[str, NDArray[Any]]
"""Values of the fields of some elements, keyed by the name of the field."""


def element(fields: Sequence[Field]) -> np.dtype[Any]:
    """Return the numpy dtype of an element."""
    return np.dtype([(field.name, _stored(field), (field.width,) if field.width else ()) for field in fields])


def _stored(field: Field) -> np.dtype[Any]:
    return np.dtype(field.type).newbyteorder("<")


def parts(content: bytes | mmap.mmap, fields: Sequence[Field]) -> Fields:
    """Return the values of each field of a shard, `[elements]` or `[elements, width]`, without a copy."""
    elements = np.frombuffer(content, element(fields))
    return {field.name: elements[field.name] for field in fields}


def joined(values: Mapping[str, Any], fields: Sequence[Field]) -> bytes:
    """Return elements in the format of a shard. All fields must have the same number of values."""
    elements = np.empty(len(values[fields[0].name]), element(fields))
    for field in fields:
        elements[field.name] = values[field.name]
    return elements.tobytes()


def empty_rows(fields: Sequence[Field], count: int, length: int) -> Fields:
    """Return arrays of zeros, `[count, length]` or `[count, length, width]`, in the types that a model expects.

    Integers become int64, because torch has few operations for other integers.
    """
    types = {field.name: np.int64 if np.dtype(field.type).kind in "iu" else np.dtype(field.type) for field in fields}
    return {
        field.name: np.zeros((count, length, field.width) if field.width else (count, length), types[field.name])
        for field in fields
    }


def as_tokenizer(fields: Sequence[Field], vocab_size: int) -> Tokenizer:
    """Return a Tokenizer for builds whose documents already consist of elements."""
    digest = short_digest(json.dumps([vocab_size, *map(str, fields)]).encode())
    names = ", ".join(f"{field} below {vocab_size}" if field.name == TOKEN else str(field) for field in fields)
    return Tokenizer(names, vocab_size, 0, digest, list)
