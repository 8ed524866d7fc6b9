"""Chats as training data: tokens as transformers makes them, weights on the assistant's turns, exact in every world."""

import gzip
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from builders.train import chats
from concertina_data.data_manifest import parse
from concertina_data.places import CacheSettings
from concertina_data.sequences import Sequences
from concertina_state.errors import InvalidInput
from concertina_trainer import cli
from concertina_trainer.config.data_config import DataConfig
from concertina_trainer.data import elements
from concertina_trainer.data.read.batch import plan_batch
from concertina_trainer.data.read.batches import microbatches
from concertina_trainer.data.read.sequence_reader import Reader

LENGTH = 150
PLAIN = {"prompt": "2 + 2 =", "completion": " 4"}


def samples(out):
    """Return tokens and weights of each document of a data set."""
    manifest = parse((out / "manifest.json").read_bytes(), "")
    found = []
    for shard in manifest.shards:
        tokens, weights = elements.parts((out / shard.file).read_bytes(), manifest.fields).values()
        begins = np.fromfile(out / shard.documents_file, "<u8").astype(np.int64)[1:]
        found += zip(np.split(tokens, begins), np.split(weights, begins), strict=True)
    return manifest, [(tokens.tolist(), weights.tolist()) for tokens, weights in found]


def trained_texts(tokenizer, tokens, weights):
    """Return the texts of the stretches of trained tokens."""
    edges = np.flatnonzero(np.diff([0, *weights, 0]))
    return [tokenizer.decode(tokens[begin:end]) for begin, end in zip(edges[::2], edges[1::2], strict=True)]


def one(number, **more):
    return {**chats.chat(number), **more}


@pytest.mark.parametrize(
    ("template", "records"),
    [
        ("chatml", [chats.chat(1, 2, 3), chats.chat(4, system="Ünïcode 🙂 <think>")]),
        ("marked", [chats.chat(1, 2, 3), chats.chat(4, system="Ünïcode 🙂 <think>")]),
        ("reasoning", [chats.chat(5)]),
        ("tools", [one(1, tools=[{"name": "<f>", "é": None}]), chats.chat(2, 3)]),
    ],
)
def test_tokens_are_those_of_transformers(tmp_path, template, records):
    file = chats.tokenizer(tmp_path / "model", chats.TEMPLATES[template])
    assert chats.built(tmp_path / "data", file, records, 400) == 0
    theirs = AutoTokenizer.from_pretrained(tmp_path / "model")
    _, found = samples(tmp_path / "data")
    for record, (tokens, weights) in zip(records, found, strict=True):
        expected = theirs.apply_chat_template(record["messages"], tools=record.get("tools"), return_dict=True)
        assert tokens == expected["input_ids"]
        if template == "marked":
            masked = theirs.apply_chat_template(
                record["messages"], return_dict=True, return_assistant_tokens_mask=True
            )  # fmt: skip
            assert weights == masked["assistant_masks"]
        answers = [message["content"] for message in record["messages"] if message["role"] == "assistant"]
        ends = {"chatml": "<|im_end|>\n", "marked": "<|im_end|>", "reasoning": "<|im_end|>\n", "tools": "<|im_end|>"}
        begins = {"reasoning": "<think>\n\n</think>\n\n", "tools": " "}
        texts = [f"{begins.get(template, '')}{each}{ends[template]}" for each in answers]
        assert trained_texts(theirs, tokens, weights) == texts


def test_turns_that_depend_on_what_follows_are_refused_or_made_samples(tmp_path, capsys):
    file = chats.tokenizer(tmp_path / "model", chats.REASONING)
    assert chats.built(tmp_path / "data", file, [chats.chat(1), chats.chat(1, 2)], 400) == 78
    said = capsys.readouterr().err
    assert "data.jsonl, line 2: the chat template renders message 3 differently" in said
    assert "build with --split-turns" in said

    assert chats.built(tmp_path / "split", file, [chats.chat(1), chats.chat(1, 2)], 400, "--split-turns") == 0
    theirs = AutoTokenizer.from_pretrained(tmp_path / "model")
    _, found = samples(tmp_path / "split")
    expected = [chats.chat(1)["messages"], chats.chat(1)["messages"], chats.chat(1, 2)["messages"]]
    assert [tokens for tokens, _ in found] == [theirs.apply_chat_template(c, return_dict=False) for c in expected]
    texts = [f"<think>\n\n</think>\n\n{chats.answer(number)}<|im_end|>\n" for number in (1, 1, 2)]
    assert [trained_texts(theirs, *sample) for sample in found] == [[text] for text in texts]


