"""Elements of several fields: ids with times, vectors and weights, built from every kind of source and read exactly."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from builders.train.record_files import archive, example, npy, records
from concertina_data.data_manifest import NUMBER_BYTES, parse
from concertina_state.errors import InvalidInput
from concertina_trainer import cli
from concertina_trainer.config.data_config import DataConfig
from concertina_trainer.data.read.batch import plan_batch
from concertina_trainer.data.read.batches import microbatches
from concertina_trainer.data.read.sequence_reader import Reader

LENGTH, ITEMS, BATCH = 8, 300, 6
FIELDS = ("--tokens", "item", "--vocab-size", str(ITEMS), "--field", "time=int64", "--field", "place=float32x2",
          "--field", "weight=uint8")  # fmt: skip


def session(number):
    """Return the events of a session. Time, place and weight of an event follow from its item."""
    items = (number * 37 + np.arange(3 + number * 7 % 23)) % ITEMS
    return {
        "item": items, "time": 10**15 + items, "place": np.stack([items, -items], 1) / 4, "weight": items % 3,
    }  # fmt: skip


SESSIONS = [session(number) for number in range(40)]


def lists(sample):
    return {name: values.tolist() for name, values in sample.items()}


def table():
    return pa.table({name: [lists(sample)[name] for sample in SESSIONS] for name in SESSIONS[0]})


def arrow(folder):
    with pa.ipc.new_file(folder / "a.feather", table().schema) as writer:
        writer.write_table(table(), max_chunksize=7)


def typed_parquet(folder):
    types = {"item": pa.list_(pa.uint16()), "time": pa.large_list(pa.int64()), "weight": pa.list_(pa.int8())}
    types["place"] = pa.list_(pa.list_(pa.float32(), 2))
    columns = {name: table()[name].cast(kind) for name, kind in types.items()}
    parquet.write_table(pa.table(columns), folder / "a.parquet", row_group_size=9)


def arrays(folder):
    for number, sample in enumerate(SESSIONS):
        np.savez(folder / f"{number:03}.npz", **sample)


def members():
    return [(f"{n:03}.{name}.npy", npy(values)) for n, each in enumerate(SESSIONS) for name, values in each.items()]


def examples():
    return records([example({**lists(each), "place": each["place"]}) for each in SESSIONS])


FORMS = {
    "jsonl": lambda folder: (folder / "a.jsonl").write_text("".join(json.dumps(lists(s)) + "\n\n" for s in SESSIONS)),
    "parquet": typed_parquet,
    "arrow": arrow,
    "npz": arrays,
    "tar": lambda folder: (folder / "a.tar").write_bytes(archive(members())),
    "tfrecord": lambda folder: (folder / "a.tfrecord").write_bytes(examples()),
}


def built(folder, form, *options):
    (folder / form).mkdir(parents=True)
    FORMS[form](folder / form)
    out = folder / f"{form}-data"
    size = ["--shard-mebibytes", "0.002", "--processes", "1"]
    assert cli.main(["data", "build", "--out", str(out), *size, *FIELDS, *options, str(folder / form)]) == 0
    for length in (LENGTH,):
        assert cli.main(["data", "pack", str(out), "--length", str(length)]) == 0
    return out


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return built(tmp_path_factory.mktemp("fields"), "jsonl")


def content(out):
    manifest = parse((out / "manifest.json").read_bytes(), "")
    return b"".join((out / shard.file).read_bytes() for shard in manifest.shards)


@pytest.mark.parametrize("form", list(FORMS)[1:])
def test_every_kind_of_source_gives_the_same_elements(tmp_path, data, form):
    out = built(tmp_path, form)
    assert content(out) == content(data)
    assert cli.main(["data", "verify", str(out)]) == 0


def test_elements_are_those_of_the_documents(data):
    kinds = [("token", "<u2"), ("time", "<i8"), ("place", "<f4", 2), ("weight", "u1")]
    elements = np.frombuffer(content(data), np.dtype(kinds))
    for name, column in (("token", "item"), ("time", "time"), ("place", "place"), ("weight", "weight")):
        assert (elements[name] == np.concatenate([sample[column] for sample in SESSIONS])).all()


def read(uri, world, position, documents, steps=2):
    """Return what all ranks of a world compute in some steps, by the position of each sample."""
    found = {}
    for step in range(steps):
        start, ranks = position + step * BATCH, range(world)
        readers = [Reader(DataConfig(uri=uri, documents=documents), LENGTH, 7) for _ in ranks]
        plan = plan_batch(BATCH, 2, world)
        parts = [microbatches(readers[rank], plan, rank, start) for rank in ranks]
        for part in (part for rank in parts for part in rank):
            for row, sample in enumerate(part.samples):
                assert sample not in found
                values = {name: values[row].numpy() for name, values in part.fields.items()}
                found[sample] = (part.tokens[row].numpy(), values, part.weights[row].numpy())
    return found


def check(sample):
    """Check that each element has the time and place of its item, unless it is padding."""
    tokens, values, _ = sample
    there = values["time"] > 0
    assert (values["time"][there] == 10**15 + tokens[there]).all()
    assert (values["place"][there] == np.stack([tokens, -tokens], 1)[there] / 4).all()
    assert not tokens[~there].any()


@settings(max_examples=6, deadline=None)
@given(
    world=st.integers(1, 5), later=st.integers(1, 5), position=st.integers(0, 200),
    documents=st.sampled_from(["Masked", "Packed", "Bucketed"]),
)  # fmt: skip
def test_all_fields_are_the_same_in_every_world_and_after_a_restart(data, world, later, position, documents):
    """The world changes after the first step."""
    whole = read(str(data), 1, position, documents)
    changed = read(str(data), world, position, documents, 1) | read(str(data), later, position + BATCH, documents, 1)
    assert changed.keys() == whole.keys() == set(range(position, position + 2 * BATCH))
    for number, (tokens, values, weights) in whole.items():
        assert (tokens == changed[number][0]).all()
        assert all((values[name] == changed[number][1][name]).all() for name in values)
        assert (weights == changed[number][2]).all()
        check(whole[number])


VALUES = {
    "uint8": lambda items: 1 + items % 251,
    "uint16": lambda items: items * 200,
    "uint32": lambda items: items * 10**7,
    "int64": lambda items: 10**15 + items,
    "float16": lambda items: items / 4,
    "float32": lambda items: items / 1024,
    "float64": lambda items: items + 1 / 3,
}
"""Value of an item in a field of each type. Those of 8 bytes don't fit in 4."""


