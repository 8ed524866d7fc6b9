"""Wire format, to the byte: agents continue while their operator is upgraded, so the next version must read it.

`golden/<protocol>.jsonl` has a line of each kind in the current format, and `golden/<protocol>-before.jsonl` in the
format of the previous version, which must still be read. After an intended change, run `python
tests/unit/protocol/test_wire.py`; the difference is part of the review. After a release, its lines become those of the
previous version.
"""

from __future__ import annotations

import dataclasses
import json
import typing
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, Union

import pytest

import concertina_protocol as protocol
from concertina_protocol import worker_channel
from concertina_protocol.codec.typed_json import OpenEnum, to_json

GOLDEN = Path(__file__).with_name("golden")
PROTOCOLS: dict[str, ModuleType] = {"protocol": protocol, "worker_channel": worker_channel}
SIMPLE = {int: 7, float: 0.5, bool: True}


def sample(kind: Any, name: str = "") -> Any:
    """Return a value of that type with something in each field."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin is Union:
        return sample(next(each for each in args if each is not type(None)), name)
    if origin is tuple:
        return tuple(sample(each, name) for each in args if each is not Ellipsis)
    if origin is not None and issubclass(origin, Mapping):
        return {name: sample(args[1], name)}
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        hints = typing.get_type_hints(kind)
        return kind(**{field.name: sample(hints[field.name], field.name) for field in dataclasses.fields(kind)})
    if isinstance(kind, type) and issubclass(kind, OpenEnum):
        return kind(name)  # This side does not know the word.
    return SIMPLE.get(kind, name)


def lines(module: ModuleType) -> list[bytes]:
    return [module.encode(sample(kind)) for kind in module.KINDS.values()]


@pytest.mark.parametrize("name", PROTOCOLS)
def test_each_kind_is_said_as_it_was(name: str) -> None:
    golden = (GOLDEN / f"{name}.jsonl").read_bytes().splitlines(keepends=True)
    assert lines(PROTOCOLS[name]) == golden


@pytest.mark.parametrize("name", PROTOCOLS)
def test_what_is_said_is_what_is_heard(name: str) -> None:
    module = PROTOCOLS[name]
    for kind in module.KINDS.values():
        assert module.decode(module.encode(sample(kind))) == sample(kind)


@pytest.mark.parametrize("name", PROTOCOLS)
def test_the_version_before_is_still_read(name: str) -> None:
    """Every kind of the previous version is read, with every field that it had."""
    module = PROTOCOLS[name]
    before = (GOLDEN / f"{name}-before.jsonl").read_bytes().splitlines()
    assert before
    for line in before:
        message = module.decode(line)
        assert module.KINDS[typing.cast(str, _frame(line)["kind"])] is type(message)
        assert _subset(_frame(line)["body"], to_json(message)), line


def test_none_is_said_as_the_number_that_stands_for_it() -> None:
    progress = protocol.Progress(0, None, 2.5, 0.0, 0.0, 0, "training", 1.0)
    said = _frame(worker_channel.encode(progress))["body"]
    told = {name: said[name] for name in ("steps", "first_step_at", "snapshot_step", "mfu", "restored_step")}
    assert json.dumps(told) == (
        '{"steps": 0, "first_step_at": 0.0, "snapshot_step": -1, "mfu": 0.0, "restored_step": -1}'
    )
    assert said["interval"] is None, "what has no such number"
    assert worker_channel.decode(worker_channel.encode(progress)) == progress


@pytest.mark.parametrize("name", PROTOCOLS)
def test_every_message_has_a_name_on_the_wire(name: str) -> None:
    module = PROTOCOLS[name]
    assert set(module.KINDS.values()) == set(typing.get_args(module.Message))


def _frame(line: bytes) -> dict[str, Any]:
    parsed: dict[str, Any] = json.loads(line)
    return parsed


def _subset(said: Any, heard: Any) -> bool:
    """Return whether all sent values were received; lists of JSON are tuples here."""
    if isinstance(said, dict):
        return all(key in heard and _subset(value, heard[key]) for key, value in said.items())
    if isinstance(said, list):
        return len(said) == len(heard) and all(map(_subset, said, heard))
    return bool(said == heard)


if __name__ == "__main__":
    for name, module in PROTOCOLS.items():
        (GOLDEN / f"{name}.jsonl").write_bytes(b"".join(lines(module)))
