"""Dataclasses to JSON and back, by their type hints. Standard library only, Python 3.9+."""

from __future__ import annotations

import dataclasses
import enum
import typing
from collections.abc import Mapping
from typing import Annotated, Any, Optional, TypeVar, Union

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


@dataclasses.dataclass(frozen=True)
class Absent:
    """Of a field `Annotated[Optional[X], Absent(number)]`: the number that stands in JSON for None (decision "What is
    not there is None")."""

    number: float


_ABSENT: dict[type, Mapping[str, float]] = {}


def absent_numbers(kind: type[Any]) -> Mapping[str, float]:
    """By field of a dataclass, of those that have one."""
    if kind not in _ABSENT:
        annotated = [(name, hint) for name, hint in _hints(kind).items() if typing.get_origin(hint) is Annotated]
        _ABSENT[kind] = {name: typing.get_args(hint)[1].number for name, hint in annotated}
    return _ABSENT[kind]


def to_json(value: Any) -> Any:
    """The reverse of `from_json`, for json.dumps."""
    if dataclasses.is_dataclass(value):
        absent = absent_numbers(type(value))
        fields = ((field.name, getattr(value, field.name)) for field in dataclasses.fields(value))
        return {name: absent.get(name) if each is None else to_json(each) for name, each in fields}
    if isinstance(value, (tuple, list)):
        return [to_json(each) for each in value]
    if isinstance(value, Mapping):
        return {key: to_json(each) for key, each in value.items()}
    return value


def from_json(kind: type[T], value: Any) -> T:
    """A value of type `kind` (a dataclass or what its fields are made of) from parsed JSON."""
    try:
        return typing.cast(T, _convert(kind, value))
    except (TypeError, KeyError, ValueError, AttributeError, OverflowError, RecursionError) as error:
        raise ProtocolError(f"a {getattr(kind, '__name__', kind)} can't be read: {error}") from error


_HINTS: dict[type, dict[str, Any]] = {}


def _hints(kind: type[Any]) -> Mapping[str, Any]:
    return _HINTS.get(kind) or _HINTS.setdefault(kind, typing.get_type_hints(kind, include_extras=True))


def _convert(kind: Any, value: Any) -> Any:
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin is Annotated:
        found = _convert(args[0], value)
        return None if found == args[1].number else found
    if origin is Union:
        return None if value is None else _convert(next(a for a in args if a is not type(None)), value)
    if origin is tuple:
        if args[-1] is Ellipsis:
            return tuple(_convert(args[0], item) for item in value)
        return tuple(_convert(a, item) for a, item in zip(args, value))
    if origin is not None:  # Mapping[str, X]
        return {str(key): _convert(args[1], item) for key, item in value.items()}
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        hints = _hints(kind)
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
