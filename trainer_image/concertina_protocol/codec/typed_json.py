"""Dataclasses to JSON and back, by their type hints. Standard library only, Python 3.9+."""

from __future__ import annotations

import dataclasses
import enum
import json
import typing
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Optional, TypeVar, Union

T = TypeVar("T")
MOST = 400
"""Characters of what is wrong: who is told writes it into logs and reports."""


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


_FIELDS: dict[type, tuple[tuple[str, Optional[float]], ...]] = {}
"""Of a dataclass, in order: name, and the number that stands for None."""


def _fields(kind: type[Any]) -> tuple[tuple[str, Optional[float]], ...]:
    if kind not in _FIELDS:
        annotated = [(name, hint) for name, hint in _hints(kind).items() if typing.get_origin(hint) is Annotated]
        absent = {name: typing.get_args(hint)[1].number for name, hint in annotated}
        _FIELDS[kind] = tuple((field.name, absent.get(field.name)) for field in dataclasses.fields(kind))
    return _FIELDS[kind]


_PLAIN = frozenset({type(None), str, int, float, bool})


def to_json(value: Any) -> Any:
    """The reverse of `from_json`, for json.dumps."""
    if type(value) in _PLAIN or isinstance(value, (str, int, float)):
        return value
    if isinstance(value, (tuple, list)):
        return [to_json(each) for each in value]
    if isinstance(value, Mapping):
        return {key: to_json(each) for key, each in value.items()}
    if dataclasses.is_dataclass(value):
        found: dict[str, Any] = {}
        for name, absent in _fields(type(value)):  # most fields are plain: a call for each is half of the time
            each = getattr(value, name)
            found[name] = absent if each is None else each if type(each) in _PLAIN else to_json(each)
        return found
    return value


def from_json(kind: type[T], value: Any) -> T:
    """A value of type `kind` (a dataclass or what its fields are made of) from parsed JSON."""
    try:
        return typing.cast(T, _reader(kind)(value))
    except (TypeError, KeyError, ValueError, AttributeError, OverflowError, RecursionError) as error:
        why = str(error)[:MOST]  # it may show the value
        raise ProtocolError(f"a {getattr(kind, '__name__', kind)} can't be read: {why}") from error


def parse_json(kind: type[T], text: Union[bytes, str]) -> T:
    """The same from a whole document. Raises ProtocolError for whatever else it is."""
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
    """What makes a value of that type from parsed JSON. Made once a type: thousands of lines a second are read."""
    return _READERS.get(kind) or _READERS.setdefault(kind, _make_reader(kind))


def _make_reader(kind: Any) -> Reader:
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin is Annotated:
        return _or_absent(_reader(args[0]), args[1].number)
    if origin is Union:
        inner = _reader(next(each for each in args if each is not type(None)))
        return lambda value: None if value is None else inner(value)
    if origin is tuple and args[-1] is Ellipsis:
        each = _reader(args[0])
        return lambda value: tuple(map(each, value))
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
        found = read(value)
        return None if found == absent else found

    return read_unless_absent


def _tuple_reader(some: tuple[Reader, ...]) -> Reader:
    def read(value: Any) -> Any:
        found = tuple(each(item) for each, item in zip(some, value))
        if len(found) < len(some):
            raise ValueError(f"{len(found)} entries where there must be {len(some)}")
        return found

    return read


def _dataclass_reader(kind: type[Any]) -> Reader:
    fields: dict[str, Reader] = {}

    def read(value: Any) -> Any:
        if not fields:  # not before it is needed: a type may have fields of its own kind
            fields.update((name, _reader(hint)) for name, hint in _hints(kind).items())
        return kind(**{name: fields[name](item) for name, item in value.items() if name in fields})

    return read


def _exactly(kind: type[Any]) -> Reader:
    def read(value: Any) -> Any:
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise TypeError(f"{value!r} is not {kind.__name__}")
        return value

    return read
