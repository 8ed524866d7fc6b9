"""Which files a build takes, in which forms, and what it refuses to take or to leave out."""

import bz2
import functools
import gzip
import io
import json
import lzma
import os
import subprocess
import sys
import tarfile
import time

import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet
import pytest

from builders.train.built import documents
from concertina_data.data_manifest import parse
from concertina_state.errors import InvalidInput
from concertina_state.objects.prefix import ObjectPrefix
from concertina_trainer import cli
from concertina_trainer.data.build.build import build
from concertina_trainer.data.build.find import find
from concertina_trainer.data.build.recipe import Recipe

TEXTS = [f"Document {i}: naïve words, " + "again and again. " * (i % 7) for i in range(120)]
LINES = [json.dumps({"text": text}).encode() + b"\n" for text in TEXTS]
PLAIN = b"".join(LINES)
PROSE = "\n".join(TEXTS).encode()
SKIPPABLE = b"\x50\x2a\x4d\x18" + (3).to_bytes(4, "little") + b"any"


def zstandard(content):
    return pa.Codec("zstd").compress(content, asbytes=True)


COMPRESS = {"gz": gzip.compress, "bz2": bz2.compress, "xz": lzma.compress, "zst": zstandard}


def in_parts(compress):
    """Several members or frames, one of them empty, cut in the middle of a line."""
    return compress(PLAIN[:777]) + compress(b"") + compress(PLAIN[777:5000]) + compress(PLAIN[5000:])


def put(folder, files):
    """Write files by name."""
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return folder


def command(out, *arguments):
    return cli.main(["data", "build", "--processes", "1", "--out", str(out), *map(str, arguments)])


def digest(out):
    return parse((out / "manifest.json").read_bytes(), "").digest


def plain_digest(tmp_path, name, content):
    list(build(find([str(put(tmp_path / "plain", {name: content}))]), str(tmp_path / "expected")))
    return digest(tmp_path / "expected")


def written(write, **options):
    made = io.BytesIO()
    write(pa.table({"text": TEXTS}), made, **options)
    return made.getvalue()


def stream(table, made):
    with pa.ipc.new_stream(made, table.schema) as writer:
        writer.write_table(table, max_chunksize=19)


LINE_FORMS = {
    "a.JSONL": PLAIN,
    "a.NDJson": PLAIN,
    "a.JSON": PLAIN,
    "a.jsonl.zst": b"".join([SKIPPABLE, zstandard(PLAIN[:50]), SKIPPABLE, zstandard(PLAIN[50:]), SKIPPABLE]),
    "A.PARQUET": written(parquet.write_table, row_group_size=23),
    "A.ARROW": written(stream),
    **{f"a.jsonl.{end}": in_parts(compress) for end, compress in COMPRESS.items()},
    **{f"A.JSONL.{end.upper()}": compress(PLAIN) for end, compress in COMPRESS.items()},
    **{f"a.json.{end}": compress(PLAIN[:-1]) for end, compress in COMPRESS.items()},
}


@pytest.mark.parametrize("name", LINE_FORMS)
def test_every_form_of_lines_gives_the_digest_of_the_plain_file(tmp_path, name):
    expected = plain_digest(tmp_path, "a.jsonl", PLAIN)
    folder = put(tmp_path / "in", {name: LINE_FORMS[name]})
    for place in (folder, folder / name):
        assert command(tmp_path / f"out-{place.name}", place) == 0
        assert digest(tmp_path / f"out-{place.name}") == expected


@pytest.mark.parametrize("name", ["a.TXT", "b", *(f"a.txt.{end}" for end in COMPRESS)])
def test_every_form_of_text_gives_the_digest_of_the_plain_file(tmp_path, name):
    expected = plain_digest(tmp_path, "a.txt", PROSE)
    content = COMPRESS.get(name.rpartition(".")[2], bytes)(PROSE)
    assert command(tmp_path / "out", put(tmp_path / "in", {name: content})) == 0
    assert digest(tmp_path / "out") == expected


