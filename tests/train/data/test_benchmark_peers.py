"""Readers of `benchmarks/data_peers.py`. Each must read every sequence once, or their speeds compare different work."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.append(str(Path(__file__).parents[3] / "benchmarks"))
import data_peers

from concertina_data.data_manifest import FORMAT, NAME, DataManifest, TokenizerFacts, token_field
from concertina_state.objects.prefix import ObjectPrefix
from concertina_trainer.data.build.write import Draft

LENGTH, BATCH, ROWS, SHARDS = 64, 8, 64, 2
VOCABULARY = SHARDS * (ROWS * LENGTH + 1)
"""Each token is in the data once, so that each sequence is different."""
WAYS = [(name, way) for name, ways in data_peers.S3_WAYS.items() for way in ways]
LAW = "tests/train/data/test_store_reads.py::test_nodes_together_read_the_data_about_once[Joined]"
READ = f"""
import json, os, pathlib, sys
import numpy as np
import data_peers
data_peers.CHUNK_BYTES = 4096  # several chunks, for two workers
name, way, folder, uri, cache = sys.argv[1:]
source, chosen = data_peers.Source(pathlib.Path(folder), uri, pathlib.Path(cache)), data_peers.S3_WAYS[name][way]
chosen.load()
chosen.prepare(source, {LENGTH})
rows = []
for batch in chosen.batches(source, {LENGTH}, {BATCH}):
    if chosen.count is data_peers.count_bytes:
        windows = np.lib.stride_tricks.sliding_window_view(np.frombuffer(batch, "<u2"), {LENGTH} + 1)
        batch = windows[::{LENGTH}]
    rows += np.asarray(batch).reshape(-1, {LENGTH} + 1).tolist()
print(json.dumps(rows))
sys.stdout.flush()
os._exit(0)
"""


@pytest.fixture(scope="module")
def source(s3, tmp_path_factory):
    """Return a small data set, on disk and in S3."""
    made = data_peers.Source(tmp_path_factory.mktemp("peers") / "set", "s3://train/peers")
    for uri in (str(made.folder), made.place("set")):
        folder, shards = ObjectPrefix(uri, create=True), []
        for index, tokens in enumerate(np.arange(VOCABULARY, dtype="<u2").reshape(SHARDS, -1)):
            draft = Draft()
            draft.documents = [part.tobytes() for part in np.array_split(tokens, 50)]
            shards += draft.put(folder, f"shard-{index:06}", 2)
        facts = TokenizerFacts("random", "random", 0)
        folder.put(NAME, DataManifest(FORMAT, VOCABULARY, facts, (token_field(VOCABULARY),), tuple(shards)).to_json())
    return made


@pytest.mark.long(law=LAW)
@pytest.mark.timeout(1000)
@pytest.mark.parametrize(("name", "way"), WAYS, ids=lambda each: each)
def test_a_library_reads_every_sequence_from_s3_once(source, tmp_path, name, way):
    if name not in data_peers.OURS and not (data_peers.FOLDER / "complete").exists():
        pytest.skip("the libraries are not installed: benchmarks/data.py installs them")
    output = data_peers.run(READ, name, way, dataclasses.replace(source, cache=tmp_path))
    rows = np.concatenate([rows.reshape(-1, LENGTH + 1) for rows in data_peers.Rows(source.folder, LENGTH).files])
    assert len(rows) == SHARDS * ROWS
    assert sorted(json.loads(output.strip().splitlines()[-1])) == sorted(rows.tolist())


@pytest.mark.long(law=LAW)
@pytest.mark.parametrize(("name", "way"), [each for each in WAYS if each[0] in data_peers.OURS], ids=lambda each: each)
def test_a_measurement_from_s3_counts_all_tokens(source, name, way):
    measured = data_peers.measure(name, way, source, LENGTH, BATCH, 60)
    assert measured.tokens // LENGTH == SHARDS * ROWS
    assert measured.use.keys() == {"ru_utime", "ru_stime", "ru_minflt"}


def test_the_first_batch_counts_only_from_the_start():
    batches = [np.zeros((3, LENGTH + 1))] * 4
    counts = [data_peers.consume(iter(batches), LENGTH, 60, from_start)[1] for from_start in (False, True)]
    assert counts == [9 * LENGTH, 12 * LENGTH]


def test_a_format_is_written_once(tmp_path):
    (tmp_path / "set").mkdir()
    source, written = data_peers.Source(tmp_path / "set"), []
    written_form = data_peers.WrittenForm("format", lambda rows, out: written.append((rows.length, out)))
    written_form.prepare(source, LENGTH)
    written_form.prepare(source, LENGTH)
    assert written == [(LENGTH, tmp_path / "draft-format")]
    assert (tmp_path / "format").is_dir()