def test_completions_end_with_the_end_token(tmp_path):
    file = chats.tokenizer(tmp_path / "model", template=None)
    assert chats.built(tmp_path / "data", file, [PLAIN], 50, "--separator", chats.END) == 0
    theirs = AutoTokenizer.from_pretrained(tmp_path / "model")
    _, [(tokens, weights)] = samples(tmp_path / "data")
    assert tokens == theirs.encode("2 + 2 = 4<|endoftext|>")
    assert trained_texts(theirs, tokens, weights) == [" 4<|endoftext|>"]


def test_a_message_of_weight_0_is_not_trained(tmp_path):
    for template in (chats.CHATML, chats.MARKED):
        record = chats.chat(1, 2)
        record["messages"][2]["weight"] = 0
        file = chats.tokenizer(tmp_path / "model", template)
        out = tmp_path / f"data-{len(template)}"
        assert chats.built(out, file, [record], 400) == 0
        _, [(tokens, weights)] = samples(out)
        [text] = trained_texts(AutoTokenizer.from_pretrained(tmp_path / "model"), tokens, weights)
        assert text.startswith(chats.answer(2))


def test_what_is_cut_and_dropped_is_counted(tmp_path, capsys):
    file = chats.tokenizer(tmp_path / "model", chats.CHATML)
    assert chats.built(tmp_path / "measured", file, [chats.chat(1)], 400) == 0
    [(shortest, _)] = samples(tmp_path / "measured")[1]
    most = len(shortest) + 20
    records = [chats.chat(1), chats.chat(1, 2, 3, 4), chats.chat(5, system="so long " * 100), chats.chat(2)]
    capsys.readouterr()
    assert chats.built(tmp_path / "data", file, records, most, "--validation", "0.3") == 0
    said = capsys.readouterr().out
    manifest, found = samples(tmp_path / "data")
    aside, more = samples(tmp_path / "data/validation")
    assert more
    both = (manifest.chats, aside.chats)
    assert sum(facts.truncated for facts in both) == 1
    assert sum(facts.dropped for facts in both) == 1
    assert sorted(len(tokens) for tokens, _ in found + more)[-1] == most + 1
    assert sum(facts.trained for facts in both) == sum(sum(weights) for _, weights in found + more)
    assert f"{manifest.chats.truncated} chats were cut to {most} predicted tokens" in said
    assert cli.main(["data", "verify", str(tmp_path / "data")]) == 0
    for name in ("data", "data/validation"):
        assert (tmp_path / name / f"packing-{most}.json").exists()


def say(*roles, **more):
    return {"messages": [{"role": role, "content": "x", **more} for role in roles]}


REFUSED = {
    "no JSON": ('{"messages": ', "line 3 can't be read as JSON"),
    "a list": ("[]", "line 3 holds a list, not an object"),
    "other fields": ('{"text": "a"}', "line 3: it has no messages, nor prompt and completion, but text: rename"),
    "a number": ('{"prompt": 1, "completion": "a"}', "line 3: its prompt is a number, not text"),
    "no messages": ('{"messages": []}', "line 3: its messages is a list without messages"),
    "no role": ('{"messages": [{"content": "a"}]}', "line 3: message 1 is no object with a role"),
    "parts": (say("user", content=[]), "line 3: the content of message 1 is a list: write it as text"),
    "a weight": (say("user", weight=0.5), "line 3: the weight of message 1 is neither 0 nor 1"),
    "nobody answers": (say("user"), "line 3: no message has the role assistant, so nothing is trained"),
    "special": (say("user", "assistant", content="a<|im_end|>"), "line 3: message 1 has the text <|im_end|>, which"),
    "an error": (say("user", "assistant", "system"), "line 3: the chat template can't render it (TemplateError: the s"),
    "no content": ({"messages": [{"role": "assistant"}]}, "line 3: message 1 has neither content nor tool_calls"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_bad_line_is_refused_by_its_number(tmp_path, capsys, name):
    line, said = REFUSED[name]
    file = chats.tokenizer(tmp_path / "model", chats.TOOLS)
    text = json.dumps(chats.chat(1)) + "\n\n" + (line if isinstance(line, str) else json.dumps(line)) + "\n"
    (tmp_path / "a.jsonl").write_text(text)
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(text.encode()))
    for source in ("a.jsonl", "b.jsonl.gz"):
        command = [
            "data",
            "build",
            "--out",
            f"{tmp_path}/{source}-data",
            "--chat",
            "--length",
            "99",
            "--processes",
            "1",
        ]
        assert cli.main([*command, "--tokenizer", file, str(tmp_path / source)]) == 78
        assert f"{source}, {said}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--chat"], "--chat needs --length"),
        (["--length", "9"], "--length and --split-turns are for chats"),
        (["--chat", "--length", "9"], "chats need a tokenizer.json, and --tokenizer is bytes"),
        (["--chat", "--length", "9", "--tokenizer", "TOKENIZER"], "has no chat template: put the model's"),
        (["--chat", "--length", "9", "--tokenizer", "TOKENIZER", "a.txt"], "a.txt is not a file of JSON lines"),
    ],
)
def test_options_that_do_not_go_together_are_refused(tmp_path, monkeypatch, capsys, options, said):
    monkeypatch.chdir(tmp_path)
    file = chats.tokenizer(tmp_path / "model", template=None)
    (tmp_path / "a.txt").write_text("text")
    sources = [] if "a.txt" in options else [chats.written(tmp_path / "a.jsonl", [chats.chat(1)])]
    given = [file if option == "TOKENIZER" else option for option in options]
    assert cli.main(["data", "build", "--out", "data", "--processes", "1", *given, *sources]) == 78
    assert said in capsys.readouterr().err


