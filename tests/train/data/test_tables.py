"""Shards that an engine writes from pyarrow tables: those of `concertina data build`, whatever the engine repeats."""

import dataclasses
import json
import os
import random
import re
import runpy
import subprocess
import sys
import types
from importlib.machinery import PathFinder

import numpy as np
import pyarrow
import pyarrow.parquet as parquet
import pytest
from tokenizers import Tokenizer, models

from builders.pages import DOCS, blocks
from builders.programs import PREPARE, SEARCH_PATH
from builders.train.built import documents
from concertina_data.data_manifest import Field, parse
from concertina_state.errors import InvalidInput
from concertina_trainer import cli
from concertina_trainer.config.data_config import DataConfig
from concertina_trainer.data.build.build import build
from concertina_trainer.data.build.recipe import Duplicates, Recipe, TypedRecipe
from concertina_trainer.data.read.sequence_reader import Reader
from concertina_trainer.data.tables import write_manifest, write_table

TEXTS = [f"document {number} of {'ü' * (number % 40)}" for number in range(600)]
TYPED = TypedRecipe.of("item", 300, (Field("time", "int64"), Field("place", "float32", 2)))
EVENTS = [
    {"item": [n, n + 1][: 1 + n % 2], "time": [10**12 + n] * (1 + n % 2), "place": [[n, 0.5]] * (1 + n % 2)}
    for n in range(200)
]
OPTIONS = {
    "text": (pyarrow.table({"text": TEXTS}), Recipe(), []),
    "typed": (
        pyarrow.Table.from_pylist(EVENTS), Recipe(typed=TYPED),
        ["--tokens", "item", "--vocab-size", "300", "--field", "time=int64", "--field", "place=float32x2"],
    ),
}  # fmt: skip


def contents(folder):
    manifest = parse((folder / "manifest.json").read_bytes(), "")
    shards = [(folder / shard.file, folder / shard.documents_file) for shard in manifest.shards]
    return manifest, [(file.read_bytes(), begins.read_bytes()) for file, begins in shards]


@pytest.mark.parametrize("kind", OPTIONS)
def test_a_table_becomes_the_same_shard_as_its_file(tmp_path, kind):
    table, recipe, options = OPTIONS[kind]
    parquet.write_table(table, tmp_path / "a.parquet")
    command = ["data", "build", "--processes", "1", "--out", str(tmp_path / "built"), *options]
    assert cli.main([*command, str(tmp_path / "a.parquet")]) == 0
    out = str(tmp_path / "written")
    write_manifest(write_table(table, out, recipe).to_pylist(), out, recipe)
    built, written = contents(tmp_path / "built"), contents(tmp_path / "written")
    assert built[1] == written[1]
    assert (built[0].digest, built[0].tokenizer, built[0].fields) == (
        written[0].digest, written[0].tokenizer, written[0].fields,
    )  # fmt: skip
    assert cli.main(["data", "verify", out]) == 0
    assert len(Reader(DataConfig(uri=out), 8, 1).read(0, 20)) == 20


def test_the_data_do_not_depend_on_the_order_of_rows_and_on_repeated_tasks(tmp_path):
    table, recipe, _ = OPTIONS["text"]
    parts = [table.slice(begin, 100) for begin in range(0, 600, 100)]
    rows = {}
    for out in ("one", "two"):
        made = [write_table(part, str(tmp_path / out), recipe, shard_bytes=1000) for part in parts]
        rows[out] = [row for some in made for row in some.to_pylist()]
    write_table(parts[3], str(tmp_path / "two"), recipe, shard_bytes=1000)
    random.Random(1).shuffle(rows["two"])
    for out, some in rows.items():
        write_manifest(some, str(tmp_path / out), recipe)
        write_manifest(some, str(tmp_path / out), recipe)
    one, two = contents(tmp_path / "one"), contents(tmp_path / "two")
    assert one == two
    assert len(one[1]) > 6, "a table of many documents becomes several shards"
    assert sorted(documents(tmp_path / "one")) == sorted(TEXTS)


def test_the_order_of_training_is_exact_over_shards_of_a_store(s3, data_cache):
    table, recipe, _ = OPTIONS["text"]
    rows = [
        row
        for begin in range(0, 600, 100)
        for row in write_table(table.slice(begin, 100), "s3://train/tables", recipe).to_pylist()
    ]
    write_manifest(rows, "s3://train/tables", recipe)
    whole = Reader(DataConfig(uri="s3://train/tables"), 16, 1).read(0, 300)
    resumed = Reader(DataConfig(uri="s3://train/tables"), 16, 1)
    assert (np.concatenate([resumed.read(100, 300), resumed.read(0, 100)]) == np.roll(whole, -100, axis=0)).all()