def expected(name, items):
    """Return the values of the items in a field. A vector has the value of the next item too."""
    value = VALUES[name.removesuffix("s")]
    return np.stack([value(items), value(items + 1)], -1) if name.endswith("s") else value(items)


@pytest.fixture(scope="module")
def every_type(tmp_path_factory):
    """Return data without weights, with ids and with a number and a vector of every type."""
    folder = tmp_path_factory.mktemp("every-type")
    names = [name + suffix for name in VALUES for suffix in ("", "s")]
    sessions = [{"item": each["item"]} | {name: expected(name, each["item"]) for name in names} for each in SESSIONS]
    (folder / "a.jsonl").write_text("".join(json.dumps(lists(each)) + "\n" for each in sessions))
    fields = [f"--field={name}={name.removesuffix('s')}{'x2' * name.endswith('s')}" for name in names]
    options = ["--tokens", "item", "--vocab-size", str(ITEMS), *fields, "--shard-mebibytes", "0.004"]
    out = folder / "data"
    assert cli.main(["data", "build", "--processes", "1", "--out", str(out), *options, str(folder / "a.jsonl")]) == 0
    assert cli.main(["data", "pack", str(out), "--length", str(LENGTH)]) == 0
    return out


def same_in_every_world(data, documents, world, later, position):
    """Check the batches of a world that changes after the first step, and their ids and fields against the source."""
    assert VALUES.keys() == NUMBER_BYTES.keys()
    uri = str(data)
    whole = read(uri, 1, position, documents)
    changed = read(uri, world, position, documents, 1) | read(uri, later, position + BATCH, documents, 1)
    assert changed.keys() == whole.keys() == set(range(position, position + 2 * BATCH))
    for number, (tokens, values, weights) in whole.items():
        assert (tokens == changed[number][0]).all()
        assert (weights == changed[number][2]).all()
        there = values["int64"] > 0
        assert there.all() or documents != "Joined"
        assert len(values) == 2 * len(VALUES)
        for name, found in values.items():
            assert (found == changed[number][1][name]).all()
            assert (found[there] == expected(name, tokens)[there]).all(), name
            assert not found[~there].any()


def test_every_type_of_field_is_the_same_in_another_world(every_type):
    same_in_every_world(every_type, "Joined", 3, 2, 40)


ORDER = "tests/train/data/test_fields.py::test_every_type_of_field_is_the_same_in_another_world"


