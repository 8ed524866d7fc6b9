"""Documents that consist of numbers instead of text: token ids, vectors, weights and times, each from a column."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from concertina_data.data_manifest import TOKEN, Field
from concertina_state.errors import InvalidInput
from concertina_trainer.data.build.file_names import TEXT
from concertina_trainer.data.build.recipe import TypedRecipe
from concertina_trainer.data.build.records import Record, kind
from concertina_trainer.data.build.sources import Piece, read_records
from concertina_trainer.data.elements import joined


def read_elements(piece: Piece, recipe: TypedRecipe) -> Iterator[bytes]:
    """Yield the elements of each record of a piece, in the format of a shard. Records without elements are left out.

    Raises:
        InvalidInput: When a record can't be used. The message names the record's file and number.
    """
    if piece.source.format == TEXT:
        raise InvalidInput(f"{piece.source.location} is a text without columns: choose other files with --pattern.")
    for record in read_records(piece, recipe.columns):
        if content := elements_of(record, recipe):
            yield content


def elements_of(record: Record, recipe: TypedRecipe) -> bytes:
    """Return the elements of a record, in the format of a shard.

    Raises:
        InvalidInput: When a value does not fit its field, or the fields have different numbers of values.
    """
    values = {
        field.name: _values(record, column, field, recipe.vocab_size)
        for field, column in zip(recipe.fields, recipe.columns, strict=True)
    }
    lengths = {len(array) for array in values.values()}
    if len(lengths) > 1:
        counts = ", ".join(f"{len(values[f.name])} of {c}" for f, c in zip(recipe.fields, recipe.columns, strict=True))
        raise InvalidInput(f"{record.locate()} has {counts}: each element needs one value of every field.")
    return joined(values, recipe.fields)


def _values(record: Record, column: str, field: Field, vocab_size: int) -> NDArray[Any]:
    """Return the values of a field, `[elements]` or `[elements, width]`, in the field's type.

    A flat list of numbers is divided into vectors, because TFRecord supports only flat lists.

    Raises:
        InvalidInput: When the values don't fit the field.
    """
    found = record.value(column)

    def problem(what: str) -> InvalidInput:
        return InvalidInput(f"{record.locate()}: its {column} {what}, but {field} is needed.")

    if isinstance(found, list | np.ndarray):
        try:
            array = np.asarray(found)
        except ValueError as error:
            raise problem("has rows of different lengths") from error
    else:
        raise problem(f"is a {kind(found)}")
    if not len(array):
        array = np.empty((0, field.width) if field.width else 0, field.type)
    if array.dtype.kind not in "iuf":
        raise problem(f"is a list of {array.dtype}")
    if field.width and array.ndim == 1 and array.size % field.width == 0:
        array = array.reshape(-1, field.width)
    if array.ndim != 1 + bool(field.width) or (field.width and array.shape[1] != field.width):
        raise problem(f"has the shape {list(array.shape)}")
    return _converted(array, field, vocab_size, problem)


def _converted(array: NDArray[Any], field: Field, vocab_size: int, problem: Any) -> NDArray[Any]:
    """Return the values in the field's type. Floats are rounded; whole numbers never change.

    Raises:
        InvalidInput: When a value is not finite, too large, or no whole number.
    """
    kind = np.dtype(field.type)
    if kind.kind == "f":
        with np.errstate(over="ignore"):
            converted = array.astype(kind)
        if not np.isfinite(converted).all():
            raise problem("has numbers that are not finite, or too large")
        if array.dtype.kind != "f" and array.size:
            largest = max(abs(int(array.min())), abs(int(array.max())))
            # numpy converts integers to float64 before it compares them with floats, which rounds large ones
            exact = array.astype(object) if largest > 2**53 else array
            if (converted.astype(np.float64) != exact).any():
                raise problem("has whole numbers that the type would round")
        return converted
    if array.dtype.kind == "f":
        raise problem(f"is a list of {array.dtype}")
    least, most = np.iinfo(kind).min, np.iinfo(kind).max
    most = vocab_size - 1 if field.name == TOKEN else most
    if array.size and not least <= int(array.min()) <= int(array.max()) <= most:
        raise problem(f"has numbers from {array.min()} to {array.max()}, and they must be from {least} to {most}")
    return array.astype(kind)
