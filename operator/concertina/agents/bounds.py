"""Limits for the values in agents' messages, so that the operator and the API server can process these messages.

An agent runs in a tenant's pod and forwards numbers and texts from the user's script, so its values can't be trusted. A
number outside its limits is replaced by the nearest limit, and a long text is cut. The message is not refused, because
the agent of a healthy job would seem to be silent after one odd value (decision "Bounds of agents' reports").
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
"""Largest integer that all JSON parsers represent exactly."""
LATEST = 253_402_300_799.0
"""Largest time: the end of the year 9999 in Unix seconds, the last time that RFC 3339 can express.

This is also the limit for all other floating-point numbers. Their normal values are much smaller.
"""
MOST = 16_384
"""Largest number of entries in any list without its own limit. It is twice the number of ranks of the largest job."""
MOST_MEMBERS = 2048
"""Largest number of members in a message: twice the replicas of the largest job, including standby replicas."""
MOST_SEPARATORS = 1 << 18
"""Largest number of commas and opening brackets in a line (message).

It is twice the number in the coordinator's message for the largest job if all ranks fail and each reports sample ranges
to skip. The characters are counted before the line is decoded, so those inside texts count too.
"""
PIECE_BYTES = 64 << 10
"""Limit of a connection's read buffer in bytes. Nearly all lines (messages) are shorter.

asyncio buffers up to twice this size.
"""
LINE_BYTES, MEMBER_BYTES = 512 << 10, 8 << 10
"""Limit for the bytes of a line (message): a constant part, and a part for each member of the job.

The constant part allows the output of two failed workers, the stack of a hung rank, and an error of the store. The part
per member allows the member's failure, which a message contains twice, in any encoding.
"""
LINE_VALUES, MEMBER_VALUES = 10 << 10, 256
"""Limit for the number of JSON values in a line (message): a constant part, and a part for each member of the job.

The constant part allows the shards of four snapshots in the agent's memory. The part per member allows the member's
failure with its sample ranges to skip, which a message contains twice. The number of values determines the cost to
decode a line; the length of texts hardly matters.
"""
LINE_CONTAINERS, MEMBER_CONTAINERS = 128, 64
"""Limit for the number of JSON objects and arrays in a line: a constant part, and a part for each member of the job.

Decoding an object or array costs as much as ten other values. The part per member allows the member's state, its
failure, which a message contains twice, and 32 sample ranges to skip.
"""
LINES = 64
TEXT = 1024
NAME, WORD = 253, 63
LENGTHS = {
    **dict.fromkeys(("replica", "instance", "claim", "node", "layout"), NAME),
    **dict.fromkeys(("reason", "phase", "others", "state", "operation", "instead"), WORD),
    "uri": 2048,
    "line": MAX_LINE,  # an encoded message, whose values are limited too
}
"""Largest number of characters of a text, by name of the field. Texts in other fields have the limit TEXT."""
NESTED = ("report", "progress")
"""Names of the fields whose value is a message with long lists."""
SIGNED = ("exit_code", "loss")
"""Names of the fields whose number may be negative."""
COUNTS = {
    "last_lines": LINES,
    "stack": LINES,
    "timeline": LINES,
    "settings": LINES,
    "failures": MOST_MEMBERS,
    "members": MOST_MEMBERS,
    "stragglers": MOST_MEMBERS,
    "missing": LINES,
    "silent": LINES,
}
"""Largest number of entries of a list, by name of the field. Lists in other fields have the limit MOST."""


def separators(line: bytes) -> int:
    """Return the number of commas and opening brackets in a line.

    A line has at most this number of JSON values plus one. The operator can therefore refuse a line with too many
    values before it decodes the line.
    """
    return line.count(b",") + line.count(b"[") + line.count(b"{")


@dataclasses.dataclass(frozen=True)
class LineLimits:
    """Limits for the size of a line that an agent sends, and for the number of values in it."""

    most_bytes: int
    most_values: int
    most_containers: int


def line_limits(members: int) -> LineLimits:
    """Return the limits for lines of one agent of a job.

    `members` is the largest number of members that the job has had.
    """
    return LineLimits(
        most_bytes=min(MAX_LINE, LINE_BYTES + members * MEMBER_BYTES),
        most_values=LINE_VALUES + members * MEMBER_VALUES,
        most_containers=LINE_CONTAINERS + members * MEMBER_CONTAINERS,
    )


LARGEST_LINE = line_limits(MOST_MEMBERS // 2)


def cut(body: Any, limits: LineLimits) -> Any:
    """Return the decoded JSON of an agent's message, with long lists cut to their limits.

    The list entries beyond a limit are dropped before the JSON values are converted to objects.

    Raises:
        ProtocolError: When there are more values than the limits allow.
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
    """Check that a message has no more JSON values and containers (objects and arrays) than the limits allow.

    Raises:
        ProtocolError: When it has more.
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
"""Function that limits a value. If the value is already within its limits, the function returns the same object."""


def bounded(message: M) -> M:
    """Return an agent's message with its numbers clamped and its texts and lists cut to the limits of this module."""
    within: M = _fields(type(message))(message)
    return within


def _fields(kind: type[Any]) -> Bound:
    """Return the function that limits all fields of a dataclass.

    The function is built once for each type, because thousands of reports arrive per second.
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
    """Return the function that limits a field of the given type; None if the type needs no limit.

    Args:
        hint: Type of the field.
        field: Name of the field.
        least: Lower bound for integers.
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
        return lambda value: _fields(hint)(value)  # looked up late, because a type may have fields of the same type
    if issubclass(hint, str):
        return _text_of(hint, LENGTHS.get(field, TEXT))
    if hint is int:
        return _count_from(-LARGEST if field in SIGNED else least)
    return None if hint is bool else _number if field not in SIGNED else _signed


def _unless(bound: Bound, absent: float) -> Bound:
    """Return a function that limits a number with `bound`, but replaces the number `absent` by None.

    In messages, the number `absent` stands for a missing value. The function also returns None if the limited number is
    `absent`.
    """

    def within(value: Any) -> Any:
        within_bounds = bound(value)
        return None if within_bounds == absent else within_bounds

    return within


def _or_none(bound: Bound) -> Bound:
    return lambda value: None if value is None else bound(value)


def _entries(bounds: list[Bound | None], most: int) -> Bound:
    """Return the function that cuts a tuple to its first `most` entries and limits each entry.

    Args:
        bounds: Functions that limit the entries: a single function for all entries, or one function per position. None
            stands for no limit.
        most: Largest number of entries to keep.
    """

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
        return value if text is value else kind(text)  # a value of an enum keeps its type

    return within


def _text(value: str, most: int) -> str:
    if value.isascii() and len(value) <= most:
        return value
    return value[:most].encode("utf-8", "replace").decode()  # half of a surrogate pair can't be encoded


def _count_from(least: int) -> Bound:
    return lambda value: value if least <= value <= LARGEST else min(max(value, least), LARGEST)


def _number(value: float) -> float:
    return value if 0.0 <= value <= LATEST else 0.0 if math.isnan(value) else min(max(value, 0.0), LATEST)


def _signed(value: float) -> float:
    # plan() handles losses that are not finite.
    return value if not math.isfinite(value) else min(max(value, -LATEST), LATEST)


def _same(before: tuple[Any, ...], after: tuple[Any, ...]) -> bool:
    return len(before) == len(after) and all(old is new for old, new in zip(before, after, strict=True))
