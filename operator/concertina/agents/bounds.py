"""What an agent may say: numbers and texts of any size, as plan() and the API server can take them.

Numbers come from people's scripts and texts from their ends, and an agent runs in a tenant's own pod. What is out of
bounds is moved to the nearest bound instead of refused: one odd number must not make a healthy world look silent
(decision "What agents say is bounded, not refused")."""

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
"""What JSON's readers keep exactly."""
LATEST = 253_402_300_799.0
"""The end of year 9999, the last that RFC 3339 can write; no other number of seconds or tokens comes near."""
MOST = 16_384
"""Entries: ranks of the largest world, twice."""
MOST_MEMBERS = 2048
"""Twice the replicas of the largest job, with its standby replicas."""
MOST_SEPARATORS = 1 << 18
"""Commas and brackets in a line: twice what the coordinator of the largest world says when all its ranks fail with
ranges to leave out. They are counted before the line is decoded, where those in texts cannot be told from others."""
PIECE_BYTES = 64 << 10
"""Of a line, that a connection to an agent buffers by itself, twice at most. Nearly all lines are shorter."""
LINE_BYTES, MEMBER_BYTES = 512 << 10, 8 << 10
"""Of the longest line of an agent: whatever the size of its world (output of two failures, where a rank hangs, why the
store fails), and for each member (its failure, said twice), whatever these are written in."""
LINE_VALUES, MEMBER_VALUES = 10 << 10, 256
"""JSON values of a line of an agent: whatever the size of its world (shards of four snapshots in its memory), and for
each member (its failure with ranges to leave out, said twice). Their number makes a line expensive; text is cheap."""
LINE_CONTAINERS, MEMBER_CONTAINERS = 128, 64
"""JSON objects and arrays among them, each of which costs as much as ten other values: whatever the size of the world,
and for each member (its state, its failure said twice, 32 ranges to leave out)."""
LINES = 64
TEXT = 1024
NAME, WORD = 253, 63
LENGTHS = {
    **dict.fromkeys(("replica", "instance", "claim", "node", "layout"), NAME),
    **dict.fromkeys(("reason", "phase", "others", "state"), WORD),
    "uri": 2048,
    "line": MAX_LINE,  # of another message, which is bounded itself
}
"""Characters of other texts, by field."""
NESTED = ("report", "progress")
"""Fields that are messages with long lists of their own."""
SIGNED = ("exit_code", "loss")
"""Fields whose numbers may be below zero."""
COUNTS = {
    "last_lines": LINES,
    "stack": LINES,
    "timeline": LINES,
    "failures": MOST_MEMBERS,
    "members": MOST_MEMBERS,
    "stragglers": MOST_MEMBERS,
}
"""Entries of other lists, by field."""


def separators(line: bytes) -> int:
    """Return how many commas and opening brackets the line has: it has at most one value more."""
    return line.count(b",") + line.count(b"[") + line.count(b"{")


@dataclasses.dataclass(frozen=True)
class LineLimits:
    """The largest line that an agent may send."""

    most_bytes: int
    most_values: int
    most_containers: int


def line_limits(members: int) -> LineLimits:
    """Return the limits for an agent whose world has had so many members."""
    return LineLimits(
        most_bytes=min(MAX_LINE, LINE_BYTES + members * MEMBER_BYTES),
        most_values=LINE_VALUES + members * MEMBER_VALUES,
        most_containers=LINE_CONTAINERS + members * MEMBER_CONTAINERS,
    )


LARGEST_LINE = line_limits(MOST_MEMBERS // 2)


def cut(body: Any, limits: LineLimits) -> Any:
    """Return a message's fields as JSON, with no more entries than `bounded` leaves of them: the others are not
    converted. Raises ProtocolError if the fields are beyond the limits."""
    if not isinstance(body, dict):
        return body
    _check_values(body, limits)
    return _cut(body)


def _cut(body: Any) -> Any:
    if isinstance(body, dict):
        return {name: _cut(field) if name in NESTED else _first(field, _most(name)) for name, field in body.items()}
    return body


def _check_values(body: Any, limits: LineLimits) -> None:
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
"""What a value becomes within bounds: the same object where it is."""


def bounded(message: M) -> M:
    """The same message within bounds."""
    within: M = _fields(type(message))(message)
    return within


def _fields(kind: type[Any]) -> Bound:
    """Of a dataclass. Made once a type: thousands of reports a second come in."""
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
    """Of a field's type; None where there is nothing to bound. `least`: of whole numbers."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        absent = args[1].number
        bound = _bound(args[0], field, min(0, int(absent)))
        return bound and _unless(bound, absent)
    if origin is typing.Union:
        bound = _bound(next(each for each in args if each is not type(None)), field, least)
        return bound and _or_none(bound)
    if origin is tuple:
        return _entries([_bound(each, field) for each in args if each is not Ellipsis], _most(field))
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
    """`absent`: the number that stands for None, which a bound may be."""

    def within(value: Any) -> Any:
        found = bound(value)
        return None if found == absent else found

    return within


def _or_none(bound: Bound) -> Bound:
    return lambda value: None if value is None else bound(value)


def _entries(bounds: list[Bound | None], most: int) -> Bound:
    """Of a tuple: all of one type, or of one each."""

    def within(value: Any) -> Any:
        kept = value[:most]
        if len(bounds) == 1:
            (bound,) = bounds
            kept = tuple(map(bound, kept)) if bound else kept
        else:
            kept = tuple(each if bound is None else bound(each) for bound, each in zip(bounds, kept, strict=False))
        return value if _same(value, kept) else kept

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
        return value if text is value else kind(text)  # an enum's word stays one

    return within


def _text(value: str, most: int) -> str:
    if value.isascii() and len(value) <= most:
        return value
    return value[:most].encode("utf-8", "replace").decode()  # half a surrogate pair is no text


def _count_from(least: int) -> Bound:
    return lambda value: value if least <= value <= LARGEST else min(max(value, least), LARGEST)


def _number(value: float) -> float:
    return value if 0.0 <= value <= LATEST else 0.0 if math.isnan(value) else min(max(value, 0.0), LATEST)


def _signed(value: float) -> float:
    return value if not math.isfinite(value) else min(max(value, -LATEST), LATEST)  # plan() knows odd losses


def _same(before: tuple[Any, ...], after: tuple[Any, ...]) -> bool:
    return len(before) == len(after) and all(old is new for old, new in zip(before, after, strict=True))
