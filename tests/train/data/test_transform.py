"""Samples that a user's function transforms: equal in every world and after a restart, refused if they do not fit."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from builders.programs import AUDIO, PROGRAMS
from concertina_state.errors import InvalidInput
from concertina_trainer import cli
from concertina_trainer.config.data_config import DataConfig
from concertina_trainer.data.read.batch import plan_batch
from concertina_trainer.data.read.batches import microbatches
from concertina_trainer.data.read.sequence_reader import Reader
from concertina_trainer.data.read.transforms import TransformEnded, transforms
from concertina_trainer.data.sample import Sample, transformed

LENGTH, BATCH, SEED = 8, 6, 7


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("transform")
    sessions = [np.arange(n * 37, n * 37 + 3 + n * 7 % 23) % 300 for n in range(40)]
    lines = [
        {"item": items.tolist(), "time": (1000 * items).tolist(), "place": [[n, 0.5] for n in items.tolist()]}
        for items in sessions
    ]
    (folder / "a.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    options = ["--tokens", "item", "--vocab-size", "300", "--field", "time=int64", "--field", "place=float32x2"]
    out = str(folder / "data")
    assert cli.main(["data", "build", "--processes", "1", "--out", out, *options, str(folder / "a.jsonl")]) == 0
    assert cli.main(["data", "pack", out, "--length", str(LENGTH)]) == 0
    return out


@pytest.fixture(autouse=True)
def programs(monkeypatch):
    monkeypatch.syspath_prepend(str(PROGRAMS))
    transforms.cache_clear()
    yield
    transforms.cache_clear()


def config(data, name="drawn", documents="Packed"):
    return DataConfig(uri=data, documents=documents, transform=f"transforms:{name}")


def read(reader, world, position):
    """Return what all ranks of a world get in a step, by the position of each sample."""
    plan = plan_batch(BATCH, 2, world)
    parts = [part for rank in range(world) for part in microbatches(reader, plan, rank, position)]
    return {
        sample: (part.tokens[row].tolist(), {name: values[row].tolist() for name, values in part.fields.items()})
        for part in parts
        for row, sample in enumerate(part.samples)
    }


@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    world=st.integers(1, 5), later=st.integers(1, 5), position=st.integers(0, 200),
    documents=st.sampled_from(["Joined", "Masked", "Packed"]),
)  # fmt: skip
def test_transformed_samples_are_the_same_in_every_world_and_after_a_restart(data, world, later, position, documents):
    """Expect of each sample what the function makes of it and of the random numbers of its position."""
    first, second = (Reader(config(data, documents=documents), LENGTH, SEED, [(13, 15)]) for _ in range(2))
    found = read(first, world, position) | read(second, later, position + BATCH)
    numbers = np.arange(position, position + 2 * BATCH)
    plain = Reader(DataConfig(uri=data, documents=documents), LENGTH, SEED, [(13, 15)])
    sequences, places = plain.sequences(numbers), plain.positions(numbers).tolist()
    assert found.keys() == set(places)
    for row, place in enumerate(places):
        random = np.random.Generator(np.random.Philox(key=[SEED, place]))
        time = sequences.fields["time"][row] + random.integers(0, 1000, LENGTH + 1)
        tokens = random.integers(0, 300, LENGTH + 1)
        place_values = random.standard_normal((LENGTH + 1, 2)).astype(np.float32)
        assert found[place] == (tokens.tolist(), {"time": time.tolist(), "place": place_values.tolist()})


def test_rows_of_a_bucket_are_the_beginning_of_the_transformed_sample(data):
    whole = read(Reader(config(data, documents="Bucketed"), LENGTH, SEED), 1, 0)
    again = read(Reader(config(data, documents="Bucketed"), LENGTH, SEED), 3, 0)
    assert whole == again
    for place, (tokens, _) in whole.items():
        random = np.random.Generator(np.random.Philox(key=[SEED, place]))
        random.integers(0, 1000, LENGTH + 1)
        assert tokens == random.integers(0, 300, LENGTH + 1).tolist()[: len(tokens)]


def test_the_samples_of_all_microbatches_of_a_step_are_divided_among_the_processes(data, monkeypatch):
    """Use microbatches of one row: a request for each microbatch would leave all processes but one idle."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: range(3))
    reader = Reader(config(data, "process"), LENGTH, SEED)
    parts = microbatches(reader, plan_batch(BATCH, 1, 1), 0, 0)
    assert len(parts) == BATCH
    assert len({int(part.fields["time"][0, 0]) for part in parts}) == 3