def test_arrays_of_frames_are_known_by_names_of_any_case(tmp_path):
    for name in ("a.npy", "A.NPY"):
        (tmp_path / name[0]).mkdir()
        with (tmp_path / name[0] / name).open("wb") as file:
            np.save(file, np.arange(30, dtype=np.float16).reshape(10, 3))
        assert command(tmp_path / f"out-{name[0]}", "--field", "features=float16x3", tmp_path / name[0]) == 0
    assert digest(tmp_path / "out-a") == digest(tmp_path / "out-A")


def contents(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


SHARD_BYTES = int(0.002 * 2**20)
FOLDER = {
    "a.jsonl.zst": zstandard(PLAIN),
    "b.jsonl": PLAIN[: len(PLAIN) // 2].rpartition(b"\n")[0],
    "c.jsonl.gz": gzip.compress(PLAIN),
    "d.jsonl.xz": lzma.compress(b""),
}


def test_a_compressed_file_becomes_shards_of_the_size_that_was_asked_for(tmp_path):
    folder = put(tmp_path / "in", FOLDER)
    list(build(find([str(folder)]), str(tmp_path / "out"), SHARD_BYTES))
    assert documents(tmp_path / "out") == [*TEXTS, *TEXTS[: FOLDER["b.jsonl"].count(b"\n") + 1], *TEXTS]
    manifest = parse((tmp_path / "out" / "manifest.json").read_bytes(), "")
    longest = max(map(len, TEXTS))
    assert len(manifest.shards) > 6
    assert all(shard.size < SHARD_BYTES + 2 * longest for shard in manifest.shards)
    list(build(find([str(folder)]), str(tmp_path / "whole"), 10**9))
    assert documents(tmp_path / "whole") == documents(tmp_path / "out")


def test_compressed_files_give_the_same_bytes_for_any_processes_shares_and_kills(tmp_path):
    folder = put(tmp_path / "in", FOLDER)
    list(build(find([str(folder)]), str(tmp_path / "one"), SHARD_BYTES, Recipe(validation=0.2)))
    expected = contents(tmp_path / "one")
    options = ["--shard-mebibytes", "0.002", "--validation", "0.2"]
    assert any("-0001.bin" in name for name in expected)
    assert command(tmp_path / "two", "--processes", "2", *options, folder) == 0
    assert contents(tmp_path / "two") == expected
    for share in ("1/2", "0/2"):
        assert command(tmp_path / "shares", "--share", share, *options, folder) == 0
    assert contents(tmp_path / "shares") == expected
    killed = tmp_path / "killed"
    arguments = ["data", "build", "--processes", "1", "--out", str(killed), *options, str(folder)]
    process = subprocess.Popen([sys.executable, "-m", "concertina_trainer.cli", *arguments], stderr=subprocess.DEVNULL)
    while process.poll() is None and not list(killed.glob("shard-*-0001.bin")):
        time.sleep(0.001)
    process.kill()
    process.wait()
    assert command(killed, *options, folder) == 0
    assert contents(killed) == expected


def test_another_size_of_shards_is_another_build(tmp_path):
    folder = put(tmp_path / "in", {"a.jsonl.gz": gzip.compress(PLAIN)})
    list(build(find([str(folder)]), str(tmp_path / "out"), SHARD_BYTES))
    with pytest.raises(InvalidInput, match="already contains data"):
        list(build(find([str(folder)]), str(tmp_path / "out"), 2 * SHARD_BYTES))


def second_damaged(content, compress):
    first = compress(PLAIN[:777])
    return first + b"?" + content[len(first) + 1 :]


DAMAGE = {
    "last byte": lambda content, compress: content[:-1],
    "half": lambda content, compress: content[: len(content) // 2],
    "header of the second member": second_damaged,
    "cut in the header of the second member": lambda content, compress: content[: len(compress(PLAIN[:777])) + 2],
    "something behind": lambda content, compress: content + b"something else",
    "nothing": lambda content, compress: b"",
    "plain text": lambda content, compress: PLAIN,
    "another compression": lambda content, compress: gzip.compress(PLAIN) if compress is not gzip.compress
    else bz2.compress(PLAIN),
}  # fmt: skip


@pytest.mark.parametrize("end", COMPRESS)
@pytest.mark.parametrize("damage", DAMAGE)
def test_compressed_files_that_are_damaged_are_refused_by_name(tmp_path, capsys, end, damage):
    compress = COMPRESS[end]
    content = DAMAGE[damage](compress(PLAIN[:777]) + compress(PLAIN[777:]), compress)
    folder = put(tmp_path / "in", {f"a.jsonl.{end}": content, f"b.jsonl.{end}": compress(PLAIN)})
    assert command(tmp_path / "out", folder) == 78
    said = capsys.readouterr().err
    assert f"{folder}/a.jsonl.{end} " in said
    assert "can't be unpacked (" in said or "but its name says" in said
    assert not (tmp_path / "out" / "manifest.json").exists()


def tar(name):
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as file:
        member = tarfile.TarInfo(name)
        member.size = len(PROSE)
        file.addfile(member, io.BytesIO(PROSE))
    return made.getvalue()


LONG = PLAIN * 3
LONG_LINES = LONG.count(b"\n")
REFUSED = {
    "gzip without its suffix": ("a.jsonl", gzip.compress(PLAIN), "a.jsonl holds gzip, not text: give it a name"),
    "Zstandard as text": ("a.txt", zstandard(PLAIN), "a.txt holds Zstandard, not text"),
    "tar as text": ("a.txt", tar("0.txt"), "a.txt holds a tar archive, not text: unpack or convert it"),
    "tar in gzip": ("a.txt.gz", gzip.compress(tar("0.txt")), "a.txt.gz holds a tar archive"),
    "gzip in gzip": ("a.jsonl.gz", gzip.compress(gzip.compress(PLAIN)), "a.jsonl.gz holds gzip"),
    "Parquet as text": ("part-0", written(parquet.write_table), "part-0 holds Parquet"),
    "gzip as Parquet": ("a.parquet", gzip.compress(PLAIN), "a.parquet can't be read as parquet: it holds gzip"),
    "zip as Arrow": ("a.arrow", b"PK\3\4" + bytes(30), "a.arrow can't be read as arrow: it holds a zip archive"),
    "gzip as frames": ("a.npy", gzip.compress(PLAIN), "a.npy can't be read: it holds gzip"),
    "UTF-16": ("a.jsonl", PLAIN.decode().encode("utf-16"), "a.jsonl looks like UTF-16: convert it to UTF-8"),
    "UTF-16 as text": ("a.txt", PROSE.decode().encode("utf-16-le"), "a.txt looks like UTF-16: convert it to UTF-8"),
    "Latin-1": ("a.txt", "Café".encode("latin-1"), "a.txt is not UTF-8 (byte 3 is 0xe9)"),
    "Latin-1 later on": ("a.txt", b"x" * 9000 + b"\xe9.", "a.txt is not UTF-8 (byte 9000 is 0xe9)"),
    "NUL in text later on": ("a.txt", PROSE + bytes(9), f"a.txt holds NUL bytes (the first is byte {len(PROSE)})"),
    "a line of NUL": ("a.jsonl", LINES[0] + bytes(64) + b"\n", "a.jsonl holds NUL bytes (the first is byte"),
    "a line of NUL later on": (
        "a.jsonl",
        LONG + bytes(64) + b"\n" + LINES[0],
        f"a.jsonl, line {LONG_LINES + 1} holds NUL bytes, like a file after a crash",
    ),
    "NUL at the end": (
        "a.jsonl",
        LONG + bytes(4096),
        f"a.jsonl, line {LONG_LINES + 1} holds NUL bytes, like a file after a crash",
    ),
    "NUL in a compressed line": (
        "a.jsonl.gz",
        gzip.compress(LONG + bytes(9)),
        f"a.jsonl.gz, line {LONG_LINES + 1} holds NUL bytes",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_content_that_is_not_what_the_name_says_is_refused(tmp_path, capsys, name):
    file, content, said = REFUSED[name]
    assert len(LONG) > 4096
    assert command(tmp_path / "out", put(tmp_path / "in", {file: content})) == 78
    assert said in capsys.readouterr().err
    assert not (tmp_path / "out" / "manifest.json").exists()


def test_bad_content_is_found_before_any_work_is_done(tmp_path):
    folder = put(tmp_path / "in", {"a.jsonl": PLAIN, "b.jsonl": gzip.compress(PLAIN)})
    with pytest.raises(InvalidInput, match="holds gzip"):
        next(build(find([str(folder)]), str(tmp_path / "out"), SHARD_BYTES))
    assert not (tmp_path / "out").exists()


def test_a_byte_order_mark_is_no_part_of_a_text(tmp_path):
    folder = put(tmp_path / "in", {"a.txt": b"\xef\xbb\xbfone", "b.txt": b"two"})
    list(build(find([str(folder)]), str(tmp_path / "out")))
    assert documents(tmp_path / "out") == ["one", "two"]


LINE = b'{"text": "one"}\n'
FOLDERS = {
    "compressed beside plain": (["a.jsonl", "b.jsonl.zst"], [], ["a.jsonl", "b.jsonl.zst"], {}),
    "two cases": (["B.JSONL", "a.jsonl"], [], ["B.JSONL", "a.jsonl"], {}),
    "what is usual": (
        ["README.md", "LICENSE", "LICENSE.txt", "_SUCCESS", "a.jsonl", "a.jsonl.crc", ".a.swp", "dataset_info.json"],
        [],
        ["a.jsonl"],
        {
            "no data, judging by the name": ["LICENSE", "LICENSE.txt", "README.md", "_SUCCESS", "a.jsonl.crc",
                                             "dataset_info.json"],
            "hidden": [".a.swp"],
        },
    ),
    "output that was not committed": (
        ["_temporary/0/part-0.jsonl", "part-0.jsonl"],
        [],
        ["part-0.jsonl"],
        {"no data, judging by the name": ["_temporary/0/part-0.jsonl"]},
    ),
    "code beside data": (["a.jsonl", "load.py"], [], ["a.jsonl"], {"no data, judging by the name": ["load.py"]}),
    "text beside data": (["a.jsonl", "b.txt"], ["b.txt"], ["a.jsonl"], {"text beside other data": ["b.txt"]}),
    "compressed text beside data": (["a.jsonl", "b.GZ"], ["b.GZ"], ["a.jsonl"], {"text beside other data": ["b.GZ"]}),
    "JSON beside data": (["a.jsonl", "b.json"], ["b.json"], ["a.jsonl"], {"JSON beside other data": ["b.json"]}),
    "JSON beside text": (["a.json", "b.md"], ["b.md"], ["a.json"], {"no data, judging by the name": ["b.md"]}),
    "CSV beside data": (["a.jsonl", "b.CSV"], ["b.CSV"], ["a.jsonl"], {"CSV and TSV are not supported": ["b.CSV"]}),
    "archive beside text": (["a.txt", "b.zip"], ["b.zip"], ["a.txt"],
                            {"of archives, only .tar is supported": ["b.zip"]}),
    "samples beside text": (["a.txt", "b.tar.gz"], ["a.txt"], ["b.tar.gz"], {"text beside other data": ["a.txt"]}),
    "incomplete download": (["a.jsonl", "b.jsonl.part"], ["b.jsonl.part"], ["a.jsonl"],
                            {"its name has more after .jsonl, so it may be incomplete": ["b.jsonl.part"]}),
    "text alone": (["LICENSE", "README.md", "a.txt", "main.py"], [], ["LICENSE", "README.md", "a.txt", "main.py"], {}),
    "images beside text": (["a.md", "demo.png"], [], ["a.md"], {"no data, judging by the name": ["demo.png"]}),
    "splits of lines": (["test.jsonl.gz", "train.jsonl.gz"], [], ["train.jsonl.gz"], {"split test": ["test.jsonl.gz"]}),
    "splits of JSON": (["test.json", "train.json"], [], ["train.json"], {"split test": ["test.json"]}),
    "splits of text": (["README.md", "train.txt", "valid.txt"], [], ["train.txt"],
                       {"no data, judging by the name": ["README.md"], "split validation": ["valid.txt"]}),
    "splits in upper case": (["TEST.JSONL", "TRAIN.JSONL"], [], ["TRAIN.JSONL"], {"split test": ["TEST.JSONL"]}),
}  # fmt: skip
"""Names; those that a build refuses to leave out; those that it takes; what it says, by reason."""


def content_of(name):
    return next((compress(LINE) for end, compress in COMPRESS.items() if name.lower().endswith(f".{end}")), LINE)


@pytest.mark.parametrize("name", FOLDERS)
@pytest.mark.parametrize("where", ["local", "s3"])
def test_what_is_taken_of_a_folder_and_what_is_left_out(s3, tmp_path, name, where):
    names, problems, taken, reasons = FOLDERS[name]
    place = str(put(tmp_path / "in", {file: content_of(file) for file in names}))
    if where == "s3":
        place = f"s3://train/{tmp_path.name}"
        for file in names:
            ObjectPrefix(place).put(file, tmp_path / "in" / file)
    said = []
    take = functools.partial(find, [place], say=said.append)
    if problems:
        with pytest.raises(InvalidInput, match="would be left out") as refused:
            take()
        assert [f"{place}/{problem} (" in str(refused.value) for problem in problems] == [True] * len(problems)
        said.clear()
    assert [source.location for source in take(allow_left_out=bool(problems))] == [f"{place}/{file}" for file in taken]
    assert said[0].startswith(f"taken: {len(taken)} file")
    expected = {f"left out: {len(files)} ({reason}): {', '.join(f'{place}/{file}' for file in files)}"
                for reason, files in reasons.items() if len(files) <= 5}  # fmt: skip
    assert expected <= set(said[1:])
    assert len(said) == 1 + len(reasons)


def test_a_list_of_what_is_left_out_is_bounded(tmp_path):
    put(tmp_path / "in", {"a.jsonl": LINE, **{f"{i:03}.csv": b"a,b" for i in range(300)}})
    said = []
    with pytest.raises(InvalidInput, match="and 295 more") as refused:
        find([str(tmp_path / "in")], say=said.append)
    assert len(str(refused.value)) < 2000
    assert "left out: 300 (" in said[1]
    assert len(said[1]) < 1000


def test_a_build_that_would_leave_data_out_does_nothing_unless_told_to(tmp_path, capsys):
    folder = put(tmp_path / "in", {"a.jsonl": PLAIN, "b.csv": b"a,b\n"})
    assert command(tmp_path / "out", folder) == 78
    said = capsys.readouterr().err
    assert f"{folder}/b.csv (CSV and TSV are not supported)" in said
    assert "--allow-left-out" in said
    assert not (tmp_path / "out").exists()
    assert command(tmp_path / "out", "--allow-left-out", folder) == 0
    assert "left out: 1 (CSV" in capsys.readouterr().err
    assert digest(tmp_path / "out") == plain_digest(tmp_path, "a.jsonl", PLAIN)


def test_a_file_that_is_named_itself_is_refused_by_the_same_rules(tmp_path, capsys):
    folder = put(tmp_path / "in", {"README.md": b"text", "a.zip": b"?", "a.jsonl.lz4": b"?"})
    for name, reason in (("a.zip", "of archives, only .tar"), ("a.jsonl.lz4", "this compression")):
        assert command(tmp_path / "out", folder / name) == 78
        assert f"{reason} is " in capsys.readouterr().err
    assert command(tmp_path / "out", folder / "README.md") == 0
    os.mkfifo(folder / "pipe")
    assert command(tmp_path / "out", folder / "pipe") == 78
    assert "is neither a file nor a folder" in capsys.readouterr().err


def test_links_to_folders_are_followed(tmp_path):
    folder = put(tmp_path / "in", {"real.jsonl": b"".join(LINES[:10])})
    put(tmp_path / "side", {"web/a.jsonl": b"".join(LINES[10:50]), "more/b.jsonl": b"".join(LINES[50:])})
    (folder / "web").symlink_to("../side/web")
    (tmp_path / "side" / "web" / "zz").symlink_to("../more")
    for number, pattern in enumerate(("", "**/*.jsonl", "**")):
        out = tmp_path / f"out-{number}"
        list(build(find([str(folder)], pattern), str(out)))
        assert documents(out) == TEXTS
    assert len(find([str(folder)], "web/*.jsonl")) == 1
    (tmp_path / "to").symlink_to("in")
    assert len(find([str(tmp_path / "to")])) == 3


def test_loops_of_links_end(tmp_path):
    folder = put(tmp_path / "in", {"a.jsonl": PLAIN, "sub/b.jsonl": LINE})
    put(tmp_path / "other", {"c.jsonl": LINE})
    (folder / "self").symlink_to(".")
    (folder / "sub" / "up").symlink_to("..")
    (folder / "other").symlink_to("../other")
    (tmp_path / "other" / "back").symlink_to("../in")
    said = []
    assert len(find([str(folder)], allow_left_out=True, say=said.append)) == 3
    assert f"left out: 2 (a link to a folder that contains it): {folder}/self, {folder}/sub/up" in said
    (tmp_path / "other" / "back").unlink()
    assert len(find([str(folder)])) == 3


def test_a_link_out_of_the_folder_and_above_it_is_refused(tmp_path):
    folder = put(tmp_path / "in", {"a.jsonl": PLAIN})
    put(tmp_path, {"b.jsonl": LINE})
    (folder / "up").symlink_to("..")
    with pytest.raises(InvalidInput, match=r"in/up \(a link to a folder that contains it\)"):
        find([str(folder)])


@pytest.mark.parametrize(
    ("link", "target", "said"),
    [
        ("b.jsonl", "gone.jsonl", r"b.jsonl \(a broken link\)"),
        ("web", "../gone", r"web \(a broken link\)"),
        ("latest", "v1", r"latest = v1 \(another name of a folder\)"),
        ("b.jsonl", "v1/a.jsonl", r"b.jsonl = .*v1/a.jsonl \(another name of a file\)"),
    ],
)
def test_links_that_lead_nowhere_or_twice_to_the_same_are_refused(tmp_path, link, target, said):
    folder = put(tmp_path / "in", {"v1/a.jsonl": PLAIN})
    (folder / link).symlink_to(target)
    with pytest.raises(InvalidInput, match=said):
        find([str(folder)])
    assert [source.location for source in find([str(folder)], allow_left_out=True)] == [f"{folder}/v1/a.jsonl"]


def test_no_file_is_taken_twice_by_two_places(tmp_path):
    folder = put(tmp_path / "in", {"a.jsonl": PLAIN, "b.jsonl": LINE})
    with pytest.raises(InvalidInput, match="another name of a file"):
        find([str(folder), str(folder / "a.jsonl")])
    assert len(find([str(folder / "a.jsonl"), str(folder / "b.jsonl")])) == 2


def test_a_file_of_many_links_is_taken_under_the_name_that_a_pattern_chooses(tmp_path):
    folder = put(tmp_path / "in", {"blobs/0123": PLAIN})
    (folder / "snapshots").mkdir()
    (folder / "snapshots" / "train.JSONL").symlink_to("../blobs/0123")
    assert [source.format for source in find([str(folder)], "SNAPSHOTS/*")] == ["jsonl"]
    assert [source.format for source in find([str(folder)])] == ["jsonl"]


NAMES = ["B.JSONL", "a.jsonl", "b.csv", "deep/er/d.jsonl", "deep/c.jsonl", "e-f/x.jsonl", "e/x.jsonl", ".cache/h.jsonl"]


@pytest.mark.parametrize(
    ("pattern", "taken"),
    [
        ("*.jsonl", ["B.JSONL", "a.jsonl"]),
        ("**/*.JSONL", ["B.JSONL", "a.jsonl", "deep/c.jsonl", "deep/er/d.jsonl", "e/x.jsonl", "e-f/x.jsonl"]),
        ("deep/**", ["deep/c.jsonl", "deep/er/d.jsonl"]),
        ("deep/**/*.jsonl", ["deep/c.jsonl", "deep/er/d.jsonl"]),
        ("*/[cx].*", ["deep/c.jsonl", "e/x.jsonl", "e-f/x.jsonl"]),
    ],
)
def test_patterns_mean_the_same_everywhere(s3, tmp_path, pattern, taken):
    folder = str(put(tmp_path / "in", dict.fromkeys(NAMES, LINE)))
    uri = f"s3://train/{tmp_path.name}"
    for name in NAMES:
        ObjectPrefix(uri).put(name, tmp_path / "in" / name)
    for place in (folder, uri):
        said = []
        found = find([place], pattern, say=said.append)
        assert [source.location.removeprefix(f"{place}/") for source in found] == taken
        assert f"left out: {7 - len(taken)} (not matched by --pattern)" in " ".join(said)
        with pytest.raises(InvalidInput, match="CSV and TSV are not supported"):
            find([place], "*")


def test_a_folder_and_the_same_objects_give_the_same_data(s3, tmp_path):
    names = {name: LINE.replace(b"one", name.encode()) for name in NAMES if not name.endswith("csv")}
    folder = put(tmp_path / "in", names | {"z.jsonl.zst": zstandard(PLAIN), "y.jsonl.bz2": bz2.compress(PLAIN)})
    uri = f"s3://train/{tmp_path.name}"
    for file in folder.rglob("*"):
        if file.is_file():
            ObjectPrefix(uri).put(str(file.relative_to(folder)), file)
    for out, place in (("a", str(folder)), ("b", uri)):
        list(build(find([place]), str(tmp_path / out), 500))
    assert digest(tmp_path / "a") == digest(tmp_path / "b")


def test_the_result_within_a_folder_of_sources_is_no_source(tmp_path):
    folder = put(tmp_path / "in", {"a.txt": PROSE, "b.txt": b"two"})
    for _ in range(2):
        assert command(folder / "out", folder) == 0
        assert documents(folder / "out") == [PROSE.decode(), "two"]
    with pytest.raises(InvalidInput, match="build into another folder"):
        find([str(folder)], out=f"{folder}/")


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads every folder")
def test_a_folder_that_can_not_be_read_is_refused(tmp_path):
    folder = put(tmp_path / "in", {"a.jsonl": PLAIN, "sub/b.jsonl": LINE})
    (folder / "sub").chmod(0)
    try:
        with pytest.raises(InvalidInput, match="sub can't be read: Permission denied"):
            find([str(folder)])
    finally:
        (folder / "sub").chmod(0o755)


def test_evaluation_data_that_would_be_left_out_are_refused(tmp_path, capsys):
    put(tmp_path, {"a.jsonl": PLAIN, "eval/a.jsonl.zst": zstandard(LINES[3]), "eval/b.csv": b"a,b"})
    assert command(tmp_path / "out", "--against", tmp_path / "eval", tmp_path / "a.jsonl") == 78
    assert "eval/b.csv (CSV and TSV are not supported). Nothing was built: name the files" in capsys.readouterr().err
    assert command(tmp_path / "out", "--against", tmp_path / "eval" / "a.jsonl.zst", tmp_path / "a.jsonl") == 0
    said = capsys.readouterr()
    assert "--against: taken: 1 file (1 .jsonl.zst)" in said.err
    assert "1 of 1 documents" in said.out