def test_equal_chats_are_removed_with_their_counts(tmp_path, capsys):
    """Lines that differ in their spaces are equal chats, even if one is a validation chat."""
    file = chats.tokenizer(tmp_path / "model", chats.CHATML)
    records = [chats.chat(1, 2, 3, 4), chats.chat(1, system="so long " * 200), *map(chats.chat, range(10))]
    lines = [json.dumps(record, separators=(",", ":" + spaces)) for spaces in ("", " ", "  ") for record in records]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    command = ["data", "build", "--processes", "1", "--tokenizer", str(file), "--chat", "--length", "100"]
    command += ["--validation", "0.4", "--shard-mebibytes", "0.001"]
    every, unique = tmp_path / "every", tmp_path / "unique"
    for out, kind in ((every, "count"), (unique, "remove")):
        assert cli.main([*command, "--out", str(out), "--duplicates", kind, str(tmp_path / "a.jsonl")]) == 0
        assert "22 documents occur earlier in the data" in capsys.readouterr().out
    before = [samples(every / folder)[1] for folder in ("", "validation")]
    after = [samples(unique / folder)[1] for folder in ("", "validation")]
    assert all(before)
    assert sorted(after[0] + after[1]) == sorted({str(chat): chat for chat in before[0] + before[1]}.values())
    assert not [chat for chat in after[1] if chat in after[0]], "no validation chat is a training chat"
    facts = [samples(unique / folder)[0].chats for folder in ("", "validation")]
    assert sum(each.trained for each in facts) == sum(sum(weights) for _, weights in after[0] + after[1])
    assert sum(each.truncated for each in facts) == 1
    assert sum(each.dropped for each in facts) == 3, "dropped chats are no documents, so none is a duplicate"
    assert cli.main(["data", "verify", str(unique)]) == 0
    config = DataConfig(uri=str(unique), documents="Packed")
    assert Reader(config, 100, 1).read(0, 2).shape == (2, 101)


@pytest.fixture(scope="module")
def uri(tmp_path_factory):
    folder = tmp_path_factory.mktemp("chats")
    file = chats.tokenizer(folder / "model", chats.CHATML)
    records = [chats.chat(*range(number, number + 1 + number % 3)) for number in range(40)]
    assert chats.built(folder / "data", file, records, LENGTH, "--shard-mebibytes", "0.003") == 0
    return str(folder / "data")


def test_processes_and_interruptions_do_not_change_the_bytes(uri, tmp_path):
    file = chats.tokenizer(tmp_path / "model", chats.CHATML)
    records = [chats.chat(*range(number, number + 1 + number % 3)) for number in range(40)]
    options = ("--shard-mebibytes", "0.003", "--processes", "2")
    assert chats.built(tmp_path / "data", file, records, LENGTH, *options) == 0
    ours, theirs = ({path.name: path.read_bytes() for path in folder.iterdir() if path.is_file() and
                     path.name != "made-by"} for folder in (tmp_path / "data", Path(uri)))  # fmt: skip
    assert ours == theirs
    assert len([name for name in ours if name.endswith(".bin")]) > 2


