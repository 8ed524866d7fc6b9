"""Rows of tokens in memory: a tensor where torch is installed, and otherwise a memoryview.

The standard library alone takes about 30 times as long for a row as torch, which is still little beside a step.
"""

from __future__ import annotations

import importlib.util
from array import array
from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    from concertina_data.files import Content

FORMATS: dict[int, Literal["B", "H", "I"]] = {1: "B", 2: "H", 4: "I"}
"""Format of a token in a memoryview, by its bytes."""
TORCH_TYPES = {1: "uint8", 2: "uint16", 4: "uint32"}


class Rows(Protocol):
    """Rows of int64 that are filled piece by piece. `result` has the shape `[count, width]`."""

    result: Any

    def __init__(self, count: int, width: int) -> None: ...

    @staticmethod
    def tokens(content: Content, token_bytes: int) -> Any:
        """Return the tokens of a file, which share its memory."""
        ...

    def put(self, row: int, offset: int, tokens: Any) -> None:
        """Copy tokens into a row."""
        ...


class PlainRows:
    """Rows in a memoryview, which `numpy.asarray` takes without a copy."""

    def __init__(self, count: int, width: int) -> None:
        """Reserve the memory."""
        memory = memoryview(array("q", bytes(8 * count * width))).cast("B")
        self._width, self._flat = width, memory.cast("q")
        self.result: Any = memory.cast("q", (count, width)) if count else self._flat

    @staticmethod
    def tokens(content: Content, token_bytes: int) -> Any:
        """Return the tokens of a file, which share its memory."""
        return memoryview(content).cast("B").cast(FORMATS[token_bytes])

    def put(self, row: int, offset: int, tokens: Any) -> None:
        """Copy tokens into a row."""
        begin = row * self._width + offset
        self._flat[begin : begin + len(tokens)] = array("q", tokens)


class TorchRows:
    """Rows in a tensor on the CPU."""

    def __init__(self, count: int, width: int) -> None:
        """Reserve the memory."""
        import torch

        self.result: Any = torch.empty(count, width, dtype=torch.int64)

    @staticmethod
    def tokens(content: Content, token_bytes: int) -> Any:
        """Return the tokens of a file, which share its memory."""
        import torch

        # A file that is not in the cache folder is of type bytes, about which torch warns because it is read-only.
        writable = bytearray(content) if isinstance(content, bytes) else content
        return torch.frombuffer(writable, dtype=getattr(torch, TORCH_TYPES[token_bytes]))

    def put(self, row: int, offset: int, tokens: Any) -> None:
        """Copy tokens into a row."""
        self.result[row, offset : offset + len(tokens)] = tokens


def installed() -> type[Rows]:
    """Return the kind of rows that this Python can make."""
    return TorchRows if importlib.util.find_spec("torch") else PlainRows
