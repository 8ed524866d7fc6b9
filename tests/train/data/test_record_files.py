"""Documents of WebDataset archives and of TFRecord files, and files that fsspec reads."""

import bz2
import gzip
import http.server
import json
import lzma
import os
import subprocess
import sys
import tarfile
import threading

import pyarrow as pa
import pytest

from builders.train.built import documents
from builders.train.record_files import archive, example, npy, records
from concertina_state.errors import InvalidInput
from concertina_state.objects.prefix import StorageError
from concertina_trainer import cli
from concertina_trainer.data.build.sources import DataSource, cut, read_records
from concertina_trainer.data.rangefile import CHUNK, listed, open_range, read_whole

TEXTS = [f"Document {i}: naïve words, " + "again and again. " * (i % 7) for i in range(120)]
SAMPLES = [
    (f"part/{i:04}.{suffix}", content)
    for i, text in enumerate(TEXTS)
    for suffix, content in (("TXT", text.encode()), ("jpg", b"\xff\xd8\xff"), ("ids.npy", npy([i, i])))
]
EXAMPLES = [example({"txt": text.encode(), "id": [i]}) for i, text in enumerate(TEXTS)]
TAR, RECORDS = archive(SAMPLES), records(EXAMPLES)
COMPRESS = {
    "": bytes, ".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress,
    ".zst": lambda content: pa.Codec("zstd").compress(content, asbytes=True),
}  # fmt: skip
GOAT = (
    b"\nR\n\x14\n\x08feature2\x12\x08\n\x06\n\x04goat\n\x14\n\x08feature3\x12\x08\x12\x06\n\x04[\xd3|?\n\x11\n\x08feature0"
    b"\x12\x05\x1a\x03\n\x01\x00\n\x11\n\x08feature1\x12\x05\x1a\x03\n\x01\x04"
)
"""Example in TensorFlow's tutorial about TFRecord."""


def command(folder, *arguments):
    options = ["--processes", "1", "--column", "txt", "--out", str(folder / "out")]
    return cli.main(["data", "build", *options, *map(str, arguments)])


def read(folder, name, content, *columns):
    (folder / name).write_bytes(content)
    [piece] = cut(DataSource(str(folder / name), len(content)), 2**20, columns)
    return list(read_records(piece, columns))


FORMS = [
    *((f"a.tar{end}", compress(TAR)) for end, compress in COMPRESS.items()),
    *((f"a.tfrecord{end}", compress(RECORDS)) for end, compress in COMPRESS.items()),
    ("a.TFRecord-00000-of-00001", RECORDS),
    *((f"a-{number}.tar", archive(SAMPLES, format=number)) for number in (tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT)),
]


@pytest.mark.parametrize(("name", "content"), FORMS, ids=[name for name, _ in FORMS])
def test_samples_become_documents_in_their_order(tmp_path, name, content):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / name).write_bytes(content)
    assert command(tmp_path, tmp_path / "in") == 0
    assert documents(tmp_path / "out") == TEXTS


def test_features_and_members_have_the_types_of_their_formats(tmp_path):
    [record] = read(tmp_path, "a.tfrecords", records([GOAT]), *(f"feature{i}" for i in range(4)))
    assert [record.values[f"feature{i}"].tolist() for i in (0, 1)] == [[0], [4]]
    assert record.values["feature2"] == b"goat"
    assert record.values["feature3"].tolist() == pytest.approx([0.9876])
    samples = read(tmp_path, "a.tar", TAR, "txt", "ids")
    assert [sample.values["ids"].tolist() for sample in samples] == [[i, i] for i in range(len(TEXTS))]
    assert samples[7].locate() == f"{tmp_path}/a.tar, sample part/0007"
    assert samples[7].values["jpg"] is None, "a member that nobody asked for is not read"


