"""What a state holds beside large tensors, as text: numbers, strings, lists, dicts and small arrays. It is JSON, so
that reading a checkpoint runs nobody's code, as unpickling would."""

from __future__ import annotations

import base64
import ctypes
import json
from collections import Counter
from typing import Any, Callable, Dict

from concertina_state.errors import BadInput

MOST_BYTES = 64 << 20
"""Of one rank's values."""


_PLAIN = {type(None), bool, int, float, str}


class Unsaveable(BadInput, ValueError):
    """A sentence."""


def encode(value: Any, name: str) -> bytes:
    """Raises Unsaveable. `name`: of what is encoded, for that."""
    text = json.dumps(_plain(value, name), separators=(",", ":")).encode()
    if len(text) > MOST_BYTES:
        raise Unsaveable(f"the values of {name} take {len(text)} bytes, over the limit of {MOST_BYTES}")
    return text


def decode(text: bytes) -> Any:
    return _back(json.loads(text))


def _plain(value: Any, path: str) -> Any:
    if type(value) in _PLAIN:
        return value
    if isinstance(value, dict):
        counts = isinstance(value, Counter)  # schedulers count by them
        if not counts and all(type(key) is str and not key.startswith("$") for key in value):
            return {key: _plain(each, f"{path}.{key}") for key, each in value.items()}
        items = [[_plain(key, path), _plain(each, f"{path}[{key!r}]")] for key, each in value.items()]
        return {"$counter" if counts else "$items": items}
    if isinstance(value, (list, tuple)):
        as_they_are = set(map(type, value)) <= _PLAIN  # so are random numbers' states, of 600 integers, at each commit
        found = list(value) if as_they_are else [_plain(each, f"{path}[{i}]") for i, each in enumerate(value)]
        return found if isinstance(value, list) else {"$tuple": found}
    if isinstance(value, (set, frozenset)):
        kind = "$set" if isinstance(value, set) else "$frozenset"
        return {kind: [_plain(each, path) for each in sorted(value, key=repr)]}
    if isinstance(value, (bytes, bytearray)):
        return {"$bytes": _base64(bytes(value))}
    return _array(value, path)


def _array(value: Any, path: str) -> Any:
    package = type(value).__module__.partition(".")[0]
    if package == "torch" and hasattr(value, "untyped_storage"):
        flat = value.detach().cpu().contiguous()
        data = ctypes.string_at(flat.data_ptr(), flat.numel() * flat.element_size()) if flat.numel() else b""
        return {"$torch": [str(flat.dtype), list(flat.shape), _base64(data)]}
    if package == "numpy" and hasattr(value, "tobytes") and value.dtype.kind in "biufc":
        return {"$numpy": [value.dtype.str, list(value.shape), _base64(value.tobytes())]}
    if package == "torch" and type(value).__name__ == "dtype":  # in what torchao's tensors are made again from
        return {"$dtype": str(value)}
    raise Unsaveable(
        f"{path} is a {type(value).__module__}.{type(value).__qualname__}, which can't be saved: a state_dict may hold "
        "numbers, strings, bytes, lists, tuples, dicts, tensors and numpy arrays"
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
    except ImportError:  # an image without it has no use for it
        return None
    dtype, shape, data = fields
    found = numpy.frombuffer(base64.b64decode(data), dtype=dtype).reshape(shape).copy()
    return found if shape else found[()]


READERS: Dict[str, Callable[[Any], Any]] = {
    "$items": lambda items: {_back(key): _back(each) for key, each in items},
    "$counter": lambda items: Counter({_back(key): _back(each) for key, each in items}),
    "$tuple": lambda items: tuple(_back(each) for each in items),
    "$set": lambda items: {_back(each) for each in items},
    "$frozenset": lambda items: frozenset(_back(each) for each in items),
    "$bytes": base64.b64decode,
    "$dtype": _dtype,
    "$torch": _torch,
    "$numpy": _numpy,
}


def _back(value: Any) -> Any:
    if isinstance(value, list):
        return [_back(each) for each in value]
    if isinstance(value, dict):
        for kind, read in READERS.items():
            if kind in value:
                return read(value[kind])
        return {key: _back(each) for key, each in value.items()}
    return value
