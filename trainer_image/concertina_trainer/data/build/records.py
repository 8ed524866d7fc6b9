"""Records of source files. Each record becomes one document.

A record maps names, such as the columns of a table, to values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from concertina_state.errors import InvalidInput
from concertina_trainer.data.build.content import why_not_text

MOST_BYTES = 2**30
"""Maximum size in bytes of a record or of a value in it, for formats that give the size before the content."""


@dataclass(frozen=True)
class UnreadArray:
    """Placeholder for an array of a file that no column needs, so that it was not read."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]


@dataclass(frozen=True)
class Record:
    """One document of a source file, before it is tokenized."""

    values: Mapping[str, object]
    """Value of each column, feature or member, keyed by name.

    A value is text, bytes, or an array or list of numbers.
    """
    locate: Callable[[], str]
    """Function that returns the record's file and number, for error messages."""

    def value(self, column: str) -> object:
        """Return the value of a column.

        Raises:
            InvalidInput: When the record has no such column.
        """
        if column not in self.values:
            names = ", ".join(map(_described, [*self.values.items()][:20]))[:300] or "nothing"
            raise InvalidInput(f"{self.locate()} has no {column}, but {names}: {_advice(self.values)}.")
        return self.values[column]

    def text(self, column: str) -> bytes:
        """Return the text of a column in UTF-8. A null is an empty text.

        Raises:
            InvalidInput: When the record has no such column, or the column is not text.
        """
        value = self.value(column)
        if isinstance(value, bytes):
            if reason := why_not_text(value, complete=True):
                raise InvalidInput(f"{self.locate()}: its {column} {reason}")
            return value
        if not isinstance(value, str | None):
            raise InvalidInput(
                f"{self.locate()}: its {column} is a {kind(value)}, not text: name another column with --column."
            )
        return (value or "").encode(errors="replace")


def _described(item: tuple[str, object]) -> str:
    name, value = item
    return f"{name} ({value.dtype} {list(value.shape)})" if isinstance(value, np.ndarray | UnreadArray) else name


def _advice(values: Mapping[str, object]) -> str:
    if any(isinstance(value, np.ndarray | UnreadArray) for value in values.values()):
        return "name arrays with --field, such as features=float16x20, and an array of token ids with --tokens"
    return "name the column with --column"


def kind(value: object) -> str:
    """Return the name of a value's type in JSON. An array of numbers is a list."""
    names = {dict: "object", str: "string", bool: "boolean", int: "number", float: "number", type(None): "null"}
    return names.get(type(value), "list")
