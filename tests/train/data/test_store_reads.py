"""Test how much the nodes of a job read from the store, counted at the store."""

import contextlib

import numpy as np
import pytest

from builders.stores.hostile import proxy
from concertina_data.data_manifest import FORMAT, NAME, DataManifest, TokenizerFacts, token_field
from concertina_state.objects.prefix import ObjectPrefix
from concertina_trainer import cli
from concertina_trainer.config.data_config import DataConfig
from concertina_trainer.data.build.write import Draft
from concertina_trainer.data.read.batch import plan_batch
from concertina_trainer.data.read.batches import microbatches
from concertina_trainer.data.read.sequence_reader import Reader

LENGTH, BATCH, SHARDS = 24, 64, 120
MOST = 1.5
"""Bound of the bytes that the store sends to one node, as a multiple of the node's part of the data."""
LAW = "tests/train/data/test_store_reads.py::test_nodes_together_read_the_data_about_once[Joined]"
MANY = pytest.param("Joined", [1, 16], id="Joined, many", marks=pytest.mark.long(law=LAW))
PACKED = pytest.param("Packed", [1, 4], marks=pytest.mark.long(law=LAW))


@pytest.fixture(scope="module")
def stored(s3):
    generator, uri, shards = np.random.default_rng(1), "s3://train/many-shards", []
    folder = ObjectPrefix(uri, create=True)
    for index in range(SHARDS):
        draft = Draft()
        draft.documents = [generator.bytes(int(size)) for size in generator.integers(30, 90, 4)]
        shards += draft.put(folder, f"shard-{index:06}", 1)
    facts = TokenizerFacts("random", "random", 0)
    folder.put(NAME, DataManifest(FORMAT, 256, facts, (token_field(256),), tuple(shards)).to_json())
    assert cli.main(["data", "pack", uri, "--length", str(LENGTH)]) == 0
    return uri, sum(shard.size for shard in shards), sum(8 * shard.documents for shard in shards)


@pytest.fixture
def read(s3, stored, tmp_path, monkeypatch):
    """Return a function that reads an epoch on some nodes with a rank each, as `(shares, lengths, rows)`.

    `shares` has the number of bytes of shards that the store sent to each node, as a share of the data. `lengths` is
    the same for the files with the lengths of documents. `rows` has the tokens of each batch, sorted.
    """
    uri, size, documents_size = stored

    def epoch(nodes, documents, groups):
        plan, rows, stores = plan_batch(BATCH, BATCH, nodes), {}, []
        with contextlib.ExitStack() as proxies:
            for node in range(nodes):
                stores.append(proxies.enter_context(proxy(s3.endpoint)))
                monkeypatch.setenv("AWS_ENDPOINT_URL", stores[-1].url)
                monkeypatch.setenv("CONCERTINA_CACHE", str(tmp_path / f"{documents}-{groups}-{nodes}-{node}"))
                reader = Reader(DataConfig(uri=uri, documents=documents, groups=groups), LENGTH, seed=1)
                for start in range(0, reader.epoch_size, BATCH):
                    for part in microbatches(reader, plan, node, start):
                        rows.setdefault(start, []).extend(part.tokens[: len(part.samples)].tolist())
                del reader
            shares, lengths = (
                [sum(count for path, count in store.sent.items() if path.endswith(suffix)) / whole for store in stores]
                for suffix, whole in ((".bin", size), (".documents", documents_size))
            )
        return shares, lengths, {start: sorted(some) for start, some in rows.items()}

    return epoch


@pytest.mark.parametrize(("documents", "counts"), [pytest.param("Joined", [1, 4], id="Joined"), MANY, PACKED])
def test_nodes_together_read_the_data_about_once(read, documents, counts):
    """Shards that two groups share, and those that are opened in advance for the next epoch, are read once more.

    Every node reads the lengths of all documents once, unless `documents` is `Joined`, because the number of predicted
    tokens of a whole batch depends on them.
    """
    found = {nodes: read(nodes, documents, groups=max(8, *counts)) for nodes in counts}
    shares = {nodes: shares for nodes, (shares, _, _) in found.items()}
    for _, lengths, _ in found.values():
        assert set(lengths) == {0} if documents == "Joined" else all(1 <= each < MOST for each in lengths), lengths
    assert all(1 <= sum(each) < 1.3 for each in shares.values()), shares
    assert all(max(each) < MOST / nodes for nodes, each in shares.items()), shares
    assert all(rows == found[1][2] for _, _, rows in found.values()), "each batch has the same sequences"


def test_without_groups_each_node_reads_all_data(read):
    shares, _, _ = read(2, "Joined", groups=1)
    assert sum(shares) > 1.95
