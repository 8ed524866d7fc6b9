"""The tokenizer of an exported model: it encodes as the data were built, or a sentence says why there is none."""

import base64
import json

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers
from transformers import AutoConfig, AutoTokenizer
from typer.testing import CliRunner

from builders.train import small
from concertina.cli.checkpoint import app
from concertina_data.data_manifest import parse
from concertina_trainer.config.trainer import TrainerConfig
from concertina_trainer.data.build.build import build
from concertina_trainer.data.build.recipe import Recipe
from concertina_trainer.export.tokenizer_files import exported

TEXTS = [f"Document {i}: naïve words, again and again. <s> " * (1 + i % 5) for i in range(60)]
END = "<|endoftext|>"


def bpe():
    """With what must not come into an export: it cuts off, pads, and puts a token before each text."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=["<s>", END], initial_alphabet=alphabet)
    made.train_from_iterator(TEXTS, trainer)
    made.enable_truncation(7)
    made.enable_padding(length=9)
    made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return made


def unigram():
    made = Tokenizer(models.Unigram())
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.train_from_iterator(
        TEXTS, trainers.UnigramTrainer(vocab_size=90, special_tokens=[END, "<?>"], unk_token="<?>")
    )
    return made


def built(tmp_path, tokenizer, **more):
    """Return a data folder, and the configuration of a run that names it."""
    source = tmp_path / "source.jsonl"
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    list(build([source], str(tmp_path / "data"), recipe=Recipe(tokenizer=str(tokenizer), **more)))
    manifest = parse((tmp_path / "data/manifest.json").read_bytes(), "")
    model = {"layers": 1, "dim": 16, "heads": 2, "vocabSize": manifest.vocab_size, "sequenceLength": 32}
    return manifest, {"steps": 1, "data": {"uri": str(tmp_path / "data")}, "globalBatchSize": 2, "model": model}


def saved(files, folder):
    folder.mkdir(exist_ok=True)
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    return folder


def documents(manifest, folder):
    """Tokens of each document as they were built, without the one that ends it."""
    [shard] = manifest.shards
    tokens = np.fromfile(folder / shard.file, f"<u{manifest.element_bytes}")
    begins = np.fromfile(folder / shard.documents_file, "<u8").tolist()
    ends = [*begins[1:], len(tokens)]
    return [tokens[begin : end - 1].tolist() for begin, end in zip(begins, ends, strict=True)]


@pytest.mark.parametrize("make", [bpe, unigram])
def test_it_encodes_as_the_data_were_built(make, tmp_path):
    make().save(str(tmp_path / "mine.json"))
    manifest, trainer = built(tmp_path, tmp_path / "mine.json")
    found = exported(TrainerConfig.model_validate(trainer), manifest.digest)
    assert found.message == f"The tokenizer is mine.json from {tmp_path}/data."
    loaded = AutoTokenizer.from_pretrained(saved(found.files, tmp_path / "hf"))
    # as in training, <s> in a text is text
    assert [loaded.encode(text, split_special_tokens=True) for text in TEXTS] == documents(manifest, tmp_path / "data")
    assert (loaded.eos_token, loaded.eos_token_id) == (END, manifest.tokenizer.separator)


def test_the_command_writes_it_beside_the_model(tmp_path, monkeypatch):
    bpe().save(str(tmp_path / "mine.json"))
    manifest, trainer = built(tmp_path, tmp_path / "mine.json")
    monkeypatch.setenv("CONCERTINA_TRAINER", json.dumps(trainer))
    small.publish(f"file://{tmp_path}/run", tmp_path, manifest.digest)
    result = CliRunner().invoke(app, ["export", f"file://{tmp_path}/run", f"{tmp_path}/hf"])
    assert "The tokenizer is mine.json" in result.output
    assert AutoTokenizer.from_pretrained(tmp_path / "hf").encode(TEXTS[1])[:1] != [0]
    config = AutoConfig.from_pretrained(tmp_path / "hf")
    assert (config.eos_token_id, config.bos_token_id) == (manifest.tokenizer.separator, None)


def test_data_that_have_moved_or_changed(tmp_path):
    bpe().save(str(tmp_path / "mine.json"))
    manifest, trainer = built(tmp_path, tmp_path / "mine.json")
    (tmp_path / "data").rename(tmp_path / "moved")
    config = TrainerConfig.model_validate(trainer)

    gone = exported(config, manifest.digest)
    assert not gone.files
    assert f"The folder {tmp_path}/data does not exist" in gone.message
    assert exported(config, manifest.digest, f"{tmp_path}/moved").files
    assert "is not the data of this run" in exported(config, "another", f"{tmp_path}/moved").message

    unigram().save(str(tmp_path / "moved/tokenizer.json"))
    other = exported(config, manifest.digest, f"{tmp_path}/moved")
    assert not other.files
    assert "tokenizer.json is not the one that the data were built with" in other.message


def test_tiktoken_is_named(tmp_path):
    ranks = "".join(f"{base64.b64encode(bytes([byte])).decode()} {byte}\n" for byte in range(256))
    (tmp_path / "tiny.tiktoken").write_text(ranks)
    manifest, trainer = built(tmp_path, tmp_path / "tiny.tiktoken", split_pattern=r"\w+|\W+")
    found = exported(TrainerConfig.model_validate(trainer), manifest.digest)
    assert not found.files
    assert "encode with tiktoken, as config.json says. Token 256 ends a document" in found.message
    assert found.config["trained_tokenizer"]["name"] == "tiny.tiktoken"
