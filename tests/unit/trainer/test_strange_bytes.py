"""Arbitrary content of storage, of a data set, or of a pod's environment: it is read, or refused with a clear error."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import tempfile
from collections.abc import Callable
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from pydantic import ValidationError

from builders.mutated import Reader, all_of, plays
from builders.train.published import publish
from builders.train.record_files import archive, example, records
from concertina_data import data_manifest as data_manifest
from concertina_protocol import SnapshotId, Undone
from concertina_protocol.sidecar import Damaged
from concertina_state.checkpoints import catalogue, latest, manifest, reader, rollback
from concertina_state.checkpoints.reader import StoredCheckpoint
from concertina_state.errors import InvalidInput
from concertina_state.format.read_plan import reads
from concertina_state.format.shardfile import Chunk, Header, Layout, ShardMetadata, header_length, parse_header
from concertina_state.objects import retry
from concertina_state.objects.prefix import ObjectPrefix, StorageError
from concertina_trainer.config.model_config import ModelConfig
from concertina_trainer.config.trainer import TrainerConfig
from concertina_trainer.data import packing
from concertina_trainer.data.build import sources
from concertina_trainer.data.build.sources import DataSource
from concertina_trainer.format import hf_config
from concertina_trainer.format.hf_config import config_json
from concertina_trainer.state.weights import SafetensorsFiles

HERE = "tests/unit/trainer/test_strange_bytes.py"
FOLDER = Path(tempfile.mkdtemp(prefix="concertina-fuzz-"))
SHARD = data_manifest.TokenShard("a.bin", 100, 200, "0" * 64, 7, "a.docs", 3, "1" * 64)
DATA = data_manifest.DataManifest(
    data_manifest.FORMAT, 256, data_manifest.TokenizerFacts("bytes", "digest", 0),
    (data_manifest.token_field(256), data_manifest.Field("time", "float64", 3)), (SHARD, SHARD),
)  # fmt: skip
LAYOUT = Layout([Chunk("b", "F32", (4, 0), (2, 3), (6, 3)), Chunk("half", "BF16", (0,), (3,), (3,))])
FACTS = ShardMetadata(SnapshotId(3, 7, "digest", 2), 1, 210, "c", "d", skipped=((1, 5),))


def published() -> Path:
    """Create a run's folder with two finished checkpoints by the uploader itself, and return its path."""
    folder, scratch = FOLDER / "run", FOLDER / "scratch"
    scratch.mkdir()
    for step in (5, 9):
        assert publish(folder.as_uri(), scratch, 1, step).durable
    return folder


RUN = published()
OLDER, NEWER = (RUN / "u1" / "round-1" / f"step-{step}" for step in (5, 9))


def instead_of(file: Path, read: Callable[[], object]) -> Callable[[bytes], object]:
    """Return a function that calls `read` while the file has other content."""
    whole = file.read_bytes()

    def of(content: bytes) -> object:
        file.write_bytes(content)
        try:
            return read()
        finally:
            file.write_bytes(whole)

    return of


def went_back() -> int:
    """Return the step of the checkpoint to which a rollback goes back."""
    checkpoint_before = rollback.go_back(RUN.as_uri(), "u1", Undone(1, 100))
    assert checkpoint_before is not None
    assert checkpoint_before.step in (5, 9)
    return checkpoint_before.step


def listed() -> list[manifest.Manifest]:
    whole, problems = catalogue.finished(ObjectPrefix(RUN.as_uri()))
    assert len(whole) + len(problems) == 2
    assert all(len(problem) < 2000 for problem in problems)
    return whole


def all_bytes() -> list[str]:
    return catalogue.verify(StoredCheckpoint(NEWER.as_uri()), lambda count: None)


def header(content: bytes) -> Header:
    """Read a header and plan the reads, all of which must be within the file.

    Raises:
        Damaged: If the header is cut off.
    """
    begin = header_length(content[:8])
    if begin > len(content):
        raise Damaged("it is cut off")
    parsed_header = parse_header(content[8:begin])
    plan = reads({0: parsed_header}, LAYOUT.chunks)
    for item in plan.items:
        assert item.begin >= begin
        assert item.size >= 0
    return parsed_header


def weights(content: bytes) -> object:
    folder = FOLDER / "weights"
    folder.mkdir(exist_ok=True)
    (folder / "model.safetensors").write_bytes(content)
    return SafetensorsFiles(folder.as_uri()).of(MODEL)[0]


def safetensors() -> bytes:
    entries = {
        "model.embed_tokens.weight": {"dtype": "F32", "shape": [4, 2], "data_offsets": [0, 32]},
        "model.norm.weight": {"dtype": "F32", "shape": [2], "data_offsets": [32, 40]},
    }
    text = json.dumps(entries).encode()
    return len(text).to_bytes(8, "little") + text + bytes(40)


def json_header(content: bytes) -> object:
    """Read a safetensors file with this JSON as its header."""
    return weights(len(content).to_bytes(8, "little") + content + bytes(40))


def documents(ending: str) -> Callable[[bytes], list[bytes]]:
    """Return a function that reads the documents of a file with that ending and this content, piece by piece."""
    file = FOLDER / f"documents.{ending}"

    def of(content: bytes) -> list[bytes]:
        file.write_bytes(content)
        source = DataSource(str(file), len(content))
        pieces = sources.cut(source, 40, ("text",))
        return [text for piece in pieces for text in sources.read_documents(piece, "text")]

    return of


def parquet() -> bytes:
    file = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table({"text": ["one", "two", None, "three"] * 20}), file, row_group_size=16)
    return file.getvalue()


