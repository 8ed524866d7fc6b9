"""Conversion between dataclasses and JSON by their type hints.

The module uses the standard library only and supports Python 3.9 and later.
"""

from __future__ import annotations

import dataclasses
import enum
import json
import typing
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Optional, TypeVar, Union

T = TypeVar("T")
MOST = 400
"""Maximum length of an error's text in characters. Recipients of messages write this text into logs and reports."""


class ProtocolError(ValueError):
    """Error that JSON does not have the expected form. The text is a sentence."""


class OpenEnum(str, enum.Enum):
    """Base class of enums in messages, which may gain values in newer versions.

    A message may contain a value that this version does not know. The value keeps its text, differs from all members of
    the enum, and is written unchanged. If the message were refused instead, a healthy agent would seem silent during an
    upgrade.
    """

    __str__ = str.__str__
    __format__ = str.__format__  # type: ignore[assignment] # Enum's own differs between Python versions

    @classmethod
    def _missing_(cls, value: object) -> Optional[OpenEnum]:
        if not isinstance(value, str):
            return None
        unknown = str.__new__(cls, value)
        unknown._name_ = unknown._value_ = value
        return unknown


@dataclasses.dataclass(frozen=True)
class Absent:
    """Annotation of an optional field: `Annotated[Optional[X], Absent(number)]`.

    In JSON, `number` (such as -1) stands for None. See decision "None for unknown values".
    """

    number: float


_FIELDS: dict[type, tuple[tuple[str, Optional[float]], ...]] = {}
"""Fields of each dataclass that was used: the field's name, and the number that stands for None in JSON (or None)."""


def _fields(kind: type[Any]) -> tuple[tuple[str, Optional[float]], ...]:
    if kind not in _FIELDS:
        annotated = [(name, hint) for name, hint in _hints(kind).items() if typing.get_origin(hint) is Annotated]
        absent = {name: typing.get_args(hint)[1].number for name, hint in annotated}
        _FIELDS[kind] = tuple((field.name, absent.get(field.name)) for field in dataclasses.fields(kind))
    return _FIELDS[kind]


_PLAIN = frozenset({type(None), str, int, float, bool})


def to_json(value: Any) -> Any:
    """Return a value in a form that json.dumps accepts. `from_json` is the inverse."""
    if type(value) in _PLAIN or isinstance(value, (str, int, float)):
        return value
    if isinstance(value, (tuple, list)):
        return [to_json(item) for item in value]
    if isinstance(value, Mapping):
        return {key: to_json(item) for key, item in value.items()}
    if dataclasses.is_dataclass(value):
        fields: dict[str, Any] = {}
        for name, absent in _fields(type(value)):  # plain fields are handled here: calls would take twice as long
            item = getattr(value, name)
            fields[name] = absent if item is None else item if type(item) in _PLAIN else to_json(item)
        return fields
    return value


def from_json(kind: type[T], value: Any) -> T:
    """Convert parsed JSON into a value of type `kind`, which is a dataclass or the type of a dataclass's field.

    Raises:
        ProtocolError: If the value does not match the type.
    """
    try:
        return typing.cast(T, _reader(kind)(value))
    except (TypeError, KeyError, ValueError, AttributeError, OverflowError, RecursionError) as error:
        why = str(error)[:MOST]  # the error's text may contain the whole value
        raise ProtocolError(f"a {getattr(kind, '__name__', kind)} can't be read: {why}") from error


def parse_json(kind: type[T], text: Union[bytes, str]) -> T:
    """Return a value of type `kind` from a JSON document.

    Raises:
        ProtocolError: If the document is not JSON, or does not match the type.
    """
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"a {kind.__name__} can't be read: {str(error)[:MOST]}") from error
    return from_json(kind, value)


def _hints(kind: type[Any]) -> Mapping[str, Any]:
    return typing.get_type_hints(kind, include_extras=True)


Reader = Callable[[Any], Any]
_READERS: dict[Any, Reader] = {}


def _reader(kind: Any) -> Reader:
    """Return a function that converts parsed JSON into a value of the type `kind`.

    The function is built once per type. This saves time, because thousands of lines are read per second.
    """
    return _READERS.get(kind) or _READERS.setdefault(kind, _make_reader(kind))


def _make_reader(kind: Any) -> Reader:
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin is Annotated:
        return _or_absent(_reader(args[0]), args[1].number)
    if origin is Union:
        inner = _reader(next(arg for arg in args if arg is not type(None)))
        return lambda value: None if value is None else inner(value)
    if origin is tuple and args[-1] is Ellipsis:
        read_item = _reader(args[0])
        return lambda value: tuple(map(read_item, value))
    if origin is tuple:
        return _tuple_reader(tuple(map(_reader, args)))
    if origin is not None:  # Mapping[str, X]
        entry = _reader(args[1])
        return lambda value: {str(key): entry(item) for key, item in value.items()}
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        return _dataclass_reader(kind)
    if kind is Any:
        return lambda value: value
    if kind is float:
        return float
    if issubclass(kind, OpenEnum):
        return typing.cast(Reader, kind)
    return _exactly(kind)


def _or_absent(read: Reader, absent: float) -> Reader:
    def read_unless_absent(value: Any) -> Any:
        number = read(value)
        return None if number == absent else number

    return read_unless_absent


def _tuple_reader(readers: tuple[Reader, ...]) -> Reader:
    def read(value: Any) -> Any:
        items = tuple(read_item(item) for read_item, item in zip(readers, value))
        if len(items) < len(readers):
            raise ValueError(f"there are {len(items)} entries, but {len(readers)} are needed")
        return items

    return read


def _dataclass_reader(kind: type[Any]) -> Reader:
    fields: dict[str, Reader] = {}

    def read(value: Any) -> Any:
        if not fields:  # built at the first use, because a type may have fields of its own type
            fields.update((name, _reader(hint)) for name, hint in _hints(kind).items())
        return kind(**{name: fields[name](item) for name, item in value.items() if name in fields})

    return read


def _exactly(kind: type[Any]) -> Reader:
    def read(value: Any) -> Any:
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise TypeError(f"{value!r} is not of the type {kind.__name__}")
        return value

    return read
