"""Arbitrary input of an agent: from its volume and environment, its workers, other agents and its operator.

The agent accepts or ignores the input, and what it reports afterwards can be encoded.
"""

from __future__ import annotations

import json
import tempfile
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest

import concertina_protocol as p
from builders.agent import NAMES, UID, Driver, assignment, join, prepare, snapshot
from builders.mutated import Reader, all_of, plays
from concertina_agent import settings
from concertina_agent.core import events as e
from concertina_agent.core.machine import REQUESTS
from concertina_agent.files import seen
from concertina_agent.files.shards import Shard
from concertina_agent.files.snapshot_files import SnapshotFiles
from concertina_protocol import ProtocolError
from concertina_protocol import worker_channel as w
from concertina_protocol.sidecar import Damaged

HERE = "tests/unit/agent/test_strange_bytes.py"
VOLUME = Path(tempfile.mkdtemp(prefix="concertina-fuzz-"))
SLOT = VOLUME / "snapshots" / "round-1" / "shard-0" / "slot-0"
SLOT.parent.mkdir(parents=True)
HEADER = b'{"x":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}'
SHARD = len(HEADER).to_bytes(8, "little") + HEADER + bytes(8)
ID = snapshot(1, 5, 1)
SIDECAR = json.dumps({"id": vars(ID), "shard": 0, "size": len(SHARD), "crc32": zlib.crc32(SHARD)}).encode()
ENVIRONMENT = {
    "CONCERTINA_UID": UID, "CONCERTINA_REPLICA": "a", "CONCERTINA_POD_IP": "10.0.0.1", "CONCERTINA_PORT": "29400",
    "CONCERTINA_WORKERS": "2", "CONCERTINA_VOLUME": str(VOLUME), "CONCERTINA_GRACE_SECONDS": "30",
    "CONCERTINA_CHECKPOINT": '{"uri": "s3://b/x"}', "CONCERTINA_METRICS": '{"port": 9400, "token": true}',
}  # fmt: skip
PROGRESS = p.Progress(7, 10, 2.5, 100.0, 0.5, 70, "training", 1000.0, 999.0, 5, 1.0, skipped=((1, 3),), shares=(1, 2))
FAILURE = p.Failure("b", p.FailureReason.LOSS_SPIKE, "it jumped", ("a",), 1, 1, 7, rollback=p.Rollback(3, ((1, 2),)))
SAID = (
    PROGRESS, w.Hello(0, 1), w.Beat(0, 7, "training"), w.Committed(ID, 0, "/x"), w.WantDurable(ID, 0, "/x", True),
    w.Done(w.Outcome.COMPLETE, 10), w.Fault(p.FailureReason.LOSS_SPIKE, "it jumped", p.Rollback(3, ((1, 2),))),
    w.Register(0), w.CallCount(0, 7),
)  # fmt: skip
MEMBER = p.MemberState(
    "b", "b-1", 1, "claim-1", p.State.RUNNING, 7, heartbeats=(p.Heartbeat(1, 7, "computing", 0.5, 1.0),)
)
HEARD = (
    MEMBER, p.MemberState("b", "b-1", 1, "claim-1", p.State.FAILED, 7, FAILURE),
    p.MemberState("b", "b-1", 1, "claim-1", p.State.DRAINING, notice=9.0, durable_parts=(p.Part(ID, 1),), next_call=3),
)  # fmt: skip
TOLD = (
    p.MemberState("a", "a-1", 1, "claim-1", p.State.RUNNING, 7, leaving=("b",), snapshot_step=5, hung=True),
    p.Drain(UID, 1, "claim-1", "grow", True, 30.0), p.StopAt(3), p.DurableMoved(p.Durable(UID, 1, 5, "s3://b/x", True)),
)  # fmt: skip
ASKED = (
    prepare(2), assignment(*NAMES, round=1), p.Drain(UID, 1, "claim-1", "grow", True, 30.0), join("b"), p.Ping(UID),
    p.Save(UID, 1, "claim-1", "now"),
    assignment(*NAMES, restore=p.Restore("Memory", 5, ID, {"0": ("a",)}, skipped=((1, 2),), undone=p.Undone(1, 3))),
)  # fmt: skip


