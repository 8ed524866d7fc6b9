"""Test that the order of samples is the same in all versions.

Positions in checkpoints, and samples that were left out, are numbers in this order. The hashes cover data set, shard
and row of the first 10,000 positions of a mixture, over several epochs and with skipped positions. They also cover the
tokens at these positions, and the name of the order.
"""

import hashlib

import numpy as np
import pytest

from concertina_data.data_manifest import FORMAT, NAME, DataManifest, TokenizerFacts, token_field
from concertina_state.objects.prefix import ObjectPrefix
from concertina_trainer import cli
from concertina_trainer.config.data_config import DataConfig
from concertina_trainer.data import tokenizer as tokenizers
from concertina_trainer.data.build.draft import Draft
from concertina_trainer.data.read.sequence_reader import Reader

LENGTH, POSITIONS = 24, 10_000
GROUPED = "cd3829e3eebbbdd7860f9809538ad4041e715042c09bb944b08acf0855fea5cd"
"""sha256 of what is consumed in the mode Masked with 16 groups."""
GOLDEN = {
    "Joined": ("a3037da2f03978d2c054096c17975d539f761606d34de0a1f226c64cf86a5a76", "e49026180aeb7e86"),
    "Masked": ("33ca5c927ea42785c6809d3f91007fa6562ecf33e62c390863a121548983e3aa", "7b4be03af6b19581"),
    "Packed": ("e228fdda7c1e28e09a361ab6b1c100a53a240a5215db18a77619a41973b1b11a", "2045a22dae670357"),
    "Bucketed": ("c2ae46ea956235ee3a24fa0cb0475e83d10fed528b4020f9dfa7a8356e34fa0a", "8626a8ea347fcd5a"),
}
"""By how documents are laid out: sha256 of what is consumed, and the digest that checkpoints carry."""


def data_set(uri, texts, shard_bytes):
    """Write texts of any bytes, which a build refuses, as it lays out text: about `shard_bytes` a shard."""
    tokenizer = tokenizers.load(tokenizers.BYTES, "", "")
    groups = [[]]
    for text in texts:
        if groups[-1] and sum(map(len, groups[-1])) + len(text) > shard_bytes:
            groups.append([])
        groups[-1].append(text)
    folder, shards, fields = ObjectPrefix(uri, create=True), [], (token_field(tokenizer.vocab_size),)
    for index, group in enumerate(groups):
        draft = Draft()
        draft.documents = tokenizer.encode(group)
        shards += draft.put(folder, f"shard-{index:06}", fields[0].bytes)
    facts = TokenizerFacts(tokenizer.name, tokenizer.digest, tokenizer.separator)
    manifest = DataManifest(FORMAT, tokenizer.vocab_size, facts, fields, tuple(shards))
    folder.put(NAME, manifest.to_json())


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    """Three data sets of some shards each, of bytes that no library has a part in."""
    folder, found = tmp_path_factory.mktemp("golden"), []
    for number, (name, weight) in enumerate((("web", 50), ("code", 30), ("books", 7))):
        texts = [
            bytes((j * j + 31 * i + 7 * number) % 251 for j in range(1 + (i * 37 + number) % 113)) for i in range(90)
        ]
        uri = str(folder / f"{name}-data")
        data_set(uri, texts, 250 + 100 * number)
        assert cli.main(["data", "pack", uri, "--length", str(LENGTH)]) == 0
        found.append({"uri": uri, "weight": weight})
    return found


def consumed(mixture, documents, groups):
    """Return the sha256 of what is consumed at the first positions, and the digest that checkpoints carry."""
    config = DataConfig.model_validate({"mixture": mixture, "documents": documents, "groups": groups})
    reader = Reader(config, LENGTH, seed=42, skipped=[(100, 131), (5000, 5001)])
    assert 3 * reader.epoch_size < POSITIONS
    places = np.stack(reader.places(np.arange(POSITIONS)))
    assert len(set(places[1])) > 16, "more than a window of shards"
    sequences = reader.sequences(np.arange(POSITIONS))
    consumed = [places, sequences.tokens]
    if sequences.document_ids is not None:
        consumed += [sequences.document_ids, sequences.predicted]
    found = hashlib.sha256(b"".join(np.ascontiguousarray(part).astype("<i8").tobytes() for part in consumed))
    return found.hexdigest(), reader.digest


@pytest.mark.parametrize("documents", GOLDEN)
def test_the_first_10_000_positions_never_change(mixture, documents):
    assert consumed(mixture, documents, groups=1) == GOLDEN[documents]


def test_the_first_10_000_positions_of_groups_never_change(mixture):
    assert consumed(mixture, "Masked", groups=16) == (GROUPED, GOLDEN["Masked"][1])