@pytest.mark.long(law=ORDER)
@pytest.mark.parametrize("documents", ["Joined", "Masked", "Packed", "Bucketed"])
@settings(max_examples=12, deadline=None)
@given(world=st.integers(1, 5), later=st.integers(1, 5), position=st.integers(0, 200))
def test_every_type_of_field_is_the_same_in_every_world(every_type, documents, world, later, position):
    same_in_every_world(every_type, documents, world, later, position)


@pytest.mark.parametrize("documents", ["Masked", "Packed", "Bucketed"])
def test_weights_of_a_batch_are_those_of_the_predicted_items_and_add_up_to_1(data, documents):
    found = read(str(data), 3, 11, documents, 1)
    shares = {}
    for tokens, _, weights in found.values():
        for item, weight in zip(tokens[1:], weights, strict=True):
            if weight:
                shares.setdefault(int(item) % 3, set()).add(float(weight))
    assert shares.keys() == {1, 2}, "items of weight 0 are not trained"
    (one,), (two,) = shares[1], shares[2]
    assert two == pytest.approx(2 * one)
    assert sum(float(weights.sum()) for _, _, weights in found.values()) == pytest.approx(1, abs=1e-6)


def test_weights_are_refused_where_they_would_be_ignored(data):
    with pytest.raises(InvalidInput, match=r"has weights of tokens, and data.documents Joined does not support them"):
        Reader(DataConfig(uri=str(data)), LENGTH, 7)


def test_records_that_are_empty_are_left_out(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"item": []}\n{"item": [7, 8]}\n')
    options = ["--tokens", "item", "--vocab-size", "9", "--out", str(tmp_path / "out")]
    assert cli.main(["data", "build", *options, str(tmp_path / "a.jsonl")]) == 0
    assert content(tmp_path / "out") == b"\7\10"
    assert parse((tmp_path / "out/manifest.json").read_bytes(), "").only_tokens, "scripts read these data too"


@pytest.mark.parametrize(
    ("record", "said"),
    [
        ('{"item": [1], "time": [1, 2]}', "a.jsonl, line 2 has 1 of item, 2 of time: each element needs one value"),
        ('{"item": [1]}', "a.jsonl, line 2 has no time, but item"),
        ('{"item": [true], "time": [1]}', "line 2: its item is a list of bool, but token uint16 is needed"),
        ('{"item": null, "time": [1]}', "line 2: its item is a null"),
        ('{"item": [[1]], "time": [1]}', "line 2: its item has the shape [1, 1]"),
        ('{"item": [1], "time": [1e20]}', "line 2: its time is a list of float64"),
        ('{"item": [1], "time": [99999999999999999999]}', "line 2: its time is a list of "),
        ('{"item": [1], "time": [NaN]}', "line 2: its time is a list of float64"),
    ],
)
def test_a_record_that_does_not_fit_is_refused_by_its_number(tmp_path, capsys, record, said):
    (tmp_path / "a.jsonl").write_text(f'{{"item": [1], "time": [2]}}\n{record}\n')
    options = ["--tokens", "item", "--vocab-size", "300", "--field", "time=int64", "--out", str(tmp_path / "out")]
    assert cli.main(["data", "build", "--processes", "1", *options, str(tmp_path / "a.jsonl")]) == 78
    assert said in capsys.readouterr().err


def test_whole_numbers_that_a_float_would_round_are_refused(tmp_path, capsys):
    """Times in nanoseconds are above 2^53."""
    (tmp_path / "a.jsonl").write_text('{"x": [9007199254740992]}\n{"x": [9007199254740993]}\n')
    options = ["--field", "x=float64", "--out", str(tmp_path / "out"), "--processes", "1"]
    assert cli.main(["data", "build", *options, str(tmp_path / "a.jsonl")]) == 78
    assert "line 2: its x has whole numbers that the type would round" in capsys.readouterr().err


def test_a_record_without_vectors_is_left_out_in_every_form(tmp_path):
    rows = [[[1.0, 2.0]], [], [[3.0, 4.0]]]
    parquet.write_table(pa.table({"x": pa.array(rows, pa.list_(pa.list_(pa.float32())))}), tmp_path / "a.parquet")
    options = ["--field", "x=float32x2", "--out", str(tmp_path / "out"), "--processes", "1"]
    assert cli.main(["data", "build", *options, str(tmp_path / "a.parquet")]) == 0
    assert np.frombuffer(content(tmp_path / "out"), "<f4").tolist() == [1, 2, 3, 4]