def test_a_program_that_a_transform_starts_does_not_read_the_samples(data):
    assert len(read(Reader(config(data, "starts_cat"), LENGTH, SEED), 1, 0)) == BATCH


def test_an_evaluation_has_no_random_numbers(data):
    found = read(Reader(config(data), LENGTH, SEED, evaluates=True), 2, 0)
    assert {token for tokens, _ in found.values() for token in tokens} == {299}


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("fails", "drawn for sample 0: it raised KeyError: 'no 9'"),
        ("nothing", "it returned a NoneType, and it must return the Sample"),
        ("shorter", r"it returned tokens as int64 \[8\], and it must be int64 \[9\]"),
        ("floats", r"it returned fields.time as float64 \[9\], and it must be int64 \[9\]"),
        ("without_time", "it returned the fields tokens, fields.place, and they must be tokens, fields.time"),
        ("infinite", "it returned values of fields.place that are not finite"),
        ("without_fields", "it returned a Sample whose fields are a NoneType, and not a dict"),
        ("unsigned", r"it returned fields.time as uint64 \[9\], and it must be int64 \[9\]"),
        ("beyond", r"it returned tokens from \d+ to \d+, and they must be from 0 to 299"),
        ("missing", r"can't be used, because it can't be imported \(AttributeError"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_sample(data, name, said):
    reader = Reader(config(data, name), LENGTH, SEED)
    with pytest.raises(InvalidInput, match=said.replace("drawn for", "can't be used for")) as refused:
        read(reader, 1, 0)
    assert str(refused.value).startswith(f"trainer.data.transform transforms:{name} can't be used")


def test_a_process_that_ends_is_reported_and_started_again(data):
    reader = Reader(config(data, "dies"), LENGTH, SEED)
    with pytest.raises(TransformEnded, match=r"a process of trainer.data.transform transforms:dies ended with exit st"):
        read(reader, 1, 0)
    reader = Reader(config(data), LENGTH, SEED)
    (process, *_) = started(reader)
    process.kill()
    with pytest.raises(TransformEnded, match="exit status -9"):
        read(reader, 1, 0)
    assert len(read(reader, 1, 0)) == BATCH


def started(reader):
    read(reader, 1, 0)
    return transforms("transforms:drawn")._processes


def test_processes_end_with_the_worker_that_started_them(data):
    program = (
        "import os, sys; sys.path.insert(0, sys.argv[1])\n"
        "from concertina_trainer.data.read.transforms import transforms\n"
        "made = transforms('transforms:drawn'); made._start()\n"
        "print(*[process.pid for process in made._processes], flush=True); os._exit(0)"
    )
    done = subprocess.run([sys.executable, "-c", program, str(PROGRAMS)], capture_output=True, text=True, check=True)
    assert done.stdout.split()
    # Both ends of the pipes are closed when `run` returns, because it waits for the end of the processes' output.


def test_the_example_changes_loudness_and_nothing_in_an_evaluation(monkeypatch):
    monkeypatch.syspath_prepend(str(AUDIO))
    from audio_augment import louder

    features = np.random.default_rng(0).normal(size=(9, 20)).astype(np.float16)

    def sample():
        return Sample(np.zeros(9, np.int64), {"features": features.copy()}, 5)

    first, again, other = (transformed(louder, sample(), seed, 8).fields["features"] for seed in (1, 1, 2))
    assert first.dtype == np.float16
    assert (first == again).all()
    assert not (first == other).all()
    assert 0.75 < float(np.abs(first).sum() / np.abs(features).sum()) < 1.3
    assert (transformed(louder, sample(), None, 8).fields["features"] == features).all()