def in_the_volume(path: Path, read: Callable[[], object]) -> Callable[[bytes], object]:
    def of(content: bytes) -> object:
        path.write_bytes(content)
        try:
            return read()
        finally:
            path.unlink()

    return of


def scanned() -> object:
    SLOT.write_bytes(SHARD)
    return SnapshotFiles(VOLUME).scan()


def verified() -> str:
    shard = Shard(SLOT, ID, 0, len(SHARD), zlib.crc32(SHARD))
    shard.verify()
    return shard.tensors_header()


def environment(content: bytes) -> settings.AgentSettings:
    parsed = json.loads(content)
    named = parsed.items() if isinstance(parsed, dict) else ()
    return settings.read({str(name): str(value) for name, value in named if isinstance(value, str | int)}, ())


def says(driver: Driver, effects: list[e.Effect]) -> None:
    """Check that the agent's later reports can be encoded, and that its clock continues."""
    for effect in [*effects, *driver.tell(e.Tick()), *driver.wait(1.0)]:
        if isinstance(effect, e.SendToWorker):
            w.encode(effect.message)
        if isinstance(effect, e.Reply | e.Broadcast):
            p.encode(effect.message)
    p.encode(driver.report)
    p.encode(driver.core.member_state())
    p.encode(driver.core.beat())


def coordinator() -> Driver:
    driver = Driver("a")
    driver.begun(*NAMES)
    driver.ask(join("b"))
    return driver


def of_a_worker(line: bytes) -> object:
    message, driver = w.decode(line), coordinator()
    says(driver, driver.say(message))
    says(driver, driver.ask(p.Drain(UID, 1, "claim-1", "grow", True, 30.0)))
    says(driver, driver.ended(1, "last words"))
    return message


def of_a_member(line: bytes) -> object:
    message, driver = p.decode(line), coordinator()
    if isinstance(message, p.MemberState):
        says(driver, driver.tell(e.MemberMessage(message)))
    return message


def of_the_coordinator(line: bytes) -> object:
    message, driver = p.decode(line), Driver("b")
    driver.begun(*NAMES)
    driver.tell(e.CoordinatorJoined(1, "claim-1"))
    if isinstance(message, (p.Drain, p.StopAt, p.DurableMoved, p.MemberState)):
        says(driver, driver.tell(e.CoordinatorMessage(1, "claim-1", message)))
    return message


def of_the_operator(line: bytes) -> object:
    message, driver = p.decode(line), coordinator()
    if type(message) in REQUESTS:
        says(driver, driver.ask(message))
    return message


READERS = {
    "what was seen": Reader(
        in_the_volume(VOLUME / "seen.json", lambda: seen.read(VOLUME)), [b'{"round": 3, "claim": "c"}'], (), tuple
    ),
    "snapshots in the volume": Reader(
        in_the_volume(SLOT.with_suffix(".json"), scanned), [SIDECAR], (), tuple
    ),
    "a shard": Reader(in_the_volume(SLOT, verified), [SHARD], (Damaged, OSError), str),
    "the environment": Reader(
        environment, [json.dumps(ENVIRONMENT).encode()], (settings.AgentSettingsError, ValueError, RecursionError),
        settings.AgentSettings,
    ),
    "a worker": Reader(of_a_worker, [w.encode(each) for each in SAID], (ProtocolError,)),
    "a member": Reader(of_a_member, [p.encode(each) for each in HEARD], (ProtocolError,)),
    "the coordinator": Reader(of_the_coordinator, [p.encode(each) for each in TOLD], (ProtocolError,)),
    "the operator": Reader(of_the_operator, [p.encode(each) for each in ASKED], (ProtocolError,)),
}  # fmt: skip


@pytest.mark.parametrize("name", READERS)
def test_what_is_strange_is_refused_by_name(name: str) -> None:
    assert plays(READERS, name, 80) == 80


@pytest.mark.long(law=f"{HERE}::test_what_is_strange_is_refused_by_name")
@pytest.mark.timeout(1200)
def test_so_are_many_more(request: pytest.FixtureRequest) -> None:
    all_of("agent", READERS, request)
