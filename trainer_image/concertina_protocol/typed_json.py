"""Parsed JSON to dataclasses, by their type hints. Standard library only, Python 3.9+."""

from __future__ import annotations

import dataclasses
import enum
import typing
from typing import Any, Optional, TypeVar, Union

T = TypeVar("T")


class ProtocolError(ValueError):
    """JSON that is not what it should be; the sentence says how."""


class OpenEnum(str, enum.Enum):
    """A field of a few known words. A word that only a newer side knows is read too: it stays as it is, equals no
    member, and is passed on unchanged. Refused, a healthy agent would look silent while one side is upgraded."""

    __str__ = str.__str__
    __format__ = str.__format__  # type: ignore[assignment] # of the value: Pythons differ in what Enum's own writes

    @classmethod
    def _missing_(cls, value: object) -> Optional[OpenEnum]:
        if not isinstance(value, str):
            return None
        unknown = str.__new__(cls, value)
        unknown._name_ = unknown._value_ = value
        return unknown


def from_json(kind: type[T], value: Any) -> T:
    """A value of type `kind` (a dataclass or what its fields are made of) from parsed JSON."""
    try:
        return typing.cast(T, _convert(kind, value))
    except (TypeError, KeyError, ValueError, AttributeError, OverflowError, RecursionError) as error:
        raise ProtocolError(f"a {getattr(kind, '__name__', kind)} can't be read: {error}") from error


_HINTS: dict[type, dict[str, Any]] = {}


def _convert(kind: Any, value: Any) -> Any:
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin is Union:
        return None if value is None else _convert(next(a for a in args if a is not type(None)), value)
    if origin is tuple:
        if args[-1] is Ellipsis:
            return tuple(_convert(args[0], item) for item in value)
        return tuple(_convert(a, item) for a, item in zip(args, value))
    if origin is not None:  # Mapping[str, X]
        return {str(key): _convert(args[1], item) for key, item in value.items()}
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        hints = _HINTS.get(kind) or _HINTS.setdefault(kind, typing.get_type_hints(kind))
        return kind(**{name: _convert(hints[name], item) for name, item in value.items() if name in hints})
    if kind is Any:
        return value
    if kind is float:
        return float(value)
    if issubclass(kind, OpenEnum):
        return kind(value)
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise TypeError(f"{value!r} is not {kind.__name__}")
    return value
