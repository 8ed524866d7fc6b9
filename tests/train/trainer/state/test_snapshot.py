"""Snapshots in node memory: what stands under a mark is whole, whatever happens while the next is written."""

import json
import os
import resource
import signal
import sys
import time
import zlib
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from builders.train import node
from builders.until import until
from concertina_protocol import JobHistory
from concertina_protocol.sidecar import read_sidecar
from concertina_protocol.worker_channel import Outcome
from concertina_state.errors import InvalidInput, RestoreFailed
from concertina_state.file_space import Spare
from concertina_state.format.shardfile import header_length, parse_header
from concertina_state.interval import Interval
from concertina_state.saving import SaveDecision, SavePolicy, Saving
from concertina_state.snapshots import MappedShard, Snapshots, TakenSnapshot
from programs.endless import State


def held(path):
    """Return the step of a slot, after a check that its mark, its header and all its values agree."""
    mark = json.loads(path.with_suffix(".json").read_text())
    content = path.read_bytes()
    assert (mark["size"], mark["crc32"]) == (len(content), zlib.crc32(content))
    begin = header_length(content[:8])
    step = parse_header(content[8:begin]).metadata.id.step
    assert step == mark["id"]["step"]
    assert (torch.frombuffer(bytearray(content[begin:]), dtype=torch.float32) == step).all()
    return step


def steps_in(folder):
    return {held(mark.with_suffix("")) for mark in folder.glob("slot-*.json")}


@settings(max_examples=50, deadline=None)
@given(lags=st.lists(st.sampled_from([0, 1, None]), min_size=1, max_size=25))
def test_the_newest_complete_and_the_newest_committed_are_never_overwritten(lags, tmp_path_factory):
    """Peers have the last one, the one before it, or nothing new; as in a drain that can't wait for them."""
    folder = tmp_path_factory.mktemp("slots")
    state = State(10)
    snapshots = Snapshots(folder, state)
    for step, lag in enumerate(lags):
        if lag is not None:
            snapshots.complete = max(snapshots.complete, snapshots.count - 1 - lag)
        complete, newest = snapshots.step_of(snapshots.complete), snapshots.step_of(snapshots.count - 1)
        snapshots.take(state.at(step))
        assert {step, newest, complete} - {None} <= steps_in(folder)


def test_the_slots_go_round_and_keep_up_means_the_last_but_one_is_complete(tmp_path):
    state = State(10)
    snapshots = Snapshots(tmp_path, state)
    names = []
    for step in range(6):
        snapshots.complete = step - 2
        assert snapshots.keeping_up
        names.append(snapshots.take(state.at(step)).path.name)
    assert names == ["slot-0", "slot-1", "slot-2"] * 2
    assert not snapshots.keeping_up
    snapshots.complete = 4
    assert snapshots.keeping_up


def resident(path):
    """Bytes of this process's mapping of a file that are in memory and mapped."""
    within, kilobytes, inode = False, 0, str(path.stat().st_ino)
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.partition(" ")[0]:
            within = line.split()[4] == inode
        elif within and line.startswith("Rss:"):
            kilobytes += int(line.split()[1])
    return 1024 * kilobytes


@pytest.mark.parametrize("ahead", [False, True])
def test_a_slot_has_all_its_pages_before_the_first_snapshot_is_copied(folder, ahead):
    state = State(5_000_000)
    slot = MappedShard(folder / "slot-0", state, Spare(folder, state.layout.size) if ahead else None)
    assert slot.path.stat().st_blocks * 512 >= state.layout.size, "allocated"
    assert resident(slot.path) >= state.layout.size, "and mapped: the copy takes no page faults"


def nameless(folder):
    """Inodes of the files there that this process has mapped and that have no name."""
    named = {path.stat().st_ino for path in folder.iterdir()}
    maps = Path("/proc/self/maps").read_text().splitlines()
    return {int(line.split()[4]) for line in maps if f" {folder}/#" in line} - named


def made(folder):
    """Return the file that was created in advance."""
    give_up = time.monotonic() + node.GIVE_UP
    while not (found := nameless(folder)):
        assert time.monotonic() < give_up
        time.sleep(0.01)
    assert not list(folder.glob("*.new")), "its memory goes with the process"
    (inode,) = found
    return inode


def taken_next(snapshots, state):
    """Its inode; peers have all before it."""
    snapshots.complete = snapshots.count - 1
    return snapshots.take(state.at(snapshots.count)).path.stat().st_ino


def test_a_snapshot_goes_into_the_file_that_was_made_ahead(folder):
    state = State(500_000)
    snapshots = Snapshots(folder, state)
    for _ in range(3):
        inode = made(folder)
        assert taken_next(snapshots, state) == inode
        snapshots.make_room()
    taken_next(snapshots, state)
    assert nameless(folder) == set(), "all slots have their files"
    assert steps_in(folder) == {1, 2, 3}


def test_a_file_is_made_ahead_for_one_that_is_on_its_way_to_storage(folder):
    state = State(500_000)
    snapshots = Snapshots(folder, state)
    link = snapshots.link_for_shipping(snapshots.take(state.at(0)))
    before = link.read_bytes()
    for _ in range(2):
        taken_next(snapshots, state)
    assert nameless(folder) == set()
    snapshots.make_room()
    inode = made(folder)
    assert steps_in(folder) == {0, 1, 2}, "until then the one that was shipped is there"
    assert taken_next(snapshots, state) == inode != link.stat().st_ino
    assert link.read_bytes() == before


