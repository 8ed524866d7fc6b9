"""Arbitrary input from the network, or from a file that two programs share: it is read, or refused with an error."""

from __future__ import annotations

import dataclasses
import functools
import json
import struct
import tempfile
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

import concertina_protocol as protocol
from builders.mutated import Reader, all_of, plays
from concertina.agents.bounds import bounded
from concertina_protocol import ProtocolError, heartbeat, log_lines, sidecar, worker_channel
from concertina_protocol.addresses import split
from concertina_protocol.codec.typed_json import from_json
from concertina_protocol.heartbeat import HeartbeatFile

HERE = "tests/unit/protocol/test_strange_bytes.py"
GOLDEN = Path(__file__).with_name("golden")
ID = protocol.SnapshotId(1, 5, "digest", 1)
LOG = (
    b"[rank 1] round 2 is at work: step 7, state from memory of step 6; seconds: start 0.125  group 1.500; at 12.5000",
    b"step 7/10  loss 2.5000  rate 1.00e-03  1,234 tokens/s  250 ms",
)


def golden(name: str) -> list[bytes]:
    lines = (GOLDEN / f"{name}.jsonl").read_bytes() + (GOLDEN / f"{name}-before.jsonl").read_bytes()
    return lines.splitlines()


def fits(kind: Any, value: Any) -> bool:
    """Return whether a value is of its declared type at all levels, because its users check nothing more."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Union:
        return any(fits(each, value) for each in args)
    if origin is tuple and isinstance(value, tuple):
        kinds = [args[0]] * len(value) if args[-1] is Ellipsis else args
        return len(kinds) == len(value) and all(map(fits, kinds, value))
    if isinstance(value, Mapping):
        return origin is not None and all(isinstance(key, str) and fits(args[1], each) for key, each in value.items())
    if dataclasses.is_dataclass(kind):
        hints = HINTS(kind)
        return isinstance(value, kind) and all(fits(hint, getattr(value, name)) for name, hint in hints.items())
    return kind is Any or (origin is None and isinstance(value, kind) and isinstance(value, bool) == (kind is bool))


HINTS = functools.cache(typing.get_type_hints)


def said_on(line: bytes) -> protocol.Message:
    """Return the message as the operator receives it, or an agent that relays it."""
    message = bounded(protocol.decode(line))
    assert fits(type(message), message), message
    assert protocol.decode(protocol.encode(message)) is not None
    return message


def changed(line: bytes) -> protocol.Report:
    """Return the report that results from a line with changes.

    Raises:
        ProtocolError: If the line is of another kind.
    """
    before = protocol.decode(next(each for each in golden("protocol") if b'"kind":"Report"' in each))
    message = protocol.decode(line)
    assert isinstance(before, protocol.Report)
    if not isinstance(message, protocol.ReportChange):
        raise ProtocolError("another kind")
    after = protocol.changed(before, message)
    protocol.only_numbers(before, after)
    return after


def of_a_worker(line: bytes) -> worker_channel.Message:
    message = worker_channel.decode(line)
    assert fits(type(message), message), message
    return message


def in_a_file(name: str, read: Callable[[Path], object]) -> Callable[[bytes], object]:
    folder = Path(tempfile.mkdtemp(prefix="concertina-fuzz-"))

    def of(content: bytes) -> object:
        (folder / name).write_bytes(content)
        return read(folder / name)

    return of


def sidecar_of(file: Path) -> sidecar.Sidecar | None:
    shard = file.with_suffix("")
    shard.write_bytes(bytes(64))
    return sidecar.read_sidecar(shard)


READERS = {
    "a line between operator and agents": Reader(said_on, golden("protocol"), (ProtocolError,), protocol.Message),
    "a line between an agent and its workers": Reader(
        of_a_worker, golden("worker_channel"), (ProtocolError,), worker_channel.Message
    ),
    "a change of a report": Reader(
        changed, [each for each in golden("protocol") if b"ReportChange" in each], (ProtocolError,), protocol.Report
    ),
    "a line of a log": Reader(lambda line: log_lines.parse(line.decode(errors="replace")), LOG, ()),
    "a heartbeat": Reader(
        in_a_file("rank-0", lambda file: HeartbeatFile(0, str(file)).read(100.0)),
        [struct.pack("<16sqdd", b"training", 5, 99.0, 1.0)],
        (),
        (protocol.Heartbeat, type(None)),
    ),
    "a sidecar": Reader(
        in_a_file("slot-0.json", sidecar_of),
        [json.dumps({"id": vars(ID), "shard": 0, "size": 64, "crc32": 7, "committed": True}).encode()],
        (),
        (sidecar.Sidecar, type(None)),
    ),
    "an address": Reader(
        lambda text: split(text.decode(errors="replace")), [b"10.0.0.1:29400", b"[::1]:29400"], (ValueError,), tuple
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", READERS)
def test_what_is_strange_is_refused_by_name(name: str) -> None:
    assert plays(READERS, name, 100) == 100


def test_a_pair_of_one_is_refused() -> None:
    """plan() unpacks pairs."""
    with pytest.raises(ProtocolError, match="there are 1 entries, but 2 are needed"):
        from_json(protocol.Rollback, {"step": 1, "skipped": [[1, 2], [3]]})
    assert from_json(protocol.Rollback, {"step": 1, "skipped": [[1, 2, 3]]}).skipped == ((1, 2),), "of a newer side"


def test_a_heartbeat_that_is_never_the_same_twice_is_waited_for_only_so_long(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = iter(range(1000))
    content = lambda path, size: struct.pack("<16sqdd", b"training", next(steps), 99.0, 1.0)  # noqa: E731
    monkeypatch.setattr(heartbeat, "_content", content)
    told = HeartbeatFile(0, "").read(100.0)
    assert told is not None
    assert told.step < 100


@pytest.mark.long(law=f"{HERE}::test_what_is_strange_is_refused_by_name")
@pytest.mark.timeout(1200)
def test_so_are_many_more(request: pytest.FixtureRequest) -> None:
    all_of("protocol", READERS, request)
