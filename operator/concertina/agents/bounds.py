"""Bounds of what an agent may send, so that plan() and the API server can handle numbers and texts of any size.

Numbers come from users' scripts and texts from their output, and an agent runs in a tenant's own pod. A value out of
bounds is clamped to the nearest bound instead of refused: one odd number must not make a healthy job look silent
(decision "Bounds of agents' reports").
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import typing
from collections.abc import Callable
from typing import Annotated, Any, TypeVar

from concertina_protocol import MAX_LINE, ProtocolError

M = TypeVar("M")
LARGEST = 2**53
"""Largest integer that JSON parsers preserve exactly."""
LATEST = 253_402_300_799.0
"""End of the year 9999, the last time that RFC 3339 can express.

All other numbers of seconds or tokens are far smaller.
"""
MOST = 16_384
"""Largest number of entries: twice the ranks of the largest job."""
MOST_MEMBERS = 2048
"""Largest number of members: twice the replicas of the largest job, including its standby replicas."""
MOST_SEPARATORS = 1 << 18
"""Largest number of commas and brackets in a line.

The limit is twice the number that the coordinator of the largest job sends when all its ranks fail with ranges to leave
out. Separators are counted before the line is decoded, when separators within texts can't be distinguished.
"""
PIECE_BYTES = 64 << 10
"""Bytes of a line that a connection to an agent buffers by itself, at most twice. Nearly all lines are shorter."""
LINE_BYTES, MEMBER_BYTES = 512 << 10, 8 << 10
"""Limits of the bytes of an agent's longest line: a constant part, and a part for each member.

The constant part covers the output of two failures, where a rank hangs, and why the store fails. The part for a member
covers its failure, which occurs twice, in any encoding of the text.
"""
LINE_VALUES, MEMBER_VALUES = 10 << 10, 256
"""Limits of the JSON values of an agent's line: a constant part, and a part for each member.

The constant part covers the shards of four snapshots in the agent's memory. The part for a member covers its failure
with ranges to leave out, which occurs twice. The number of values makes a line expensive; text is cheap.
"""
LINE_CONTAINERS, MEMBER_CONTAINERS = 128, 64
"""Limits of the JSON objects and arrays among these values: a constant part, and a part for each member.

