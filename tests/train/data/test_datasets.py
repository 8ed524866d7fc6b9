"""Building from folders laid out as Hugging Face's `datasets` 5.2 does: shards, splits, columns of any kind."""

import json

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest

from builders.train.built import documents
from concertina_state.errors import InvalidInput
from concertina_trainer import cli
from concertina_trainer.data.build.build import build
from concertina_trainer.data.build.find import find

TEXTS = [f"Document {i}: naïve words" for i in range(40)]
ROWS = [*TEXTS[:5], None, "", *TEXTS[5:]]


def table(texts=ROWS, kind=None):
    kind = kind or pa.string()
    return pa.table(
        {
            "id": range(len(texts)),
            "meta": [{"url": f"http://x/{i}", "tags": ["a", "b"]} for i in range(len(texts))],
            "messages": [[{"role": "user", "content": text or "-"}] for text in texts],
            "text": pa.array(texts, pa.string()).cast(kind),
        }
    ).replace_schema_metadata({"huggingface": json.dumps({"info": {"features": {}}})})


def arrow(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    with pa.ipc.new_stream(path, content.schema) as writer:
        writer.write_table(content, max_chunksize=7)


def saved(folder, content, shards=1):
    """`Dataset.save_to_disk`."""
    size = -(-len(content) // shards)
    for i in range(shards):
        arrow(folder / f"data-{i:05}-of-{shards:05}.arrow", content.slice(i * size, size))
    for name in ("dataset_info.json", "state.json"):
        (folder / name).write_text("{}")


def saved_splits(folder, **splits):
    """`DatasetDict.save_to_disk`."""
    for name, content in splits.items():
        saved(folder / name, content)
    (folder / "dataset_dict.json").write_text(json.dumps({"splits": [*splits]}))


def exported(folder):
    """As the hub has it, and `to_parquet`."""
    (folder / "data").mkdir(parents=True)
    (folder / "README.md").write_text("---\n---\n")
    for i, begin in enumerate((0, 20)):
        part = table().slice(begin, 20 if not i else None)
        parquet.write_table(part, folder / f"data/train-{i:05}-of-00002.parquet", row_group_size=7)
    parquet.write_table(table(["kept aside"]), folder / "data/validation-00000-of-00001.parquet")


def cached(folder):
    """Return the files that `load_dataset` leaves in its cache."""
    where = folder / "parquet/default-f3387fea91bd933c/0.0.0/a859584b6747f312"
    arrow(where / "parquet-train.arrow", table())
    arrow(where / "parquet-test.arrow", table(["kept aside"]))
    (where / "dataset_info.json").write_text("{}")


FORMS = {
    "shards": lambda folder: saved(folder, table(), 3),
    "large_string": lambda folder: saved(folder, table(kind=pa.large_string())),
    "string_view": lambda folder: saved(folder, table(kind=pa.string_view())),
    "splits": lambda folder: saved_splits(folder, train=table(), validation=table(["kept aside"])),
    "splits of one's own": lambda folder: saved_splits(folder, train=table(), extra=table(["kept aside"])),
    "parquet": exported,
    "cache": cached,
}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_what_datasets_writes_is_read_and_what_is_not_to_train_on_is_left_out(tmp_path, form):
    form(tmp_path / "in")
    told = []
    list(build(find([str(tmp_path / "in")], say=told.append), str(tmp_path / "out"), 500))
    assert documents(tmp_path / "out") == TEXTS
    assert any("(split " in line for line in told) == (form not in [*FORMS.values()][:3])


def test_splits_in_a_store_and_a_choice_of_them(s3, tmp_path):
    from concertina_state.objects.prefix import ObjectPrefix

    saved_splits(tmp_path / "in", train=table(), validation=table(["kept aside"]))
    uri = f"s3://train/{tmp_path.name}"
    for file in (tmp_path / "in").rglob("*.*"):
        ObjectPrefix(uri).put(str(file.relative_to(tmp_path / "in")), file)
    list(build(find([uri]), str(tmp_path / "out")))
    assert documents(tmp_path / "out") == TEXTS
    list(build(find([uri], "validation/*.arrow"), str(tmp_path / "aside")))
    assert documents(tmp_path / "aside") == ["kept aside"]


def test_files_whose_names_say_no_split_are_all_taken(tmp_path):
    for name in ("train.jsonl", "web/latest.jsonl", "tests/a.jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text('{"text": "a"}\n')
    assert len(find([str(tmp_path)])) == 3


@pytest.mark.parametrize(
    ("form", "column", "said"),
    [
        (
            lambda folder: saved(folder, table()),
            "meta",
            "data-00000-of-00001.arrow, row 1: its meta is a object, not text: name another column with --column",
        ),
        (
            lambda folder: saved(folder, table()),
            "body",
            "has no column body, but id, meta, messages, text: name the column",
        ),
        (exported, "messages", "00000-of-00002.parquet, row 1: its messages is a list, not text"),
        (exported, "meta.url", "has no column meta.url, but id, meta, messages, text: name the column with --column"),
        (lambda folder: saved_splits(folder, validation=table(), test=table()), "text", "the splits test, validation"),
    ],
)
def test_what_can_not_be_read_is_said(tmp_path, capsys, form, column, said):
    form(tmp_path / "in")
    build = ["data", "build", "--processes", "1", "--column", column, "--out", str(tmp_path / "out")]
    assert cli.main([*build, str(tmp_path / "in")]) == 78
    assert said in capsys.readouterr().err


def test_evaluation_data_with_a_column_of_their_own(tmp_path, capsys):
    words = " ".join(f"word{i}" for i in range(30))
    for name, column in (("a.jsonl", "text"), ("eval.jsonl", "question")):
        (tmp_path / name).write_text(json.dumps({column: words}) + "\n")
    build = ["data", "build", "--processes", "1", "--out", str(tmp_path / "out"), "--against"]
    build += [str(tmp_path / "eval.jsonl"), str(tmp_path / "a.jsonl")]
    assert cli.main(build) == 78
    assert "has no text, but question: name the column with --against-column" in capsys.readouterr().err
    assert cli.main([*build, "--against-column", "question"]) == 0
    assert "1 of 1 documents, 18 of 18 n-grams found" in capsys.readouterr().out
    with pytest.raises(InvalidInput, match="already contains data"):
        list(build_as_text(tmp_path))


def build_as_text(tmp_path):
    return build(find([str(tmp_path / "a.jsonl")]), str(tmp_path / "out"))