def test_fields_of_a_json_member_are_columns(tmp_path):
    texts = ["one", "ünïcode", "three"]
    content = archive(
        (f"{n}.{end}", part)
        for n, text in enumerate(texts)
        for end, part in (("jpg", b"\xff"), ("json", json.dumps({"text": text, "ids": [n, n + 1], "n": n}).encode()))
    )
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.tar").write_bytes(content)
    assert command(tmp_path, "--column", "json.text", tmp_path / "in") == 0
    assert documents(tmp_path / "out") == texts
    assert [sample.value("json.ids") for sample in read(tmp_path, "a.tar", content, "json.ids")] == [
        [0, 1], [1, 2], [2, 3],
    ]  # fmt: skip
    [whole, *_] = read(tmp_path, "a.tar", content, "json")
    assert json.loads(whole.value("json")) == {"text": "one", "ids": [0, 1], "n": 0}
    with pytest.raises(InvalidInput, match=r"sample 0 has no json\.title, but jpg, json"):
        read(tmp_path, "a.tar", content, "json.title")[0].value("json.title")
    for order in (1, -1):
        members = [("0.json", b'{"text": "a"}'), ("0.json.text", b"b")][::order]
        with pytest.raises(InvalidInput, match=r"the sample /0 has json\.text twice"):
            read(tmp_path, "a.tar", archive(members), "json.text")
    for bad, said in ((b"{", "can't be read as JSON"), (b"[1]", "holds a list, not an object"), (b"[" * 10**5, "JSON")):
        with pytest.raises(InvalidInput, match=f"the member 0.json {said}|the member 0.json .*{said}"):
            read(tmp_path, "a.tar", archive([("0.json", bad)]), "json.text")


def test_folders_and_descriptions_in_an_archive_are_no_samples(tmp_path):
    folder = tarfile.TarInfo("part")
    folder.type = tarfile.DIRTYPE
    content = folder.tobuf() + archive([("part/.hidden", b"?"), ("__meta__", b"?"), *SAMPLES[:3]])
    [record] = read(tmp_path, "a.tar", content, "txt")
    assert record.text("txt") == TEXTS[0].encode()


def spoilt(content, at, byte=0x7F):
    return content[:at] + bytes([content[at] ^ byte]) + content[at + 1 :]


def link():
    member = tarfile.TarInfo("part/0001.txt")
    member.type, member.linkname = tarfile.SYMTYPE, "/etc/passwd"
    return member.tobuf() + TAR


def long_header():
    member = tarfile.TarInfo("././@LongLink")
    member.type, member.size = tarfile.GNUTYPE_LONGNAME, 2**40
    return member.tobuf(tarfile.GNU_FORMAT) + TAR


def huge():
    member = tarfile.TarInfo("part/0000.txt")
    member.size = 2**40
    return member.tobuf(tarfile.GNU_FORMAT) + TAR


PART = archive(SAMPLES[:3])
CUT = {
    "tar without its end": ("a.tar", PART.rstrip(b"\0") + bytes(-len(PART.rstrip(b"\0")) % 512), "it is cut off"),
    "tar cut in a header": ("a.tar", TAR[: 3 * 1024 + 99], "can't be read as a tar archive"),
    "tar cut in a member": ("a.tar", TAR[:520], "unexpected end of data"),
    "empty tar": ("a.tar", b"", "it is cut off"),
    "damaged header": ("a.tar", spoilt(TAR, 1024 + 3), "a.tar can't be read as a tar archive (bad checksum)"),
    "two tars in one": ("a.tar", PART + archive([("b.txt", b"b")]), "a.tar continues after the mark of its end"),
    "gzip as tar": ("a.tar", gzip.compress(TAR), "a.tar can't be read as a tar archive"),
    "link": ("a.tar", link(), "the member part/0001.txt is a link, a device or a sparse file"),
    "long header": ("a.tar", long_header(), f"an extended header has {2**40} bytes"),
    "huge member": ("a.tar", huge(), f"the member part/0000.txt has {2**40} bytes, and at most"),
    "no suffix": ("a.tar", archive([("README", b"a")]), "the member README has no suffix"),
    "same name twice": ("a.tar", archive([("b.txt", b"a"), ("b.txt", b"b")]), "sample /b has txt twice"),
    "no text": ("a.tar", archive([("b.jpg", b"a"), ("b.cls", b"b")]), "sample b has no txt, but jpg, cls: name the"),
    "text of another kind": ("a.tar", archive([("b.txt", b"\xff\xd8\xff.")]), "sample b: its txt holds an image, not"),
    "record cut in its length": ("a.tfrecord", RECORDS[:5], "a.tfrecord, record 1 is cut off"),
    "record cut in its content": ("a.tfrecord", RECORDS[:40], "a.tfrecord, record 1 is cut off"),
    "second record cut": ("a.tfrecord", records(EXAMPLES[:2])[:-1], "a.tfrecord, record 2 is cut off"),
    "damaged length": ("a.tfrecord", spoilt(RECORDS, 0), "record 1 is damaged, because its length"),
    "damaged content": ("a.tfrecord", spoilt(RECORDS, 30), "record 1 is damaged, because its content"),
    "no example": ("a.tfrecord", records([b"\xff\xff\xff"]), "record 1 is not a tf.train.Example"),
    "no feature": ("a.tfrecord", records([example({"id": [3]})]), "record 1 has no txt, but id: name the column"),
    "a number": ("a.tfrecord", records([example({"txt": [3]})]), "record 1: its txt is a list, not text"),
}


