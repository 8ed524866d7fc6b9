"""Rows of tokens in memory: a tensor if torch is installed, otherwise a memoryview.

numpy fills a row fastest. torch takes about 5 times as long, and plain Python takes over 100 times as long. Even this
time is short compared with a training step.
"""

from __future__ import annotations

import functools
import importlib.util
from array import array
from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    from concertina_data.files import Content

FORMATS: dict[int, Literal["B", "H", "I"]] = {1: "B", 2: "H", 4: "I"}
"""Format code of a token in a memoryview, keyed by the number of bytes per token."""
TORCH_TYPES = {1: "uint8", 2: "uint16", 4: "uint32"}


class Rows(Protocol):
    """Buffer for rows of int64 tokens that are copied in pieces.

    The attribute `result` has the shape `[count, width]`.
    """

    result: Any

    def __init__(self, count: int, width: int) -> None: ...

    @staticmethod
    def tokens(content: Content, token_bytes: int) -> Any:
        """Return the tokens of a file as an array that shares the file's memory."""
        ...

    def put(self, row: int, offset: int, tokens: Any) -> None:
        """Copy `tokens` into row `row`, from index `offset` on."""
        ...


class PlainRows:
    """Rows in a memoryview. `numpy.asarray` converts the result without copying it."""

    def __init__(self, count: int, width: int) -> None:
        """Allocate memory for `count` rows of `width` tokens."""
        memory = memoryview(array("q", bytes(8 * count * width))).cast("B")
        self._width, self._flat = width, memory.cast("q")
        self.result: Any = memory.cast("q", (count, width)) if count else self._flat

    @staticmethod
    def tokens(content: Content, token_bytes: int) -> Any:
        """Return the tokens of a file as an array that shares the file's memory."""
        return memoryview(content).cast("B").cast(FORMATS[token_bytes])

    def put(self, row: int, offset: int, tokens: Any) -> None:
        """Copy `tokens` into row `row`, from index `offset` on."""
        begin = row * self._width + offset
        self._flat[begin : begin + len(tokens)] = array("q", tokens)


class TorchRows:
    """Rows in a tensor on the CPU."""

    def __init__(self, count: int, width: int) -> None:
        """Allocate memory for `count` rows of `width` tokens."""
        import torch

        self.result: Any = torch.empty(count, width, dtype=torch.int64)

    @staticmethod
    def tokens(content: Content, token_bytes: int) -> Any:
        """Return the tokens of a file as an array that shares the file's memory."""
        import torch

        # A file that is not in the cache folder is of type bytes. torch warns about bytes because they are read-only.
        writable = bytearray(content) if isinstance(content, bytes) else content
        return torch.frombuffer(writable, dtype=getattr(torch, TORCH_TYPES[token_bytes]))

    def put(self, row: int, offset: int, tokens: Any) -> None:
        """Copy `tokens` into row `row`, from index `offset` on."""
        self.result[row, offset : offset + len(tokens)] = tokens


class NumpyRows:
    """Rows that numpy fills. They are a tensor on the CPU if torch is installed, otherwise a memoryview."""

    def __init__(self, count: int, width: int) -> None:
        """Allocate memory for `count` rows of `width` tokens."""
        import numpy as np

        self._rows = np.empty((count, width), dtype=np.int64)
        self.result: Any = _tensor(self._rows) if _has("torch") else self._rows.data

    @staticmethod
    def tokens(content: Content, token_bytes: int) -> Any:
        """Return the tokens of a file as an array that shares the file's memory."""
        import numpy as np

        return np.frombuffer(content, dtype=f"<u{token_bytes}")

    def put(self, row: int, offset: int, tokens: Any) -> None:
        """Copy `tokens` into row `row`, from index `offset` on."""
        self._rows[row, offset : offset + len(tokens)] = tokens


def installed() -> type[Rows]:
    """Return the fastest class of rows for the installed packages."""
    if _has("numpy") and (not _has("torch") or _torch_takes_arrays()):
        return NumpyRows
    return TorchRows if _has("torch") else PlainRows


@functools.cache
def _has(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def _torch_takes_arrays() -> bool:
    """Return whether torch can use the memory of an array. It can't if it was built for another version of numpy."""
    import numpy as np

    try:
        _tensor(np.empty(0, dtype=np.int64))
    except RuntimeError:
        return False
    return True


def _tensor(array: Any) -> Any:
    """Return a tensor that shares the memory of an array."""
    import torch

    return torch.from_numpy(array)
