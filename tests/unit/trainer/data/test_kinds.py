"""Format of a file by its name and its first bytes."""

import bz2
import gzip
import io
import lzma
import pickle
import sqlite3
import tarfile
import zipfile

import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet
import pytest

from concertina_trainer.data.build.content import HEAD_BYTES, why_not_text
from concertina_trainer.data.build.file_names import FileKind, Role, kind_of, role_of, why_unreadable

TEXT = b"a line of text\n" * 30


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("a.jsonl", FileKind("jsonl", "", ".jsonl")),
        ("A.JSONL", FileKind("jsonl", "", ".jsonl")),
        ("in.d/a.b.NdJson", FileKind("jsonl", "", ".ndjson")),
        ("a.json", FileKind("jsonl", "", ".json")),
        ("a.jsonl.gz", FileKind("jsonl", "gzip", ".jsonl.gz")),
        ("a.JSON.GZ", FileKind("jsonl", "gzip", ".json.gz")),
        ("a.jsonl.bz2", FileKind("jsonl", "bzip2", ".jsonl.bz2")),
        ("a.jsonl.xz", FileKind("jsonl", "xz", ".jsonl.xz")),
        ("a.jsonl.zst", FileKind("jsonl", "Zstandard", ".jsonl.zst")),
        ("a.txt.zst", FileKind("text", "Zstandard", ".txt.zst")),
        ("a.gz", FileKind("text", "gzip", ".gz")),
        ("A.PARQUET", FileKind("parquet", "", ".parquet")),
        ("a.Arrow", FileKind("arrow", "", ".arrow")),
        ("a.NPY", FileKind("NumPy", "", ".npy")),
        ("a.npz", FileKind("NumPy", "", ".npz")),
        ("A.TAR.GZ", FileKind("a tar archive", "gzip", ".tar.gz")),
        ("a.tfrecord-00003-of-00010", FileKind("TFRecord", "", ".tfrecord")),
        ("jsonl", FileKind("text", "", "")),
        ("s3://b/x.jsonl/part-00000", FileKind("text", "", "")),
    ],
)
def test_names_are_compared_without_case(name, kind):
    assert kind_of(name) == kind
    assert why_unreadable(name) == ""


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("a.tgz", "this suffix is not supported: rename it, as .tar.gz"),
        ("a.zip", "of archives, only .tar is supported"),
        ("a.tar.part", "its name has more after .tar"),
        ("a.csv", "CSV"),
        ("a.csv.zst", "CSV"),
        ("a.jsonl.lz4", "this compression is not supported"),
        ("a.parquet.gz", ".parquet files must not be compressed: unpack them first"),
        ("a.npy.xz", ".npy files must not be compressed"),
        ("a.jsonl.gz.zst", "compressed twice"),
        ("a.jsonl.part", "its name has more after .jsonl, so it may be incomplete"),
        ("a.jsonl.gz.tmp", "its name has more after .gz, so it may be incomplete"),
        ("a.warc.gz", "this record format"),
        ("a.PDF", "this document format"),
        ("shard-000000.bin", "this binary format"),
    ],
)
def test_data_that_are_not_read_are_known_by_name(name, reason):
    assert why_unreadable(name).startswith(reason)


@pytest.mark.parametrize(
    ("name", "role"),
    [
        ("a.JSONL", Role.DATA),
        ("a.json.gz", Role.DATA),
        ("a.json", Role.JSON),
        ("dataset_info.json", Role.MARKER),
        ("train/state.json", Role.MARKER),
        ("_SUCCESS", Role.MARKER),
        ("_temporary/0/part-0.parquet", Role.MARKER),
        ("part-0.parquet.crc", Role.MARKER),
        ("a.jsonl.sha256", Role.MARKER),
        ("SHA256SUMS", Role.MARKER),
        ("docs/Demo.PNG", Role.MARKER),
        ("README.md", Role.DESCRIPTION),
        ("LICENSE.txt", Role.DESCRIPTION),
        ("licence", Role.DESCRIPTION),
        ("readmes.txt", Role.PROSE),
        ("a.TXT", Role.PROSE),
        ("a.md.gz", Role.PROSE),
        ("notes.md", Role.OTHER),
        ("main.py", Role.OTHER),
        ("x.zip", Role.UNREADABLE),
    ],
)
def test_names_say_what_part_a_file_has_in_its_folder(name, role):
    assert role_of(name) is role


def archive(mode):
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode=mode, format=tarfile.USTAR_FORMAT) as file:
        member = tarfile.TarInfo("a.txt")
        member.size = len(TEXT)
        file.addfile(member, io.BytesIO(TEXT))
    return made.getvalue()


def zipped():
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as file:
        file.writestr("a.txt", TEXT)
    return made.getvalue()


def table(write):
    made = io.BytesIO()
    write(pa.table({"text": ["one", "two"]}), made)
    return made.getvalue()