@pytest.mark.parametrize("name", CUT)
def test_what_is_damaged_or_no_text_is_refused_with_file_and_sample(tmp_path, capsys, name):
    file, content, said = CUT[name]
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / file).write_bytes(content)
    assert command(tmp_path, tmp_path / "in") == 78
    assert said in capsys.readouterr().err
    assert not (tmp_path / "out" / "manifest.json").exists()


def test_arrays_that_would_run_code_are_refused(tmp_path):
    content = archive([("a.x.npy", npy([{}], object))])
    with pytest.raises(InvalidInput, match=r"a.tar: the member a.x.npy can't be read: it is not an array of numbers"):
        read(tmp_path, "a.tar", content, "x")


def test_files_that_fsspec_reads_give_the_same_data(tmp_path):
    """`local://` is a driver of fsspec, and every process opens it anew."""
    for name, content in {"a.jsonl": "", "sub/b.jsonl.gz": ""}.items():
        (tmp_path / "in" / name).parent.mkdir(parents=True, exist_ok=True)
        lines = "".join(json.dumps({"txt": f"{name} {content}{text}"}) + "\n" for text in TEXTS).encode()
        (tmp_path / "in" / name).write_bytes(gzip.compress(lines) if name.endswith("gz") else lines)
    options = ["--column", "txt", "--shard-mebibytes", "0.002"]
    for out, place, processes in (("a", f"{tmp_path}/in", "1"), ("b", f"local://{tmp_path}/in", "2")):
        assert cli.main(["data", "build", "--out", str(tmp_path / out), *options, "--processes", processes, place]) == 0
    assert documents(tmp_path / "a") == documents(tmp_path / "b")
    assert len(documents(tmp_path / "b")) == 2 * len(TEXTS)
    only = f"local://{tmp_path}/in/sub/b.jsonl.gz"
    assert cli.main(["data", "build", "--out", str(tmp_path / "c"), "--column", "txt", only]) == 0
    assert len(documents(tmp_path / "c")) == len(TEXTS)
    (entry,) = listed(only).values()
    assert entry.at.timestamp() == pytest.approx(os.stat(only.removeprefix("local://")).st_mtime)
    assert read_whole(f"local://{tmp_path}/in/a.jsonl").count(b"\n") == len(TEXTS)


class _Whole(http.server.SimpleHTTPRequestHandler):
    """Server that returns the whole file, whatever range is asked for."""

    def log_message(self, *arguments):
        pass


def test_a_server_without_ranges_is_refused_instead_of_read_wrong(tmp_path, monkeypatch):
    (tmp_path / "a.jsonl").write_bytes(b"x" * (CHUNK + 9))
    monkeypatch.chdir(tmp_path)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Whole) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        uri = f"http://127.0.0.1:{server.server_port}/a.jsonl"
        size = listed(uri)[""].size
        with open_range(uri, size) as file, pytest.raises(StorageError, match=f"{size} bytes instead of {CHUNK}"):
            file.read(9)
        server.shutdown()


@pytest.mark.parametrize(
    ("uri", "lacking", "said"),
    [
        ("sftp://host/a", "paramiko", "sftp://host/a needs fsspec's driver for sftp: pip install 'fsspec[sftp]'"),
        ("s3a://bucket/a", "s3fs", "s3a://bucket/a needs fsspec's driver for s3a: pip install 's3fs'"),
        ("nothing://a", "", "nothing://a can't be used: fsspec has no driver for nothing://"),
        ("local:///nowhere/at/all", "", "local:///nowhere/at/all does not exist: correct the URI"),
    ],
)
def test_a_driver_that_is_missing_is_named_with_the_command_that_installs_it(tmp_path, uri, lacking, said):
    without = f"sys.modules[{lacking!r}] = None; " if lacking else ""
    program = f"import sys; {without}from concertina_trainer import cli; sys.exit(cli.main())"
    arguments = ["data", "build", "--out", str(tmp_path / "out"), uri]
    done = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=False)
    assert (done.returncode, said in done.stderr) == (78, True), done.stderr


def test_hdfs_without_hadoop_says_what_it_needs(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    assert command(tmp_path, "hdfs://namenode:8020/corpus") == 1
    said = capsys.readouterr().err
    assert said.startswith("hdfs://namenode:8020/corpus can't be opened (")
    assert "set JAVA_HOME, HADOOP_HOME, and CLASSPATH" in said
    assert said.count("\n") == 1
