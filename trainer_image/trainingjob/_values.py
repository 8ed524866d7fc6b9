"""Encoding of a state's small values as text: numbers, strings, lists, dicts and small arrays.

The text is JSON, so that reading a checkpoint does not run code, as unpickling would.
"""

from __future__ import annotations

import base64
import ctypes
import json
from collections import Counter
from typing import Any, Callable, Dict

from concertina_state.errors import InvalidInput

MOST_BYTES = 64 << 20
"""Maximum size of the values of one rank, in bytes."""

_PLAIN = {type(None), bool, int, float, str}


class Unsaveable(InvalidInput, ValueError):
    """Error that a value has a type that can't be saved, or that the values of a rank are too large."""


def encode(value: Any, name: str) -> bytes:
    """Return a value as text.

    Args:
        value: The value. It may hold dicts, lists, tuples, sets, tensors and numpy arrays.
        name: Name of the value in an error message.

    Raises:
        Unsaveable: The value can't be saved.
    """
    text = json.dumps(_plain(value, name), separators=(",", ":")).encode()
    if len(text) > MOST_BYTES:
        raise Unsaveable(f"the values of {name} have {len(text)} bytes, more than the limit of {MOST_BYTES}")
    return text


def decode(text: bytes) -> Any:
    """Return the value that `encode` has converted to text."""
    return _restored(json.loads(text))


def _plain(value: Any, path: str) -> Any:
    """Return a value in a form that JSON supports.

    A value of a type that JSON does not support becomes a dict with one key, which begins with `$`.
    """
    if type(value) in _PLAIN:
        return value
    if isinstance(value, dict):
        counts = isinstance(value, Counter)  # schedulers count by them
        if not counts and all(type(key) is str and not key.startswith("$") for key in value):
            return {key: _plain(inner, f"{path}.{key}") for key, inner in value.items()}
        items = [[_plain(key, path), _plain(inner, f"{path}[{key!r}]")] for key, inner in value.items()]
        return {"$counter" if counts else "$items": items}
    if isinstance(value, (list, tuple)):
        all_plain = set(map(type, value)) <= _PLAIN  # such as the 600 integers of random numbers, at each commit
        elements = list(value) if all_plain else [_plain(inner, f"{path}[{i}]") for i, inner in enumerate(value)]
        return elements if isinstance(value, list) else {"$tuple": elements}
    if isinstance(value, (set, frozenset)):
        kind = "$set" if isinstance(value, set) else "$frozenset"
        return {kind: [_plain(inner, path) for inner in sorted(value, key=repr)]}
    if isinstance(value, (bytes, bytearray)):
        return {"$bytes": _base64(bytes(value))}
    return _array(value, path)


def _array(value: Any, path: str) -> Any:
    """Return a small array or a dtype in a form that JSON supports.

    Raises:
        Unsaveable: The value is neither an array nor a dtype.
    """
    package = type(value).__module__.partition(".")[0]
    if package == "torch" and hasattr(value, "untyped_storage"):
        flat = value.detach().cpu().contiguous()
        data = ctypes.string_at(flat.data_ptr(), flat.numel() * flat.element_size()) if flat.numel() else b""
        return {"$torch": [str(flat.dtype), list(flat.shape), _base64(data)]}
    if package == "numpy" and hasattr(value, "tobytes") and value.dtype.kind in "biufc":
        return {"$numpy": [value.dtype.str, list(value.shape), _base64(value.tobytes())]}
    if package == "torch" and type(value).__name__ == "dtype":  # part of the context of torchao's tensors
        return {"$dtype": str(value)}
    raise Unsaveable(
        f"{path} is a {type(value).__module__}.{type(value).__qualname__}, which can't be saved: a "
        "state_dict may contain numbers, strings, bytes, lists, tuples, dicts, tensors and numpy arrays"
    )


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _dtype(name: str) -> Any:
    import torch

    return getattr(torch, name.partition(".")[2])


def _torch(fields: Any) -> Any:
    import torch

    dtype, shape, data = fields
    raw = bytearray(base64.b64decode(data))
    kind = _dtype(dtype)
    if not raw:
        return torch.empty(shape, dtype=kind)
    return torch.frombuffer(raw, dtype=kind).reshape(shape).clone()


def _numpy(fields: Any) -> Any:
    try:
        import numpy
    except ImportError:  # an image without numpy has no use for the array
        return None
    dtype, shape, data = fields
    array = numpy.frombuffer(base64.b64decode(data), dtype=dtype).reshape(shape).copy()
    return array if shape else array[()]


_READERS: Dict[str, Callable[[Any], Any]] = {
    "$items": lambda items: {_restored(key): _restored(value) for key, value in items},
    "$counter": lambda items: Counter({_restored(key): _restored(value) for key, value in items}),
    "$tuple": lambda items: tuple(_restored(value) for value in items),
    "$set": lambda items: {_restored(value) for value in items},
    "$frozenset": lambda items: frozenset(_restored(value) for value in items),
    "$bytes": base64.b64decode,
    "$dtype": _dtype,
    "$torch": _torch,
    "$numpy": _numpy,
}


def _restored(value: Any) -> Any:
    """Return the original value for a value in JSON form. This is the inverse of `_plain`."""
    if isinstance(value, list):
        return [_restored(inner) for inner in value]
    if isinstance(value, dict):
        for kind, read in _READERS.items():
            if kind in value:
                return read(value[kind])
        return {key: _restored(inner) for key, inner in value.items()}
    return value