@pytest.mark.parametrize("documents", ["Packed", "Bucketed"])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_weights_of_all_ranks_are_those_of_the_answers_and_add_up_to_1(uri, documents, world):
    reader = Reader(DataConfig(uri=uri, documents=documents), LENGTH, 3)
    plan = plan_batch(7, 2, world)
    found = {}
    for rank in range(world):
        for part in microbatches(reader, plan, rank, 5):
            for row, sample in enumerate(part.samples):
                found[sample] = (part.tokens[row].tolist(), (part.weights[row] > 0).tolist())
                assert len({round(weight, 9) for weight in part.weights[row].tolist()}) == 2
    total = sum(sum(weights) for _, weights in found.values())
    assert total == reader.weight_sums(5, 12).sum() < reader.predicted(5, 12).sum()
    sums = sum(
        float(part.weights.double().sum()) for rank in range(world) for part in microbatches(reader, plan, rank, 5)
    )
    assert sums == pytest.approx(1, abs=1e-6)
    originals = {tuple(tokens): weights for tokens, weights in samples(Path(uri))[1]}
    for tokens, weights in found.values():
        rest, weights = tokens, [0, *map(int, weights)]
        while any(rest):
            sample = next(key for key in originals if tuple(rest[: len(key)]) == key)
            assert weights[: len(sample)] == originals[sample]
            rest, weights = rest[len(sample) :], weights[len(sample) :]


def test_a_batch_without_trained_tokens_has_no_weights(uri, monkeypatch):
    reader = Reader(DataConfig(uri=uri, documents="Packed"), LENGTH, 3)
    parts = elements.parts
    monkeypatch.setattr(elements, "parts", lambda *of: {**(all := parts(*of)), "weight": np.zeros_like(all["weight"])})
    for part in microbatches(reader, plan_batch(4, 4, 1), 0, 0):
        assert torch.equal(part.weights, torch.zeros_like(part.weights))


def test_a_mixture_can_have_text_beside_chats(uri, tmp_path):
    file = chats.tokenizer(tmp_path / "model", chats.CHATML)
    source = chats.written(tmp_path / "text.jsonl", [{"text": "some text " * 9}] * 30)
    out = str(tmp_path / "text")
    assert cli.main(["data", "build", "--out", out, "--tokenizer", file, "--processes", "1", source]) == 0
    assert cli.main(["data", "pack", out, "--length", str(LENGTH)]) == 0
    mixture = [{"uri": uri, "weight": 1}, {"uri": out, "weight": 1}]
    reader = Reader(DataConfig.model_validate({"mixture": mixture, "documents": "Packed"}), LENGTH, 3)
    sets, _, _ = reader.places(np.arange(20))
    sums, predicted = reader.weight_sums(0, 20), reader.predicted(0, 20)
    assert ((sums == predicted) == (sets == 1)).all()
    found = reader.sequences(np.arange(20))
    assert (found.weights.sum(1) == sums).all()


@pytest.mark.parametrize(
    ("documents", "length", "said"),
    [
        ("Joined", LENGTH, "data.documents Joined cuts them: set trainer.data.documents to Packed or Bucketed"),
        ("Masked", LENGTH, "data.documents Masked cuts them"),
        ("Packed", LENGTH - 1, f"set trainer.model.sequenceLength to {LENGTH} or more, or build with --length"),
    ],
)
def test_chats_are_never_cut_by_the_trainer(uri, documents, length, said):
    with pytest.raises(InvalidInput, match=said):
        Reader(DataConfig(uri=uri, documents=documents), length, 3)


def test_scripts_do_not_read_chats_without_their_weights(uri):
    with pytest.raises(InvalidInput, match=r"several fields \(token uint16, weight uint8\)"):
        Sequences(uri, 20, 0, CacheSettings(1 << 30), 1)


def test_a_weight_that_is_neither_0_nor_1_is_damage(uri, tmp_path, capsys):
    shutil.copytree(uri, tmp_path / "data")
    manifest = json.loads((tmp_path / "data/manifest.json").read_text())
    shard = tmp_path / "data" / manifest["shards"][0]["file"]
    shard.write_bytes(shard.read_bytes()[:-1] + b"\x02")
    assert cli.main(["data", "verify", str(tmp_path / "data")]) == 1
    assert "is damaged" in capsys.readouterr().err