An object or array costs as much as ten other values. The part for a member covers its state, its failure, which occurs
twice, and 32 ranges to leave out.
"""
LINES = 64
TEXT = 1024
NAME, WORD = 253, 63
LENGTHS = {
    **dict.fromkeys(("replica", "instance", "claim", "node", "layout"), NAME),
    **dict.fromkeys(("reason", "phase", "others", "state"), WORD),
    "uri": 2048,
    "line": MAX_LINE,  # an encoded message, which is bounded itself
}
"""Largest number of characters of texts other than TEXT, by field."""
NESTED = ("report", "progress")
"""Fields that are messages with long lists themselves."""
SIGNED = ("exit_code", "loss")
"""Fields whose numbers may be negative."""
COUNTS = {
    "last_lines": LINES,
    "stack": LINES,
    "timeline": LINES,
    "settings": LINES,
    "failures": MOST_MEMBERS,
    "members": MOST_MEMBERS,
    "stragglers": MOST_MEMBERS,
}
"""Largest number of entries of lists other than MOST, by field."""


def separators(line: bytes) -> int:
    """Return the number of commas and opening brackets in the line.

    The line has at most one value more than that.
    """
    return line.count(b",") + line.count(b"[") + line.count(b"{")


@dataclasses.dataclass(frozen=True)
class LineLimits:
    """Limits of the largest line that an agent may send."""

    most_bytes: int
    most_values: int
    most_containers: int


def line_limits(members: int) -> LineLimits:
    """Return the limits for an agent whose job has had that many members."""
    return LineLimits(
        most_bytes=min(MAX_LINE, LINE_BYTES + members * MEMBER_BYTES),
        most_values=LINE_VALUES + members * MEMBER_VALUES,
        most_containers=LINE_CONTAINERS + members * MEMBER_CONTAINERS,
    )


LARGEST_LINE = line_limits(MOST_MEMBERS // 2)


def cut(body: Any, limits: LineLimits) -> Any:
    """Return a message's fields as JSON, with no more entries than `bounded` keeps.

    The other entries are dropped before they are converted.

    Raises:
        ProtocolError: When the fields exceed the limits.
    """
    if not isinstance(body, dict):
        return body
    _check_values(body, limits)
    return _cut(body)


def _cut(body: Any) -> Any:
    if isinstance(body, dict):
        return {name: _cut(field) if name in NESTED else _first(field, _most(name)) for name, field in body.items()}
    return body


def _check_values(body: Any, limits: LineLimits) -> None:
    """Check the number of JSON values and containers.

    Raises:
        ProtocolError: When there are more of them than the limits allow.
    """
    values, containers, unread = 0, 0, [body]
    while unread:
        container = unread.pop()
        values += len(container)
        containers += 1
        if values > limits.most_values:
            raise ProtocolError(f"a line of more than {limits.most_values} values")
        if containers + len(unread) > limits.most_containers:
            raise ProtocolError(f"a line of more than {limits.most_containers} objects and arrays")
        entries = container.values() if isinstance(container, dict) else container
        unread.extend(value for value in entries if isinstance(value, (dict, list)))


def _first(field: Any, most: int) -> Any:
    if isinstance(field, (list, dict)) and len(field) > most:
        return field[:most] if isinstance(field, list) else dict(itertools.islice(field.items(), most))
    return field


def _most(name: str) -> int:
    return COUNTS.get(name, MOST)


Bound = Callable[[Any], Any]
"""Function that returns a value within bounds: the same object when it already is."""


def bounded(message: M) -> M:
    """Return the same message within bounds."""
    within: M = _fields(type(message))(message)
    return within


def _fields(kind: type[Any]) -> Bound:
    """Return the bound of a dataclass.

    It is built once per type, because thousands of reports a second come in.
    """
    if kind not in _BY_TYPE:
        hints = typing.get_type_hints(kind, include_extras=True)
        bounds = [(field.name, _bound(hints[field.name], field.name)) for field in dataclasses.fields(kind)]
        _BY_TYPE[kind] = _all_of([(name, bound) for name, bound in bounds if bound is not None])
    return _BY_TYPE[kind]


_BY_TYPE: dict[type, Bound] = {}


def _all_of(bounds: list[tuple[str, Bound]]) -> Bound:
    def within(value: Any) -> Any:
        changes = {}
        for name, bound in bounds:
            old = getattr(value, name)
            new = bound(old)
            if new is not old:
                changes[name] = new
        return dataclasses.replace(value, **changes) if changes else value

    return within


def _bound(hint: Any, field: str, least: int = 0) -> Bound | None:
    """Return the bound of a field of that type, or None when there is nothing to bound.

    Args:
        least: Lower bound of integers.
    """
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        absent = args[1].number
        bound = _bound(args[0], field, min(0, int(absent)))
        return bound and _unless(bound, absent)
    if origin is typing.Union:
        bound = _bound(next(arg for arg in args if arg is not type(None)), field, least)
        return bound and _or_none(bound)
    if origin is tuple:
        return _entries([_bound(arg, field) for arg in args if arg is not Ellipsis], _most(field))
    if origin is not None:
        return _by_name(_bound(args[1], field), _most(field))
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return lambda value: _fields(hint)(value)  # a type may have fields of its own kind
    if issubclass(hint, str):
        return _text_of(hint, LENGTHS.get(field, TEXT))
    if hint is int:
        return _count_from(-LARGEST if field in SIGNED else least)
    return None if hint is bool else _number if field not in SIGNED else _signed


def _unless(bound: Bound, absent: float) -> Bound:
    """Return a bound that maps `absent`, the number that stands for None, to None. A bound may have that value."""

    def within(value: Any) -> Any:
        within_bounds = bound(value)
        return None if within_bounds == absent else within_bounds

    return within


def _or_none(bound: Bound) -> Bound:
    return lambda value: None if value is None else bound(value)


def _entries(bounds: list[Bound | None], most: int) -> Bound:
    """Return the bound of a tuple, whose entries all have one type, or one type each."""

    def within(value: Any) -> Any:
        entries = value[:most]
        if len(bounds) == 1:
            (bound,) = bounds
            entries = tuple(map(bound, entries)) if bound else entries
        else:
            entries = tuple(
                entry if bound is None else bound(entry) for bound, entry in zip(bounds, entries, strict=False)
            )
        return value if _same(value, entries) else entries

    return within


def _by_name(bound: Bound | None, most: int) -> Bound:
    def within(value: Any) -> Any:
        entries = itertools.islice(value.items(), most)
        return {_text(name, NAME): entry if bound is None else bound(entry) for name, entry in entries}

    return within


def _text_of(kind: type[str], most: int) -> Bound:
    if kind is str:
        return lambda value: _text(value, most)

    def within(value: str) -> Any:
        text = _text(value, most)
        return value if text is value else kind(text)  # an enum's value stays an enum

    return within


def _text(value: str, most: int) -> str:
    if value.isascii() and len(value) <= most:
        return value
    return value[:most].encode("utf-8", "replace").decode()  # half of a surrogate pair cannot be encoded


def _count_from(least: int) -> Bound:
    return lambda value: value if least <= value <= LARGEST else min(max(value, least), LARGEST)


def _number(value: float) -> float:
    return value if 0.0 <= value <= LATEST else 0.0 if math.isnan(value) else min(max(value, 0.0), LATEST)


def _signed(value: float) -> float:
    # plan() handles losses that are not finite.
    return value if not math.isfinite(value) else min(max(value, -LATEST), LATEST)


def _same(before: tuple[Any, ...], after: tuple[Any, ...]) -> bool:
    return len(before) == len(after) and all(old is new for old, new in zip(before, after, strict=True))