def test_what_would_be_wrong_data_is_refused(tmp_path):
    table, recipe, _ = OPTIONS["text"]
    out = str(tmp_path / "out")
    rows = write_table(table, out, recipe).to_pylist()
    for said, some, other in (
        ("no document was written", [], recipe),
        ("written with another recipe", rows, Recipe(typed=TYPED)),
        ("does not describe a shard", [{"file": "shard-1.bin"}], recipe),
        ("is missing, but the manifest", [{**rows[0], "file": "shard-1.bin"}], recipe),
        ("supports no validation", rows, Recipe(duplicates=Duplicates.removed)),
    ):
        with pytest.raises(InvalidInput, match=said):
            write_manifest(some, out, other)
    assert not (tmp_path / "out" / "manifest.json").exists()
    write_manifest(rows, out, recipe)
    more = write_table(pyarrow.table({"text": ["more"]}), out, recipe).to_pylist()
    with pytest.raises(InvalidInput, match="already contains other data"):
        write_manifest([*rows, *more], out, recipe)
    with pytest.raises(InvalidInput, match="the table has no text, but body"):
        write_table(pyarrow.table({"body": ["a"]}), out, recipe)
    bad = pyarrow.table({"item": [[1], [300]], "time": [[1], [1]], "place": [[[0.0, 0.0]]] * 2})
    with pytest.raises(InvalidInput, match="the table, row 2: its item has numbers from 300 to 300"):
        write_table(bad, out, Recipe(typed=TYPED))


def other_recipes(folder):
    """Yield recipes that differ in one option alone, with a table for both and the words that name the option."""
    vocabulary = {"<unk>": 0, "</s>": 1, "<eos>": 2, "a": 3}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.save(str(folder / "tokenizer.json"))
    words = Recipe(tokenizer=str(folder / "tokenizer.json"), separator="</s>")
    texts = pyarrow.table({"text": ["a"], "body": ["b"]})
    yield "separator", texts, words, dataclasses.replace(words, separator="<eos>"), "(separator: 2, here 1)"
    yield "column", texts, Recipe(), Recipe(column="body"), "(columns: ['body'], here ['text'])"
    yield "split pattern", texts, Recipe(), Recipe(split_pattern="x"), "(split pattern: 'x', here '')"
    ids = pyarrow.table({"x": [[1, 2]], "y": [[3, 4]]})
    first, other = (Recipe(typed=TypedRecipe.of(name, 10, ())) for name in "xy")
    yield "typed column", ids, first, other, "(columns: ['y'], here ['x'])"
    fewer = Recipe(typed=TypedRecipe.of("x", 9, ()))
    yield "vocabulary size", ids, first, fewer, "(vocabulary size: 9, here 10)"
    unnamed = Recipe(typed=TypedRecipe((Field("x", "int64"),), ("x",)))
    renamed = Recipe(typed=TypedRecipe((Field("y", "int64"),), ("x",)))
    yield "field", ids, unnamed, renamed, "(fields: ['y=int64'], here ['x=int64'])"


@pytest.mark.parametrize("name", ["separator", "column", "split pattern", "typed column", "vocabulary size", "field"])
def test_shards_of_recipes_that_differ_in_one_option_are_refused(tmp_path, name):
    [(table, recipe, other, said)] = [row for option, *row in other_recipes(tmp_path) if option == name]
    out = str(tmp_path / "out")
    rows = [row for each in (recipe, other) for row in write_table(table, out, each).to_pylist()]
    with pytest.raises(InvalidInput, match=re.escape(said)):
        write_manifest(rows, out, recipe)
    write_manifest(rows[:1], out, recipe)


def test_the_row_of_a_repeated_task_counts_once(tmp_path):
    table, recipe, _ = OPTIONS["text"]
    out = str(tmp_path / "out")
    rows = write_table(table, out, recipe).to_pylist()
    manifest = write_manifest([*rows, *write_table(table, out, recipe).to_pylist()], out, recipe)
    assert (manifest.documents, len(manifest.shards)) == (600, 1)
    assert sorted(documents(tmp_path / "out")) == sorted(TEXTS)


def test_an_unfinished_build_in_the_folder_replaces_nothing(tmp_path):
    """The build could be continued later, and would then write its own manifest."""
    table, recipe, _ = OPTIONS["text"]
    sources = [tmp_path / f"{number}.jsonl" for number in range(2)]
    for source in sources:
        source.write_text("".join(json.dumps({"text": f"{source.name} {n}"}) + "\n" for n in range(50)))
    out, elsewhere = str(tmp_path / "out"), str(tmp_path / "elsewhere")
    rows = write_table(table, out, recipe).to_pylist()
    list(build(sources, out, shard_bytes=500, share=(0, 2)))
    for write in (lambda: write_table(table, out, recipe), lambda: write_manifest(rows, out, recipe)):
        with pytest.raises(InvalidInput, match="has an unfinished build of `concertina data build`"):
            write()
    assert not (tmp_path / "out" / "manifest.json").exists()
    write_manifest(write_table(table, elsewhere, recipe).to_pylist(), elsewhere, recipe)
    with pytest.raises(InvalidInput, match="already contains data"):
        list(build(sources, elsewhere, shard_bytes=500))


