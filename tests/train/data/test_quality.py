"""Documents that occur twice, and training documents that overlap with evaluation data."""

import json

import pytest

from builders.train.built import documents
from concertina_trainer import cli
from concertina_trainer.data.build.duplicates import ROW

TEXTS = [f"document {i % 70} of {'x' * (i % 7)}" for i in range(200)]
UNIQUE = list(dict.fromkeys(TEXTS))
SIZE = ("--shard-mebibytes", "0.001")


@pytest.fixture
def sources(tmp_path):
    (tmp_path / "in").mkdir()
    for number in range(4):
        lines = [json.dumps({"text": text}) + "\n" for text in TEXTS[50 * number : 50 * number + 50]]
        (tmp_path / "in" / f"{number}.jsonl").write_text("".join(lines))
    return tmp_path / "in"


def command(out, *arguments):
    return cli.main(["data", "build", "--out", str(out), *SIZE, *map(str, arguments)])


def contents(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_the_first_of_equal_documents_is_kept_for_any_processes_and_shares(tmp_path, sources, capsys):
    assert len(UNIQUE) < len(TEXTS)
    assert command(tmp_path / "one", "--duplicates", "remove", "--processes", "1", sources) == 0
    assert documents(tmp_path / "one") == UNIQUE
    said = f"{len(TEXTS) - len(UNIQUE)} documents occur earlier in the data, and were removed"
    assert said in capsys.readouterr().out
    assert cli.main(["data", "verify", str(tmp_path / "one")]) == 0
    for share in ("1/2", "0/2"):
        assert command(tmp_path / "two", "--duplicates", "remove", "--share", share, sources) == 0
    one, two = contents(tmp_path / "one"), contents(tmp_path / "two")
    assert one == two
    assert not [name for name in one if "building" in name]
    named = {
        name
        for shard in json.loads(one["manifest.json"])["shards"]
        for name in (shard["file"], shard["documents_file"])
    }
    assert {name for name in one if name.startswith("shard-")} == named, "no replaced shard is left"
    shards = json.loads(one["manifest.json"])["shards"]
    assert all(each["text_bytes"] == each["tokens"] - each["documents"] for each in shards), "without separators"


def test_records_that_a_power_failure_cut_off_are_refused(tmp_path, sources, capsys):
    options = ("--duplicates", "remove", "--processes", "1")
    assert command(tmp_path / "out", *options, "--share", "0/2", sources) == 0
    record = next((tmp_path / "out" / "building").glob("*-digests/part-*"))
    record.write_bytes(record.read_bytes()[: -ROW.itemsize])
    assert command(tmp_path / "out", *options, "--share", "1/2", sources) == 78
    assert "building can't be read (a power failure may have cut them off)" in capsys.readouterr().err


def test_validation_documents_are_unique_too(tmp_path, sources):
    options = ["--duplicates", "remove", "--validation", "0.3", "--processes", "1"]
    assert command(tmp_path / "out", *options, sources) == 0
    training, aside = documents(tmp_path / "out"), documents(tmp_path / "out" / "validation")
    assert len(aside) > 5
    assert sorted([*training, *aside]) == sorted(UNIQUE)
    shards = json.loads((tmp_path / "out" / "validation" / "manifest.json").read_text())["shards"]
    assert {path.name for path in (tmp_path / "out" / "validation").glob("*.bin")} == {each["file"] for each in shards}


def test_duplicates_that_are_only_counted_stay(tmp_path, sources, capsys):
    assert command(tmp_path / "out", "--duplicates", "count", "--processes", "1", sources) == 0
    assert documents(tmp_path / "out") == TEXTS
    assert f"{len(TEXTS) - len(UNIQUE)} documents occur earlier in the data, and were kept" in capsys.readouterr().out


WORDS = " ".join(f"word{i}" for i in range(30))


def test_a_build_with_too_many_contaminated_documents_ends_with_a_report(tmp_path, capsys):
    for name, texts in (("a", ["clean " * 20, WORDS, f"more {WORDS}"]), ("eval", [WORDS])):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    build = ["--against", tmp_path / "eval.jsonl", "--processes", "1", tmp_path / "a.jsonl"]
    assert command(tmp_path / "out", "--most-overlapping", "1", *build) == 78
    assert "2 training documents share 13 consecutive words with the evaluation data, and" in capsys.readouterr().err
    report = json.loads((tmp_path / "out" / "overlap.json").read_text())
    assert (report["trainingDocuments"], report["examples"]) == (2, [WORDS[:200], f"more {WORDS}"[:200]])
    assert not (tmp_path / "out" / "manifest.json").exists()
    assert command(tmp_path / "out", "--most-overlapping", "2", *build) == 0, "the finished shards are used"
    assert len(documents(tmp_path / "out")) == 3


def test_documents_that_were_removed_as_duplicates_do_not_count_as_contaminated(tmp_path):
    for name, texts in (("a", ["clean " * 20, WORDS, WORDS, f"more {WORDS}", WORDS]), ("eval", [WORDS])):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    build = ["--against", tmp_path / "eval.jsonl", "--most-overlapping", "2", "--processes", "1", tmp_path / "a.jsonl"]
    assert command(tmp_path / "all", *build) == 78
    assert command(tmp_path / "counted", "--duplicates", "count", *build) == 78
    assert command(tmp_path / "unique", "--duplicates", "remove", *build) == 0
    reports = [json.loads((tmp_path / out / "overlap.json").read_text()) for out in ("all", "counted", "unique")]
    assert [report["trainingDocuments"] for report in reports] == [4, 4, 2]
    assert reports[2]["examples"] == [WORDS[:200], f"more {WORDS}"[:200]], "each text once"


def test_options_that_need_others_are_refused(tmp_path, sources, capsys):
    assert command(tmp_path / "out", "--most-overlapping", "1", sources) == 78
    assert "--most-overlapping needs --against" in capsys.readouterr().err
