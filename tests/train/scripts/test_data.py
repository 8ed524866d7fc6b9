"""`trainingjob.data` in one process: the bundled trainer's order, shared out to any world, from folders and stores."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import trainingjob
from builders.programs import SEARCH_PATH
from builders.stores.hostile import proxy
from concertina_data.data_manifest import FORMAT, NAME, DataManifest, TokenizerFacts, token_field
from concertina_protocol.sidecar import read_sidecar
from concertina_state.errors import InvalidInput
from concertina_state.objects.prefix import ObjectPrefix
from concertina_state.saved import LocalShard
from concertina_trainer.config.data_config import DataConfig
from concertina_trainer.data.build.draft import Draft
from concertina_trainer.data.read.sequence_reader import Reader
from trainingjob import _connection

LENGTH = 24


def write(uri: str, token_bytes: int, shards: int = 20, least: int = 400) -> str:
    """Random tokens, the highest ones among them."""
    generator = np.random.default_rng(token_bytes)
    folder, written = ObjectPrefix(uri, create=True), []
    for index in range(shards):
        tokens = generator.integers(0, 2 ** (8 * token_bytes), least + 31 * index, dtype=np.uint64)
        draft = Draft()
        draft.documents = [part.astype(f"<u{token_bytes}").tobytes() for part in np.array_split(tokens, 5)]
        written += draft.put(folder, f"shard-{index:06}", token_bytes)
    facts = TokenizerFacts("random", "random", 0)
    size = 2 ** (8 * token_bytes)
    folder.put(NAME, DataManifest(FORMAT, size, facts, (token_field(size),), tuple(written)).to_json())
    return uri


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[int, str]:
    folder = tmp_path_factory.mktemp("tokens")
    return {size: write(str(folder / str(size)), size) for size in (1, 2, 4)}


def batches(uri: str, seed: int, *sizes: int, groups: int = 16, start: int = 0) -> np.ndarray:
    """Return batches of these sizes as the bundled trainer reads them, in the order in which ranks share them."""
    reader, rows = Reader(DataConfig(uri=uri, groups=groups), LENGTH, seed), []
    for size in sizes:
        rows.append(reader.sequences(reader.batch(start, size)).tokens)
        start += size
    return np.concatenate(rows)


@settings(max_examples=25, deadline=None)
@given(
    token_bytes=st.sampled_from([1, 2, 4]), seed=st.integers(0, 2**31 - 1), size=st.integers(1, 5),
    spare=st.integers(0, 9), consumed=st.integers(0, 2000), groups=st.sampled_from([1, 3, 16]),
)  # fmt: skip
def test_any_world_reads_the_batches_of_the_bundled_trainer(folders, token_bytes, seed, size, spare, consumed, groups):
    uri, batch, steps = folders[token_bytes], size + spare, 3
    expected = batches(uri, seed, *[batch] * steps, groups=groups, start=consumed)
    settings = {"length": LENGTH, "batch": batch, "seed": seed, "groups": groups, "size": size}
    ranks = [trainingjob.data(uri, rank=rank, **settings) for rank in range(size)]
    found, mean = [], 0.0
    for data in ranks:
        data.load_state_dict({**data.state_dict(), "samples": consumed})
    for _ in range(steps):
        rows = [next(data) for data in ranks]
        assert {len(each) for each in rows} <= {batch // size, batch // size + 1}
        found += rows
        means = [each.double().mean() * data.weight for each, data in zip(rows, ranks, strict=True)]
        mean += float(sum(means)) / size / steps
    assert torch.equal(torch.cat(found), torch.from_numpy(expected))
    assert mean == pytest.approx(expected.mean()), "weighted, the mean over ranks is the mean over the batch"
    assert {data.samples for data in ranks} == {consumed + steps * batch}


def test_another_batch_goes_on_behind_what_was_consumed(folders):
    first = trainingjob.data(folders[2], length=LENGTH, batch=7)
    rows = [next(first) for _ in range(3)]
    second = trainingjob.data(folders[2], length=LENGTH, batch=4)
    next(second)  # what was read ahead counts for nothing
    second.load_state_dict(first.state_dict())
    rows += [next(second) for _ in range(3)]
    expected = batches(folders[2], 0, 7, 7, 7, 4, 4, 4)
    assert torch.equal(torch.cat(rows), torch.from_numpy(expected))
    assert second.samples == 33


@pytest.mark.parametrize(
    ("token_bytes", "changed", "sentence"),
    [
        (1, {}, "read its data with the digest of data"),
        (2, {"seed": 9}, "read its data with the seed 0, but .* is now opened with the seed 9"),
        (2, {"groups": 8}, "read its data with the groups 16, but .* is now opened with the groups 8"),
        (2, {"length": 12}, "read its data with the length 24, but .* is now opened with the length 12"),
    ],
)
def test_a_state_of_other_sequences_is_refused(folders, token_bytes, changed, sentence):
    state = trainingjob.data(folders[2], length=LENGTH, batch=4).state_dict()
    other = trainingjob.data(folders[token_bytes], batch=4, **{"length": LENGTH, **changed})
    with pytest.raises(InvalidInput, match=sentence):
        other.load_state_dict(state)


def test_a_snapshot_says_of_which_data_and_how_many(folders, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = torch.nn.Linear(1, 1)
    data = trainingjob.data(folders[2], length=LENGTH, batch=4)
    state = trainingjob.State(model=model, data=data)
    next(data)
    next(data)
    state.commit(0, durable=True)
    [mark] = tmp_path.glob("checkpoints/round-1/shard-0/slot-?.json")
    slot = mark.with_suffix("")
    said = LocalShard(slot, read_sidecar(slot).id).header.metadata
    assert (said.position, said.data) == (8, data.digest)
    del state  # as if its process had ended
    again = trainingjob.data(folders[2], length=LENGTH, batch=4)
    assert trainingjob.State(model=model, data=again).restore() == 1
    assert again.samples == 8
    assert torch.equal(next(again), next(data))
    other = trainingjob.data(folders[2], length=LENGTH, batch=4, seed=1)
    with pytest.raises(InvalidInput, match="is now opened with the seed 1"):
        trainingjob.State(model=model, data=other).restore()


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"uri": "/nowhere"}, "/nowhere does not exist: build the data there"),
        ({"uri": os.path.dirname(__file__)}, "has no manifest.json: build the data there"),
        ({"uri": "ftp://host/data"}, "ftp://host/data can't be used: its scheme must be"),
        ({"length": 10**6}, "as many tokens as one sequence"),
        ({"batch": 4, "size": 5}, "a batch of 4 sequences is too small for 5 ranks"),
        ({"rank": 2, "size": 2}, "there is no rank 2 among 2 ranks"),
    ],
)
def test_what_can_not_be_read_is_said(folders, changed, sentence):
    with pytest.raises(InvalidInput, match=sentence):
        trainingjob.data(**{"uri": folders[2], "length": LENGTH, "batch": 8, **changed})


def test_a_damaged_shard_is_named_and_read_once_it_is_whole(tmp_path):
    uri = write(str(tmp_path), 2, shards=1)
    [shard] = tmp_path.glob("*.bin")
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-1] + b"?")
    data = trainingjob.data(uri, length=LENGTH, batch=4)
    for _ in range(2):
        with pytest.raises(InvalidInput, match=f"{shard.name} is damaged: the manifest says"):
            next(data)
    # Not written over: a thread that still checks its mapping would die of SIGBUS when the file is cut short.
    (tmp_path / "again").write_bytes(whole)
    (tmp_path / "again").replace(shard)
    assert torch.equal(next(data), torch.from_numpy(Reader(DataConfig(uri=uri), LENGTH, 0).read(0, 4)))


def test_it_reads_ahead_and_no_further(folders, monkeypatch):
    read, enough = [], threading.Event()
    data = trainingjob.data(folders[2], length=LENGTH, batch=4)
    rows = data._sequences.rows

    def counted(positions: list[int]) -> torch.Tensor:
        read.append(min(positions))
        if len(read) == 4:
            enough.set()
        return rows(positions)

    monkeypatch.setattr(data._sequences, "rows", counted)
    next(data)
    assert not enough.wait(0.2)
    next(data)
    assert enough.wait(60)
    assert read == [0, 4, 8, 12]


def test_from_a_store_through_a_bounded_cache(s3, tmp_path, data_cache):
    uri = write(f"s3://train/{tmp_path.name}", 4)
    data = trainingjob.data(uri, length=LENGTH, batch=50, seed=5)
    found = torch.cat([next(data) for _ in range(12)])
    assert torch.equal(found, torch.from_numpy(batches(uri, 5, *[50] * 12)))
    assert list(data_cache.glob("*.data"))


def test_a_store_that_is_away_is_waited_for_and_the_job_is_told(s3, tmp_path, data_cache, monkeypatch, capsys):
    uri = write(f"s3://train/{tmp_path.name}", 2)
    expected = torch.from_numpy(Reader(DataConfig(uri=uri), LENGTH, 0).read(0, 4))
    for path in data_cache.iterdir():
        path.unlink()
    told = []

    class Channel:
        """The channel itself is tested in tests/unit/agent."""

        def report_stall(self, reason: str, seconds: float) -> None:
            told.append((reason, seconds))
            store.faults.clear()

        def add_stall(self, seconds: float) -> None:
            told.append(("", seconds))

    with proxy(s3.endpoint) as store:
        monkeypatch.setenv("AWS_ENDPOINT_URL", store.url)
        monkeypatch.setattr(_connection, "agent_channel", Channel)
        data = trainingjob.data(uri, length=LENGTH, batch=4)
        store.faults += [("GET", ".bin", "503")] * 100_000
        assert torch.equal(next(data), expected)
    reason, seconds = told[0]
    assert reason.startswith("Could not read shard-0000")
    assert told[-1][0] == ""
    assert 0 < seconds <= told[-1][1]
    assert capsys.readouterr().err.count("trainingjob: waiting for data: Could not read shard") == 1


BARE = """
import sys
sys.modules.update(dict.fromkeys(["numpy", "obstore", "pydantic", *sys.argv[2:]]))
import trainingjob
data = trainingjob.data(sys.argv[1], length=24, batch=5, seed=1)
print([row[0] for step in range(9) for row in next(data).tolist()])
"""


@pytest.mark.parametrize(("token_bytes", "lacking"), [(4, []), (1, ["torch"]), (2, ["torch"]), (4, ["torch"])])
def test_data_in_a_folder_need_no_other_package(folders, token_bytes, lacking):
    uri = folders[token_bytes]
    expected = batches(uri, 1, *[5] * 9)[:, 0].tolist()
    assert printed(BARE, uri, *lacking) == expected


THREADS = """
import os, sys, torch, trainingjob
torch.set_num_threads(4)
data = trainingjob.data(sys.argv[1], length=100_000, batch=8, seed=1)
before = len(os.listdir("/proc/self/task"))
for step in range(4):
    next(data)