def test_the_example_with_pyarrow_writes_embeddings(tmp_path, capsys):
    generator = np.random.default_rng(0)
    for number in range(3):
        vectors = [generator.random((2 + n % 5, 16)).tolist() for n in range(20)]
        parquet.write_table(pyarrow.table({"embedding": vectors}), tmp_path / f"{number}.parquet")
    files = [str(tmp_path / f"{number}.parquet") for number in range(3)]
    example = runpy.run_path(str(PREPARE / "with_pyarrow.py"))
    rows = [row for file in files for row in example["prepare"](file, str(tmp_path / "out")).to_pylist()]
    manifest = write_manifest(rows, str(tmp_path / "out"), example["RECIPE"])
    assert (manifest.documents, len(manifest.shards)) == (48, 3)
    assert json.loads((tmp_path / "out" / "manifest.json").read_bytes())["fields"][0]["width"] == 16
    found = Reader(DataConfig(uri=str(tmp_path / "out")), 4, 1).sequences(np.arange(8)).fields["embedding"]
    assert found.shape == (8, 5, 16)
    assert (found > 0).all()


PAGE = DOCS / "data-engines.md"
LONG_ENOUGH = [text for text in TEXTS if len(text) > 20]
"""Documents that the filter of the page and of `with_ray.py` keeps."""


class RayStandIn:
    """Stand-in for the four calls of Ray Data on the page. It tests the page against our interface, and not Ray."""

    def __init__(self, tables):
        self.tables = tables

    def filter(self, keep):
        rows = [row for table in self.tables for row in table.to_pylist() if keep(row)]
        half = len(rows) // 2
        return RayStandIn([pyarrow.Table.from_pylist(some) for some in (rows[:half], rows[half:])])

    def map_batches(self, function, batch_format, batch_size, fn_kwargs):
        assert (batch_format, batch_size) == ("pyarrow", None), "whole blocks as tables"
        return RayStandIn([function(table, **fn_kwargs) for table in self.tables])

    def take_all(self):
        return [row for table in self.tables for row in table.to_pylist()]


def test_the_program_of_the_page_writes_the_documents(tmp_path, monkeypatch):
    parquet.write_table(pyarrow.table({"text": TEXTS}), tmp_path / "corpus")
    ray = types.ModuleType("ray")
    ray.data = types.SimpleNamespace(read_parquet=lambda path: RayStandIn([parquet.read_table(path)]))
    monkeypatch.setitem(sys.modules, "ray", ray)
    [program] = [block.text for block in blocks(PAGE) if block.text.startswith("import ray")]
    values = {"s3://bucket/data": str(tmp_path / "out"), "s3://bucket/corpus": str(tmp_path / "corpus")}
    for value, ours in {**values, "tokenizer.json": "bytes"}.items():
        assert program.count(f'"{value}"') == 1
        program = program.replace(f'"{value}"', repr(ours))
    exec(compile(program, PAGE.name, "exec"), {})
    assert sorted(documents(tmp_path / "out")) == sorted(LONG_ENOUGH)
    assert cli.main(["data", "verify", str(tmp_path / "out")]) == 0


def test_the_typed_recipe_of_the_page_writes_its_fields(tmp_path):
    [program] = [block.text for block in blocks(PAGE) if "TypedRecipe" in block.text]
    names = {}
    exec(compile(program, PAGE.name, "exec"), names)
    out, recipe = str(tmp_path / "out"), names["recipe"]
    table = pyarrow.table({"item": [[1, 999]], "time": [[10**12, 10**12 + 1]]})
    write_manifest(write_table(table, out, recipe).to_pylist(), out, recipe)
    manifest, [(elements, _)] = contents(tmp_path / "out")
    assert (manifest.vocab_size, [field.name for field in manifest.fields]) == (1000, ["token", "time"])
    rows = np.frombuffer(elements, [("token", "<u2"), ("time", "<i8")]).tolist()
    assert rows == [(1, 10**12), (999, 10**12 + 1)]


SAME = "tests/train/data/test_tables.py::test_a_table_becomes_the_same_shard_as_its_file[text]"
FRAMEWORKS = os.environ.get("CONCERTINA_FRAMEWORKS", "")
RAY_SECONDS = 600
"""Time limit of one run. Ray starts eight processes first."""


@pytest.mark.long(law=SAME)
@pytest.mark.timeout(3 * RAY_SECONDS)
def test_ray_data_writes_each_document_once(tmp_path):
    """Two runs can differ in their shards, because Ray Data can read the files into a table in another order."""
    places = [*FRAMEWORKS.split(os.pathsep), *sys.path]
    place = next((each for each in places if each and PathFinder.find_spec("ray", [each])), None)
    if place is None:
        pytest.skip("ray is not installed, nor in a folder of CONCERTINA_FRAMEWORKS")
    files = [tmp_path / f"{number}.parquet" for number in range(4)]
    for number, file in enumerate(files):
        parquet.write_table(pyarrow.table({"text": [*TEXTS[number::4], "short"]}), file)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([SEARCH_PATH, place]), "RAY_USAGE_STATS_ENABLED": "0"}
    for out in ("one", "two"):
        command = [sys.executable, str(PREPARE / "with_ray.py"), str(tmp_path / out), *map(str, files)]
        run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=RAY_SECONDS)
        assert run.returncode == 0, run.stderr[-3000:]
        assert sorted(documents(tmp_path / out)) == sorted(LONG_ENOUGH)