def arrow(open_writer):
    def write(content, made):
        with open_writer(made, content.schema) as writer:
            writer.write_table(content)

    return table(write)


def database(tmp_path):
    connection = sqlite3.connect(tmp_path / "a.db")
    connection.execute("create table t (x)")
    connection.close()
    return (tmp_path / "a.db").read_bytes()


def array(save):
    made = io.BytesIO()
    save(made, np.arange(9))
    return made.getvalue()


CONTENT = {
    "gzip": (lambda _: gzip.compress(TEXT), "holds gzip, not text: give it a name that ends in .gz"),
    "bzip2": (lambda _: bz2.compress(TEXT), "holds bzip2, not text: give it a name that ends in .bz2"),
    "empty bzip2": (lambda _: bz2.compress(b""), "holds bzip2"),
    "xz": (lambda _: lzma.compress(TEXT), "holds xz"),
    "zstd": (lambda _: pa.Codec("zstd").compress(TEXT, asbytes=True), "holds Zstandard"),
    "skippable frame of zstd": (lambda _: b"\x5a\x2a\x4d\x18\1\0\0\0x", "holds Zstandard"),
    "lz4": (lambda _: pa.Codec("lz4").compress(TEXT, asbytes=True), "holds LZ4"),
    "tar": (lambda _: archive("w"), "holds a tar archive, not text: unpack or convert it"),
    "tar of gzip": (lambda _: archive("w:gz"), "holds gzip"),
    "zip": (lambda _: zipped(), "holds a zip archive"),
    "empty zip": (lambda _: b"PK\5\6" + bytes(18), "holds a zip archive"),
    "7z": (lambda _: b"7z\xbc\xaf\x27\x1c\0\4", "holds a 7z archive"),
    "rar": (lambda _: b"Rar!\x1a\x07\x01\0", "holds a rar archive"),
    "parquet": (lambda _: table(parquet.write_table), "holds Parquet"),
    "arrow file": (lambda _: arrow(pa.ipc.new_file), "holds Arrow"),
    "arrow stream": (lambda _: arrow(pa.ipc.new_stream), "holds Arrow"),
    "sqlite": (database, "holds an SQLite database"),
    "hdf5": (lambda _: b"\x89HDF\r\n\x1a\n" + bytes(9), "holds HDF5"),
    "npy": (lambda _: array(np.save), "holds a NumPy array"),
    "npz": (lambda _: array(np.savez), "holds a zip archive"),
    "pickle": (lambda _: pickle.dumps({"a": 1}), "holds a pickle"),
    "safetensors": (lambda _: (2).to_bytes(8, "little") + b"{}", "holds safetensors"),
    "pdf": (lambda _: b"%PDF-1.7\n", "holds a PDF"),
    "warc": (lambda _: b"WARC/1.0\r\n", "holds a WARC file"),
    "utf-16": (lambda _: TEXT.decode().encode("utf-16"), "looks like UTF-16: convert it to UTF-8"),
    "utf-16-le": (lambda _: TEXT.decode().encode("utf-16-le"), "looks like UTF-16"),
    "utf-16-be": (lambda _: TEXT.decode().encode("utf-16-be"), "looks like UTF-16"),
    "nul": (lambda _: TEXT + bytes(4096), f"holds NUL bytes (the first is byte {len(TEXT)})"),
    "only nul": (lambda _: bytes(4096), "holds NUL bytes (the first is byte 0)"),
    "latin-1": (lambda _: "Caf\xe9s".encode("latin-1"), "is not UTF-8 (byte 3 is 0xe9): convert it to UTF-8"),
    "latin-1 at the end": (lambda _: "Caf\xe9".encode("latin-1"), "is not UTF-8 (byte 3 is 0xe9)"),
}


@pytest.mark.parametrize("name", CONTENT)
def test_what_is_no_text_is_refused_by_its_bytes(tmp_path, name):
    make, reason = CONTENT[name]
    assert why_not_text(make(tmp_path), complete=True).startswith(reason)


@pytest.mark.parametrize(
    "text",
    [
        b"",
        TEXT,
        b"\xef\xbb\xbf" + TEXT,
        "日本語のテキスト".encode(),
        b"PAR1 is a gene",
        b"BZh9 and GIF are words",
        b"PK",
        b"7z is a program",
        b"ARROW1",
        b"WARC/on",
        b"Rar!",
        b"{" * 300 + b"ustar",
    ],
)
def test_text_is_text(text):
    assert why_not_text(text, complete=True) == ""


def test_a_character_may_be_cut_by_the_end_of_the_head():
    content = ("x" + "é" * HEAD_BYTES).encode()
    assert why_not_text(content[:HEAD_BYTES], complete=False) == ""
    assert "is not UTF-8" in why_not_text(content[:HEAD_BYTES], complete=True)