print([len(os.listdir("/proc/self/task")) - before])
"""


def test_reading_takes_no_threads_of_torchs_own(tmp_path):
    assert printed(THREADS, write(str(tmp_path / "long"), 2, shards=1, least=500_000)) == [0]


ENDS = """
import sys, trainingjob
data = trainingjob.data(sys.argv[1], length=24, batch=5, seed=1)
print([row[0] for row in next(data).tolist()])
"""


def test_a_script_may_end_while_shards_are_fetched(s3, tmp_path, monkeypatch):
    uri = write(f"s3://train/{tmp_path.name}", 2, shards=60)
    expected = Reader(DataConfig(uri=uri), LENGTH, 1).read(0, 5)[:, 0].tolist()
    monkeypatch.setenv("CONCERTINA_CACHE", str(tmp_path / "empty"))  # this reader still fetches into its own
    assert printed(ENDS, uri) == expected


def printed(script: str, *arguments: str) -> list[int]:
    known = {name: value for name, value in os.environ.items() if name.startswith(("AWS_", "CONCERTINA_CACHE"))}
    done = subprocess.run(
        [sys.executable, "-W", "ignore:Failed to initialize NumPy", "-c", script, *arguments],
        env={"PATH": os.environ["PATH"], "PYTHONPATH": SEARCH_PATH, "HOME": str(Path.cwd()), **known},
        capture_output=True, text=True,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    return [int(number) for number in done.stdout.strip("[]\n").split(",")]