def test_one_file_ahead_is_enough(folder):
    """It was made for a slot that is not on its way to storage any more: the next one that is will have it."""
    state = State(500_000)
    snapshots = Snapshots(folder, state)
    link = snapshots.link_for_shipping(snapshots.take(state.at(0)))
    for _ in range(2):
        taken_next(snapshots, state)
    snapshots.make_room()
    inode = made(folder)
    link.unlink()
    assert taken_next(snapshots, state) != inode
    snapshots.link_for_shipping(TakenSnapshot(state.at(1).id, folder / "slot-1"))
    snapshots.make_room()
    assert taken_next(snapshots, state) == inode
    assert nameless(folder) == set()


def test_what_was_made_ahead_goes_where_sizes_change_and_with_the_round(folder):
    small, large = State(500_000), State(800_000)
    snapshots = Snapshots(folder, small)
    inode = made(folder)
    snapshots.of_arrays(State(500_000))
    assert nameless(folder) == {inode}
    snapshots.of_arrays(large)
    assert nameless(folder) == set()
    snapshots.make_room()
    inode = made(folder)
    assert taken_next(snapshots, large) == inode
    assert {path.stat().st_size for path in folder.glob("slot-?")} == {large.layout.size}
    snapshots.make_room()
    made(folder)
    del snapshots
    until(lambda: nameless(folder) == set(), "the end of a file that may be still in the making", pause=0.01)


@pytest.mark.parametrize("outcome", [None, Outcome.DRAINED])
def test_no_file_is_made_ahead_for_a_snapshot_that_will_not_come(folder, outcome):
    """The process would end only after it."""
    state = State(500_000)
    snapshots = Snapshots(folder, state)
    policy, interval = SavePolicy(9, 1, False, None), Interval(None, JobHistory())
    saving = Saving(policy, snapshots, state.at(0), None, interval, Silent())
    saving.save(SaveDecision(1, True, False, outcome), 1)
    snapshots.finish()
    assert (snapshots._making is None) == (outcome is not None)


@pytest.mark.parametrize(
    ("decision", "threads"),
    [
        (SaveDecision(1, snapshot=True, durable=False, outcome=None), 1),
        (SaveDecision(1, snapshot=True, durable=True, outcome=None), 3),
        (SaveDecision(1, snapshot=True, durable=False, outcome=Outcome.DRAINED), 3),
    ],
)
def test_several_threads_sum_what_is_waited_for(tmp_path, monkeypatch, decision, threads):
    """Beside training there is one."""
    parts, crc32 = [], zlib.crc32
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1, 2})
    monkeypatch.setattr(zlib, "crc32", lambda *arguments: (parts.append(arguments), crc32(*arguments))[1])
    state = State(2 << 20)
    snapshots = Snapshots(tmp_path, state)
    policy, interval = SavePolicy(9, 1, True, None), Interval(None, JobHistory())
    saving = Saving(policy, snapshots, state.at(0), None, interval, Silent())
    saving.save(decision, 1)
    snapshots.finish()
    assert len(parts) == threads
    mark = read_sidecar(tmp_path / "slot-0")
    assert mark is not None
    assert mark.crc32 == crc32((tmp_path / "slot-0").read_bytes())


class Silent:
    """An agent that is told."""

    def send(self, message):
        pass

    def poll(self):
        return ()


def test_killed_at_any_moment_a_mark_never_lies(folder, parent):
    """A process writes without a pause and is killed 25 times, most often in the middle of a slot."""
    for i in range(25):
        slots = folder / str(i)
        pid = parent.fork("endless:main", {"CONCERTINA_SNAPSHOTS": str(slots)}, sys.stderr.fileno())
        give_up = time.monotonic() + node.GIVE_UP
        written: set[str] = set()
        while len(written) < 3:
            written |= {mark.name for mark in slots.glob("slot-?.json")}
            assert time.monotonic() < give_up
        time.sleep(0.001 * i)
        os.kill(pid, signal.SIGKILL)
        parent.wait(pid)
        steps = sorted(steps_in(slots))
        assert len(steps) >= 2
        assert steps[-1] - steps[-2] <= 2


def test_a_part_on_its_way_to_storage_stays_as_it_is(tmp_path):
    state = State()
    snapshots = Snapshots(tmp_path, state)
    link = snapshots.link_for_shipping(snapshots.take(state.at(0)))
    assert snapshots.shipping
    before = link.read_bytes()
    for step in range(1, 8):
        snapshots.complete = step - 2
        snapshots.take(state.at(step))
    assert link.read_bytes() == before
    assert steps_in(tmp_path) == {5, 6, 7}
    link.unlink()
    assert not snapshots.shipping


@pytest.mark.parametrize(
    ("other", "error", "sentence"),
    [
        ("", InvalidInput, "too small for three snapshots and the copy of a peer's snapshot"),
        ("snapshots/round-1/shard-0", RestoreFailed, "because the snapshots of the previous round are still needed"),
        ("copies/round-1/shard-3", RestoreFailed, "because the snapshots of the previous round are still needed"),
    ],
)
def test_no_room_is_said_before_a_byte_is_written(tmp_path, other, error, sentence):
    """Whether it is for good or for a smaller state, storage makes the shard files of the round before void."""
    (tmp_path / other).mkdir(parents=True, exist_ok=True)
    folder, state = tmp_path / "snapshots" / "round-2" / "shard-0", State(1_000_000)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    try:
        with pytest.raises(error, match=f"no room for a snapshot of 8 MiB in .*{sentence}"):
            Snapshots(folder, state).take(state.at(0))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list(folder.iterdir()) == []