def arrow() -> bytes:
    file = io.BytesIO()
    table = pyarrow.table({"text": ["one", "two", None, "three"] * 20})
    with pyarrow.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table, max_chunksize=16)
    return file.getvalue()


MANY = 100_000
"""Maximum length of an error in characters: it has a sentence for each field."""
TRAINER = TrainerConfig.model_validate({"data": {"uri": "/data"}}).model_dump_json(by_alias=True).encode()
MODEL = ModelConfig()
TAR = archive((f"{name}.text", name.encode()) for name in "abc")
TFRECORD = records(example({"text": name}) for name in (b"a", b"b"))
LINES = b'{"text": "a"}\n{"text": "b", "more": [1, {"c": 2}]}\n\n{"text": null}\n'
SAID = (InvalidInput, StorageError)
LATEST = RUN / latest.LATEST
READERS = {
    "a checkpoint's manifest": Reader(
        lambda text: manifest.parse(text, "s3://b/x"),
        [(NEWER / manifest.NAME).read_bytes()],
        (InvalidInput,),
        manifest.Manifest,
    ),
    "a manifest, where a run goes back": Reader(
        instead_of(NEWER / manifest.NAME, went_back), [(NEWER / manifest.NAME).read_bytes()], (), int
    ),
    "a manifest among others": Reader(
        instead_of(NEWER / manifest.NAME, listed), [(NEWER / manifest.NAME).read_bytes()], (), list
    ),
    "LATEST": Reader(
        instead_of(LATEST, lambda: latest.read_all_of_latest(ObjectPrefix(RUN.as_uri()))),
        [LATEST.read_bytes()],
        (StorageError,),
        latest.Latest,
    ),
    "a shard in storage": Reader(
        instead_of(NEWER / "shard-0-of-2.safetensors", all_bytes),
        [(NEWER / "shard-0-of-2.safetensors").read_bytes()],
        (),
        list,
    ),
    "a shard's header": Reader(header, [LAYOUT.header(FACTS)], (Damaged,), Header),
    "the JSON of a shard's header": Reader(
        lambda text: header(len(text).to_bytes(8, "little") + text),
        [LAYOUT.header(FACTS)[8:]],
        (Damaged,),
        Header,
    ),
    "weights of Hugging Face's": Reader(weights, [safetensors()], SAID, list),
    "the JSON of Hugging Face's weights": Reader(json_header, [safetensors()[8:-40]], SAID, list),
    "config.json": Reader(
        lambda text: hf_config.check(text, "x/config.json", MODEL),
        [json.dumps(config_json(MODEL)).encode()],
        (InvalidInput,),
        most=MANY,
    ),
    "a data set's manifest": Reader(
        lambda text: data_manifest.parse(text, "s3://b/d"),
        [DATA.to_json()],
        (InvalidInput,),
        data_manifest.DataManifest,
    ),
    "what is packed": Reader(
        lambda text: packing.read(text, "s3://b/d", DATA, 32),
        [json.dumps({"format": 1, "data": DATA.digest, "length": 32, "packed": [3, 3], "bucketed": [4, 4],
                     "fill": 0.9}).encode()],
        (InvalidInput,),
        packing.Packing,
    ),
    "lines of documents": Reader(documents("jsonl"), [LINES], (InvalidInput,), list),
    "zipped lines of documents": Reader(documents("jsonl.gz"), [gzip.compress(LINES)], (InvalidInput,), list),
    "lines in bzip2": Reader(documents("jsonl.bz2"), [bz2.compress(LINES)], (InvalidInput,), list),
    "lines in xz": Reader(documents("jsonl.xz"), [lzma.compress(LINES)], (InvalidInput,), list),
    "lines in Zstandard": Reader(
        documents("jsonl.zst"), [pyarrow.compress(LINES, "zstd", True)], (InvalidInput,), list
    ),
    "text": Reader(documents("txt"), [LINES], (InvalidInput,), list),
    "Arrow": Reader(documents("arrow"), [arrow()], (InvalidInput,), list),
    "a tar archive": Reader(documents("tar"), [TAR], (InvalidInput,), list),
    "TFRecord": Reader(documents("tfrecord"), [TFRECORD], (InvalidInput,), list),
    "the trainer section of a manifest": Reader(
        lambda text: TrainerConfig.model_validate(manifest.parse(text, "s3://b/x").trainer),
        [(NEWER / manifest.NAME).read_bytes()[:-1] + b', "trainer": ' + TRAINER + b"}"],
        (InvalidInput, ValidationError),
        TrainerConfig,
        MANY,
    ),
}  # fmt: skip


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Retry damaged reads at once, instead of some seconds later."""
    monkeypatch.setattr(retry, "GRACE", (0.0, 0.0))
    monkeypatch.setattr(reader, "GRACE", (0.0, 0.0))


@pytest.mark.parametrize("name", READERS)
def test_what_is_strange_is_refused_by_name(name: str) -> None:
    assert plays(READERS, name, 40) == 40


def test_parquet_that_is_cut_short_anywhere_is_refused() -> None:
    """If bits of its footer are flipped, pyarrow itself ends the process (`terminate called after throwing`)."""
    whole, read = parquet(), documents("parquet")
    assert len(read(whole)) == 60
    for end in range(0, len(whole), 3):
        with pytest.raises(InvalidInput):
            read(whole[:end])


@pytest.mark.long(law=f"{HERE}::test_what_is_strange_is_refused_by_name")
@pytest.mark.timeout(1200)
def test_so_are_many_more(request: pytest.FixtureRequest) -> None:
    all_of("trainer", READERS, request)
