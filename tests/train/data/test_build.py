"""Building data: every kind of source and tokenizer, and the same bytes however the work is shared or interrupted."""

import base64
import gzip
import json
import subprocess
import sys
import time

import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet
import pytest

from builders.train.built import documents
from concertina_data.data_manifest import parse
from concertina_state.errors import InvalidInput
from concertina_trainer import cli
from concertina_trainer.data import tokenizer as tokenizers
from concertina_trainer.data.build.build import build
from concertina_trainer.data.build.find import find
from concertina_trainer.data.build.recipe import Recipe

TEXTS = [f"Document {i}: " + "naïve words — again and again. " * (i % 7) for i in range(300)]


def contents(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def json_lines(path, texts=TEXTS):
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def as_json_lines(folder):
    json_lines(folder / "a.jsonl")


def as_json(folder):
    json_lines(folder / "a.json")


def as_zipped_lines(folder):
    lines = "".join(json.dumps({"text": text}) + "\n\n" for text in TEXTS)
    (folder / "a.json.gz").write_bytes(gzip.compress(lines.encode()))


def as_parquet(folder):
    table = pa.table({"id": range(len(TEXTS)), "text": TEXTS})
    parquet.write_table(table, folder / "a.parquet", row_group_size=23)
    (folder / "README.md").write_text("not a document")


def as_dataset(folder):
    """As `datasets.Dataset.save_to_disk` lays it out, split and all."""
    for split, texts in (("train", TEXTS), ("test", ["secret"])):
        (folder / split).mkdir()
        (folder / split / "state.json").write_text("{}")
        schema = pa.schema({"text": pa.string()})
        with pa.ipc.new_stream(folder / split / "data-00000-of-00001.arrow", schema) as writer:
            writer.write_table(pa.table({"text": texts}), max_chunksize=19)
    (folder / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')


def test_a_file_of_one_json_array_is_not_one_document(tmp_path):
    (tmp_path / "a.json").write_text(json.dumps([{"text": text} for text in TEXTS]))
    with pytest.raises(InvalidInput, match="holds a list, not an object"):
        list(build(find([str(tmp_path / "a.json")]), str(tmp_path / "out")))


def as_text(folder):
    for i, text in enumerate(TEXTS):
        (folder / f"{i:03}.txt").write_text(text)


WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None
from concertina.cli.main import app
app(sys.argv[1:])
"""


def test_the_command_needs_no_torch(tmp_path):
    """`concertina-cli[data]` installs none."""
    as_parquet(tmp_path)
    list(build(find([str(tmp_path)]), str(tmp_path / "with")))
    for arguments in (
        ("build", tmp_path / "a.parquet", "--out", tmp_path / "without"),
        ("verify", tmp_path / "without"),
    ):
        command = [sys.executable, "-c", WITHOUT_TORCH, "data", *map(str, arguments)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
    assert documents(tmp_path / "without") == TEXTS
    assert contents(tmp_path / "without") == contents(tmp_path / "with")


@pytest.mark.parametrize("form", [as_json_lines, as_json, as_zipped_lines, as_parquet, as_dataset, as_text])
@pytest.mark.parametrize("shard_bytes", [1_000, 10**9])
def test_every_document_of_every_format_is_there_once_and_in_order(tmp_path, form, shard_bytes):
    source, out = tmp_path / "in", tmp_path / "out"
    source.mkdir()
    form(source)
    list(build(find([str(source)]), str(out), shard_bytes))
    assert documents(out) == TEXTS


def test_sources_in_a_store(s3, tmp_path):
    from concertina_state.objects.prefix import ObjectPrefix

    as_parquet(tmp_path)
    json_lines(tmp_path / "b.jsonl", ["one", "two"])
    uri = f"s3://train/{tmp_path.name}"
    for name in ("a.parquet", "b.jsonl"):
        ObjectPrefix(uri).put(name, tmp_path / name)
    assert [source.location for source in find([uri])] == [f"{uri}/a.parquet", f"{uri}/b.jsonl"]
    list(build(find([uri]), str(tmp_path / "out"), 3_000))
    assert documents(tmp_path / "out") == [*TEXTS, "one", "two"]
    for place in (f"{uri}/b.jsonl", f"file://{tmp_path}/b.jsonl"):
        out = tmp_path / place[:2]
        list(build(find([place]), str(out), 10))
        assert documents(out) == ["one", "two"]


def test_names_are_taken_as_they_stand(s3, tmp_path):
    """No letter of a URI or path begins a query or a fragment: data would land in another folder."""
    source = json_lines(tmp_path / "a.jsonl")
    name = "a ?b=c#d%20e"
    for out in (str(tmp_path / name), f"file://{tmp_path}/{name}-uri", f"s3://train/{tmp_path.name}/{name}"):
        assert cli.main(["data", "build", "--processes", "1", "--out", out, str(source)]) == 0
        assert cli.main(["data", "verify", out]) == 0
    assert {path.name for path in tmp_path.iterdir()} == {source.name, name, f"{name}-uri"}
    from concertina_state.objects.prefix import ObjectPrefix

    assert {key.split("/")[0] for key in ObjectPrefix(f"s3://train/{tmp_path.name}").list("")} == {name}


def command(out, source, *options):
    started = [sys.executable, "-m", "concertina_trainer.cli", "data", "build", "--out", str(out)]
    return [*started, "--shard-mebibytes", "0.002", "--validation", "0.2", *options, str(source)]


def test_any_number_of_processes_shares_and_kills_gives_the_same_bytes(tmp_path):
    source = json_lines(tmp_path / "a.jsonl")
    list(build(find([str(source)]), str(tmp_path / "one"), int(0.002 * 2**20), Recipe(validation=0.2)))
    expected = contents(tmp_path / "one")
    assert len(expected) > 20
    subprocess.run(command(tmp_path / "two", source, "--processes", "2"), check=True)
    assert contents(tmp_path / "two") == expected
    for share in ("1/2", "0/2"):
        assert "manifest.json" not in contents(tmp_path / "shares") if (tmp_path / "shares").exists() else True
        assert cli.main(command(tmp_path / "shares", source, "--processes", "1", "--share", share)[3:]) == 0
    assert contents(tmp_path / "shares") == expected

    killed = tmp_path / "killed"
    process = subprocess.Popen(command(killed, source, "--processes", "1"))
    while process.poll() is None and not list(killed.glob("building/*/part-*.json")):
        time.sleep(0.001)
    process.kill()
    process.wait()
    first, *_, last = build(find([str(source)]), str(killed), int(0.002 * 2**20), Recipe(validation=0.2))
    assert first.done > 0 or (killed / "manifest.json").exists(), "what the killed process had done is not done again"
    assert last.manifest is not None
    assert contents(killed) == expected


def test_data_that_something_else_made_stay(tmp_path):
    out = tmp_path / "out"
    first, second = json_lines(tmp_path / "a.jsonl"), json_lines(tmp_path / "b.jsonl", TEXTS[:5])
    list(build(find([str(first)]), str(out), 2_000, Recipe(validation=0.2)))
    before = contents(out)
    for sources, recipe in ((second, Recipe(validation=0.2)), (first, Recipe())):
        with pytest.raises(
            InvalidInput, match="already contains data that were built from other sources or with other options"
        ):
            list(build(find([str(sources)]), str(out), 2_000, recipe))
    assert contents(out) == before
    (out / "shard-000003.bin").unlink()
    list(build(find([str(first)]), str(out), 2_000, Recipe(validation=0.2)))
    assert contents(out) == before, "the same command brings back what is missing"


def test_who_is_overtaken_by_another_build_ends_and_harms_no_data(tmp_path):
    source, out = find([str(json_lines(tmp_path / "a.jsonl"))]), tmp_path / "out"
    overtaken = build(source, str(out), 2_000)
    next(overtaken), next(overtaken)
    list(build(source, str(out), 2_000, Recipe(validation=0.2)))
    before = contents(out)
    with pytest.raises(InvalidInput, match=r"another build into .*out has started with other"):
        list(overtaken)
    assert contents(out) == before


def test_what_was_written_over_by_a_build_in_between_is_not_taken_for_done(tmp_path):
    source, out = find([str(json_lines(tmp_path / "a.jsonl"))]), tmp_path / "out"
    for recipe in (Recipe(), Recipe(validation=0.9)):
        interrupted = build(source, str(out), 2_000, recipe)
        next(interrupted), next(interrupted)
    *_, last = build(source, str(out), 2_000)
    assert last.manifest is not None
    assert cli.main(["data", "verify", str(out)]) == 0


def test_a_record_that_was_cut_off_is_made_anew_by_the_next_run(tmp_path):
    source, out = find([str(json_lines(tmp_path / "a.jsonl"))]), tmp_path / "out"
    list(build(source, str(tmp_path / "fresh"), 2_000))
    interrupted = build(source, str(out), 2_000)
    next(interrupted), next(interrupted)
    [record] = out.glob("building/*/part-*.json")
    record.write_bytes(b"")
    with pytest.raises(InvalidInput, match=r"part-000000\.json can't be read.* run the same command again"):
        list(build(source, str(out), 2_000))
    list(build(source, str(out), 2_000))
    assert contents(out) == contents(tmp_path / "fresh")


def test_what_was_begun_with_another_tokenizer_is_not_gone_on_with(tmp_path, tokenizer_file):
    source, out = find([str(json_lines(tmp_path / "a.jsonl"))]), tmp_path / "out"
    recipe = Recipe(tokenizer=str(tokenizer_file))
    list(build(source, str(out), 2_000, recipe, share=(0, 2)))
    changed = json.loads(tokenizer_file.read_text())
    changed["model"]["merges"] = changed["model"]["merges"][:-3]
    tokenizer_file.write_text(json.dumps(changed))
    tokenizers.load.cache_clear()
    list(build(source, str(out), 2_000, recipe))
    list(build(source, str(tmp_path / "fresh"), 2_000, recipe))
    manifests = [parse((folder / "manifest.json").read_bytes(), "") for folder in (out, tmp_path / "fresh")]
    assert manifests[0].digest == manifests[1].digest


def test_documents_set_aside_go_by_their_content(tmp_path):
    source = json_lines(tmp_path / "a.jsonl", [*TEXTS, *TEXTS[:50]])
    list(build(find([str(source)]), str(tmp_path / "out"), 2_000, Recipe(validation=0.1)))
    training, aside = documents(tmp_path / "out"), documents(tmp_path / "out" / "validation")
    assert not set(training) & set(aside)
    assert sorted(training + aside) == sorted([*TEXTS, *TEXTS[:50]])
    assert 0.05 < len(aside) / 350 < 0.2
    list(build(find([str(json_lines(tmp_path / "b.jsonl", TEXTS[::-1]))]), str(tmp_path / "turned"), 10**6,
               Recipe(validation=0.1)))  # fmt: skip
    assert set(documents(tmp_path / "turned" / "validation")) == set(aside)


@pytest.fixture
def tokenizer_file(tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator(TEXTS, trainer)
    made.save(str(tmp_path / "tokenizer.json"))
    return tmp_path / "tokenizer.json"


def test_a_tokenizer_of_hugging_face(tmp_path, tokenizer_file):
    from tokenizers import Tokenizer

    texts = [*TEXTS, "what looks like <|endoftext|> is text"]
    out = tmp_path / "out"
    list(build(find([str(json_lines(tmp_path / "a.jsonl", texts))]), str(out), 3_000,
               Recipe(tokenizer=str(tokenizer_file))))  # fmt: skip
    manifest = parse((out / "manifest.json").read_bytes(), "")
    loaded = Tokenizer.from_file(str(out / "tokenizer.json"))
    assert (manifest.element_bytes, manifest.vocab_size) == (2, loaded.get_vocab_size())
    found = []
    for shard in manifest.shards:
        tokens = np.fromfile(out / shard.file, "<u2")
        begins = np.fromfile(out / shard.documents_file, "<u8")
        assert (tokens[begins[1:] - 1] == manifest.tokenizer.separator).all()
        assert (tokens == manifest.tokenizer.separator).sum() == shard.documents
        found += [loaded.decode(part[:-1].tolist()) for part in np.split(tokens, begins[1:])]
    assert found == [loaded.decode(loaded.encode(text).ids) for text in TEXTS] + found[-1:]
    assert found[-1].replace(" ", "").endswith("<|endoftext|>ĠisĠtext")


def test_an_encoding_of_tiktoken(tmp_path):
    import tiktoken

    ranks = {bytes([b]): b for b in range(256)} | {b"ag": 256, b"ain": 257, b"again": 258, b"in": 259}
    file = tmp_path / "tiny.tiktoken"
    file.write_bytes(b"".join(base64.b64encode(token) + b" %d\n" % rank for token, rank in ranks.items()))
    source, pattern = json_lines(tmp_path / "a.jsonl"), r"\w+|\W+"
    list(build(find([str(source)]), str(tmp_path / "out"), 3_000, Recipe(str(file), "", pattern)))
    manifest = parse((tmp_path / "out" / "manifest.json").read_bytes(), "")
    encoding = tiktoken.Encoding("t", pat_str=pattern, mergeable_ranks=ranks, special_tokens={"<|endoftext|>": 260})
    expected = [token for text in TEXTS for token in [*encoding.encode(text), 260]]
    tokens = np.concatenate([np.fromfile(tmp_path / "out" / shard.file, "<u2") for shard in manifest.shards])
    assert tokens.tolist() == expected
    with pytest.raises(InvalidInput, match="give --split-pattern"):
        Recipe(str(file)).load_tokenizer()


def test_overlap_with_evaluation_data_is_counted(tmp_path):
    words = [f"word{i}" for i in range(200)]
    train = [" ".join(words[:60]), "Nothing of it. " * 20, "x " + " ".join(words[100:116]).upper().replace(" ", ", ")]
    wanted = [" ".join([*words[40:60], "other"]), " ".join(words[102:115]), "too short", " ".join(words[150:170])]
    source = json_lines(tmp_path / "a.jsonl", train)
    json_lines(tmp_path / "eval.jsonl", wanted)
    out = tmp_path / "out"
    list(build(find([str(source)]), str(out), 100, Recipe(against=(str(tmp_path / "eval.jsonl"),))))
    found = json.loads((out / "overlap.json").read_text())
    assert found["trainingDocuments"] == 2
    [file] = found["files"]
    assert (file["documents"], file["tooShort"], file["documentsFound"]) == (4, 1, 2)
    assert (file["ngrams"], file["ngramsFound"]) == (9 + 1 + 8, 8 + 1)


@pytest.mark.parametrize(
    ("content", "recipe", "said"),
    [
        (
            '{"text": "a"}\n{"text": \n',
            Recipe(),
            r"a.jsonl, line 2 can't be read as JSON \(Expecting value",
        ),
        ('{"body": "a"}\n', Recipe(), r"line 1 has no text, but body: name the column with --column"),
        ('["a"]\n', Recipe(), r"line 1 holds a list, not an object"),
        ('{"text": 5}\n', Recipe(), r"its text is a number, not text"),
        ('{"text": "\xff"}\n', Recipe(), r"a.jsonl is not UTF-8 \(byte 10 is 0xff\): convert it to UTF-8"),
        ('{"text": "a"}\n', Recipe(separator="<s>"), "leave out --separator"),
        ('{"text": ""}\n', Recipe(), "no text to train on"),
        ('{"text": "a"}\n', Recipe(tokenizer="gpt2"), "is none of: bytes"),
        ('{"text": "a"}\n', Recipe(tokenizer="no/such.json"), "can't be read: No such file"),
    ],
)
def test_what_is_wrong_is_said(tmp_path, content, recipe, said):
    (tmp_path / "a.jsonl").write_text(content, encoding="latin-1")
    with pytest.raises(InvalidInput, match=said):
        list(build(find([str(tmp_path / "a.jsonl")]), str(tmp_path / "out"), recipe=recipe))


def test_the_command_verifies(tmp_path, capsys):
    out = tmp_path / "out"
    assert cli.main(command(out, json_lines(tmp_path / "a.jsonl"), "--processes", "1")[3:]) == 0
    assert cli.main(["data", "verify", str(out)]) == 0
    assert "no of" in capsys.readouterr().out
    damaged = out / "shard-000003.bin"
    damaged.write_bytes(b"?" + damaged.read_bytes()[1:])
    (out / "shard-000005.bin").unlink()
    assert cli.main(["data", "verify", str(out)]) == 1
    said = capsys.readouterr()
    assert "shard-000003.bin is damaged" in said.err
    assert "shard-000005.bin is missing" in said.err
    assert "2 of" in said.out
    aside = out / "validation" / "shard-000001.documents"
    aside.write_bytes(bytes(8) + aside.read_bytes())
    assert cli.main(["data", "verify", str(out)]) == 1
    assert "validation/shard-000001.documents is damaged" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["build", "--shard-mebibytes", "0"], "--shard-mebibytes: give a number of 0.001 or more"),
        (["build", "--ngram", "0"], "--ngram: give a whole number of 1 or more"),
        (["build", "--processes", "-1"], "--processes: give a whole number of 1 or more"),
        (["build", "--share", "2/2"], "--share: give I/N with I from 0 to N - 1"),
        (["pack", "--length", "0"], "--length: give a whole number of 2 or more"),
        (["verify", "--threads", "many"], "--threads: give a whole number of 1 or more"),
    ],
)
def test_numbers_that_make_no_sense_are_refused(tmp_path, capsys, arguments, said):
    with pytest.raises(SystemExit) as ended:
        cli.main(["data", *arguments, *(["--out", str(tmp_path)] if "build" in arguments else []), str(tmp_path)])
    assert ended.value.code == 2
    assert said in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_the_whole_command_brings_no_torch(tmp_path):
    code = f"import sys; from concertina.cli.main import app; sys.argv[1:] = ['data', 'show', {str(tmp_path)!r}]\n"
    code += "try: app()\nexcept SystemExit as end: print(end.code, 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "78 False\n"
    assert "has no manifest.json" in done.stderr
