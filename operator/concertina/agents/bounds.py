"""What an agent may say: numbers and texts of any size, as plan() and the API server can take them.

Numbers come from people's scripts and texts from their ends, and an agent runs in a tenant's own pod. What is out of
bounds is moved to the nearest bound instead of refused: one odd number must not make a healthy world look silent
(decision "What agents say is bounded, not refused")."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, TypeVar

from concertina_protocol import MAX_LINE
from concertina_protocol.codec.typed_json import absent_numbers

M = TypeVar("M")
LARGEST = 2**53
"""What JSON's readers keep exactly."""
LATEST = 253_402_300_799.0
"""The end of year 9999, the last that RFC 3339 can write; no other number of seconds or tokens comes near."""
MOST = 16_384
"""Entries: ranks of the largest world, twice."""
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
SIGNED = ("exit_code", "loss")
"""Fields whose numbers may be below zero."""
OR_NONE = ("rank", "round", "step", "snapshot_step", "restored_step")
"""Fields in which -1 may stand for none."""
COUNTS = {"last_lines": LINES, "stack": LINES, "timeline": LINES}
"""Entries of other lists, by field."""


def bounded(message: M) -> M:
    """The same message within bounds."""
    bound: M = _bounded(message, "")
    return bound


def _bounded(value: Any, field: str, absent: float | None = None) -> Any:
    """`absent`: the number that stands for None, which a bound may be."""
    if isinstance(value, bool) or value is None:
        return value
    if isinstance(value, str):
        return type(value)(_text(value, LENGTHS.get(field, TEXT)))  # an enum's word stays one
    if isinstance(value, int):
        least = -LARGEST if field in SIGNED else -1 if field in OR_NONE else 0
        count = min(max(value, least), LARGEST)
        return None if count == absent else count
    if isinstance(value, float):
        number = _number(value, field)
        return None if number == absent else number
    if isinstance(value, tuple):
        kept = tuple(_bounded(entry, field) for entry in value[: COUNTS.get(field, MOST)])
        return value if _same(value, kept) else kept
    if isinstance(value, Mapping):
        entries = list(value.items())[: COUNTS.get(field, MOST)]
        return {_text(name, NAME): _bounded(entry, field) for name, entry in entries}
    changes, absent_by_field = {}, absent_numbers(type(value))
    for each in dataclasses.fields(value):
        old = getattr(value, each.name)
        new = _bounded(old, each.name, absent_by_field.get(each.name))
        if new is not old:
            changes[each.name] = new
    return dataclasses.replace(value, **changes) if changes else value


def _number(value: float, field: str) -> float:
    if field in SIGNED:
        return value if not math.isfinite(value) else min(max(value, -LATEST), LATEST)  # plan() knows odd losses
    return 0.0 if math.isnan(value) else min(max(value, 0.0), LATEST)


def _text(value: str, most: int) -> str:
    if value.isascii() and len(value) <= most:
        return value
    return value[:most].encode("utf-8", "replace").decode()  # half a surrogate pair is no text


def _same(before: tuple[Any, ...], after: tuple[Any, ...]) -> bool:
    return len(before) == len(after) and all(old is new for old, new in zip(before, after, strict=True))
