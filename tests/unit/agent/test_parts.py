"""Small parts of the agent, each on its own."""

import io
import os
import resource
import zlib

import pytest

import concertina_protocol as protocol
from concertina_agent import main, settings
from concertina_agent.core.round.failures import signal_name
from concertina_agent.files import seen
from concertina_agent.files.shards import commit, committed_shard, fill
from concertina_agent.files.snapshot_files import SnapshotFiles
from concertina_agent.workers import rendezvous_store
from concertina_agent.workers.environment import worker_environment
from concertina_protocol import addresses
from concertina_protocol.sidecar import Damaged


def world(*workers: int) -> protocol.Assign:
    members, rank = [], 0
    for index, count in enumerate(workers):
        members.append(protocol.Member(f"r{index}", f"i{index}", f"10.0.0.{index}:29400", rank, count))
        rank += count
    return protocol.Assign("uid", 4, "c", tuple(members), "10.0.0.0:4711", protocol.Restore("Fresh"))


def test_worker_environment_is_torchruns():
    ours = worker_environment({"HOME": "/root", "RANK": "stale"}, world(2, 3), 1, 2, agent_store=True)
    expected = {
        "HOME": "/root", "RANK": "4", "WORLD_SIZE": "5", "LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "3",
        "GROUP_RANK": "1", "GROUP_WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.0", "MASTER_PORT": "4711",
        "TORCHELASTIC_RESTART_COUNT": "4", "TORCHELASTIC_RUN_ID": "uid", "TORCHELASTIC_USE_AGENT_STORE": "True",
        "OMPI_COMM_WORLD_LOCAL_SIZE": "3", "SLURM_NODEID": "1", "CONCERTINA_ROUND": "4", "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    assert {name: ours[name] for name in expected} == expected
    assert worker_environment({"OMP_NUM_THREADS": "8"}, world(2), 0, 0, False)["OMP_NUM_THREADS"] == "8"
    assert "OMP_NUM_THREADS" not in worker_environment({}, world(1), 0, 0, False)


@pytest.mark.parametrize(
    ("arguments", "ours", "command"),
    [
        (["run", "--bundled"], ["run", "--bundled"], ()),
        (["run", "--", "a", "--", "-b"], ["run"], ("a", "--", "-b")),
        (["run", "--"], ["run"], ()),
    ],
)
def test_what_follows_the_first_dashes_is_the_command_untouched(arguments, ours, command):
    assert main._split(arguments) == (ours, command)


@pytest.mark.parametrize("arguments", [["run"], ["run", "--bundled", "--", "x"], ["run", "--"]])
def test_run_wants_one_of_two(arguments, capsys):
    with pytest.raises(SystemExit):
        main.main(arguments)
    assert "run needs either --bundled, or -- and a command" in capsys.readouterr().err


def test_settings_have_a_sentence_for_nonsense():
    pod = {"CONCERTINA_UID": "u", "CONCERTINA_REPLICA": "r", "CONCERTINA_POD_IP": "::1"}
    assert settings.read(pod, ()).bundled
    assert not settings.read(pod, ()).checkpoints
    assert settings.read({**pod, "CONCERTINA_CHECKPOINT": '{"uri": "s3://b"}'}, ()).checkpoints
    warm = {**pod, "CONCERTINA_WARM_START": '{"enabled": true, "preload": ["torch"]}'}
    assert settings.read(warm, ("python", "a.py")).warm_start
    assert settings.read(warm, ("python", "a.py")).preload == ("torch",)
    assert not settings.read(warm, ()).warm_start
    assert not settings.read(pod, ("python", "a.py")).warm_start, "an operator of the version before asks for none"
    assert not settings.read({**pod, "CONCERTINA_WARM_START": "null"}, ("python", "a.py")).warm_start
    with pytest.raises(settings.AgentSettingsError, match=r"can't be read: .*'four'"):
        settings.read({**pod, "CONCERTINA_WORKERS": "four"}, ())


def test_seen_survives(tmp_path):
    assert seen.read(tmp_path) == (0, "")
    seen.write(tmp_path, 7, "c")
    seen.write(tmp_path, 8, "d")
    assert seen.read(tmp_path) == (8, "d")
    assert os.listdir(tmp_path) == ["seen.json"]


@pytest.mark.parametrize("left", [b"", b"{", b"[]", b'{"round": 7}', b'{"round": "x", "claim": ""}', b"\xff\0"])
def test_what_cant_be_read_of_what_was_seen_is_nothing_seen(tmp_path, left, capsys):
    (tmp_path / "seen.json").write_bytes(left)
    assert seen.read(tmp_path) == (0, "")
    assert "seen_damaged" in capsys.readouterr().err
    seen.write(tmp_path, 7, "c")
    assert seen.read(tmp_path) == (7, "c")


def test_store_addresses():
    with rendezvous_store.bind("127.0.0.1") as bound:
        assert bound.getsockname()[1] > 0
    assert rendezvous_store.reserve("127.0.0.1") in rendezvous_store.PORTS
    assert (addresses.join("::1", 5), addresses.join("1.2.3.4", 5)) == ("[::1]:5", "1.2.3.4:5")


def test_signal_names():
    assert (signal_name(9), signal_name(99)) == ("SIGKILL", "signal 99")


ID = protocol.SnapshotId(2, 5, "layout", 2)


def write(path, data: bytes, checksum: int):
    header = protocol.ShardHeader(ID, 1, len(data), checksum)
    return commit(path, header, [fill(path, header, io.BytesIO(data).readinto)])


def test_a_copy_counts_once_it_is_whole_and_alternates_its_slot(tmp_path):
    snapshots = SnapshotFiles(tmp_path)
    first = snapshots.copy_slot(ID, 1)
    with pytest.raises(Damaged, match="did not arrive completely"):
        write(first, b"abc", 1)
    assert snapshots.scan() == ()
    assert not first.exists(), "what can't be used takes memory"
    write(first, b"abc", 0x352441C2)
    assert snapshots.scan() == (protocol.HeldSnapshot(ID, (1,)),)
    assert snapshots.find(ID, 1).path == first
    assert snapshots.copy_slot(ID, 1) != first
    snapshots.drop([ID])
    assert snapshots.scan() == ()
    assert not first.parent.parent.exists()


def test_a_shard_for_which_there_is_no_room_is_not_there(tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    data = bytes(20 << 20)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20 << 20, hard))
    try:
        write(tmp_path / "fits", data, zlib.crc32(data))
        resource.setrlimit(resource.RLIMIT_FSIZE, (3 << 20, hard))
        with pytest.raises(OSError, match="File too large"):
            write(tmp_path / "large", data, zlib.crc32(data))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert committed_shard(tmp_path / "large") is None


def test_a_shorter_shard_in_the_place_of_a_longer_one_is_whole(tmp_path):
    write(tmp_path / "slot", b"abcdef", zlib.crc32(b"abcdef"))
    write(tmp_path / "slot", b"abc", zlib.crc32(b"abc"))
    assert (tmp_path / "slot").read_bytes() == b"abc"


@pytest.mark.parametrize("mark", ["{", "{}", '{"id": 3}', "[]"])
def test_a_mark_that_cant_be_read_is_no_snapshot(tmp_path, mark):
    snapshots = SnapshotFiles(tmp_path)
    path = snapshots.copy_slot(ID, 1)
    write(path, b"abc", 0x352441C2)
    path.with_suffix(".json").write_text(mark)
    assert snapshots.scan() == ()
