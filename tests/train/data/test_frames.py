"""Data that are frames of features: built of arrays, checked, and read in the same order as tokens are."""

import json

import numpy as np
import pytest

from concertina_data.data_manifest import parse
from concertina_data.places import CacheSettings
from concertina_data.sequences import Sequences
from concertina_state.errors import InvalidInput
from concertina_state.objects.prefix import ObjectPrefix
from concertina_trainer import cli
from concertina_trainer.config.data_config import DataConfig
from concertina_trainer.data.packing import pack
from concertina_trainer.data.read.sequence_reader import Reader

WIDTH, CLASSES, LENGTH = 5, 300, 8
FIELDS = ("--field", f"features=float16x{WIDTH}", "--tokens", "targets", "--vocab-size", str(CLASSES))


def recordings(folder, dtype=np.float16, targets=True):
    """Frame i of recording n is n and then i, four times; its target the two together."""
    folder.mkdir(exist_ok=True)
    for number, frames in enumerate((13, 4, 29, 8, 50, 9)):
        features = np.full((frames, WIDTH), number, dtype)
        features[:, 1:] = np.arange(frames)[:, None]
        if targets:
            np.savez(folder / f"{number}.npz", features=features, targets=50 * number + np.arange(frames))
        else:
            np.save(folder / f"{number}.npy", features)
    return folder


def built(folder, *options):
    out = folder.parent / "data"
    size = ["--shard-mebibytes", "0.001", "--processes", "1"]
    assert cli.main(["data", "build", "--out", str(out), *size, *options, str(folder)]) == 0
    return out


@pytest.fixture
def data(tmp_path):
    return built(recordings(tmp_path / "arrays"), *FIELDS)


def check(found):
    """Each frame that is there has its own target."""
    features = found.fields["features"]
    assert features.dtype == np.float16
    numbers, places = features[..., 0], features[..., 1:]
    assert (places == places[..., :1]).all()
    assert (found.tokens == 50 * numbers + places[..., 0]).all()


def test_sequences_are_those_of_tokens_of_the_same_documents(data, tmp_path, data_cache):
    manifest = parse((data / "manifest.json").read_bytes(), "")
    [field] = manifest.more_fields
    assert (manifest.tokens, manifest.documents, field.width, manifest.vocab_size) == (113, 6, WIDTH, CLASSES)
    assert len(manifest.shards) > 1
    reader = Reader(DataConfig(uri=str(data)), LENGTH, 7)
    found = reader.sequences(np.arange(reader.epoch_size))
    check(found)
    stream = {}
    for shard in manifest.shards:
        elements = np.fromfile(data / shard.file, np.dtype([("token", "<u2"), ("features", "<f2", (WIDTH,))]))
        for begin in range(0, len(elements) - LENGTH, LENGTH):
            stream[tuple(elements["token"][begin : begin + LENGTH + 1])] = elements["features"][begin:][: LENGTH + 1]
    assert {tuple(row) for row in found.tokens.tolist()} == stream.keys()
    for tokens, features in zip(found.tokens.tolist(), found.fields["features"], strict=True):
        assert (stream[tuple(tokens)] == features).all()
    assert reader.digest == manifest.digest


@pytest.mark.parametrize("documents", ["Masked", "Packed", "Bucketed"])
def test_documents_are_told_apart_as_those_of_text(data, data_cache, documents):
    out = ObjectPrefix(str(data))
    list(pack(out, parse(out.get("manifest.json"), ""), LENGTH, 1))
    reader = Reader(DataConfig(uri=str(data), documents=documents), LENGTH, 7)
    found = reader.sequences(np.arange(reader.epoch_size))
    check(found)
    features = found.fields["features"]
    same = features[:, 1:, 0] == features[:, :-1, 0]
    follows = features[:, 1:, 1] == features[:, :-1, 1] + 1
    assert (same & follows)[found.predicted].all()
    assert found.predicted.sum() > 0.7 * 107


def test_frames_without_targets_of_any_float(tmp_path, data_cache):
    out = built(recordings(tmp_path / "arrays", np.float32, targets=False), "--field", f"features=float32x{WIDTH}")
    reader = Reader(DataConfig(uri=str(out)), LENGTH, 7)
    found = reader.sequences(np.arange(reader.epoch_size))
    assert (found.fields["features"].dtype, found.tokens.any()) == (np.float32, False)
    assert ([field.width for field in reader.fields], reader.vocab_size) == ([WIDTH], 0)


LAW = "tests/train/data/test_frames.py::test_sequences_are_those_of_tokens_of_the_same_documents"


@pytest.mark.long(law=LAW)
def test_what_is_set_aside_and_shared_out_is_the_same_bytes(tmp_path):
    folder = recordings(tmp_path / "arrays")
    options = [*FIELDS, "--validation", "0.4", "--shard-mebibytes", "0.001", str(folder)]
    for share in ("0/2", "1/2"):
        assert cli.main(["data", "build", "--out", str(tmp_path / "a"), "--share", share, *options]) == 0
    assert cli.main(["data", "build", "--out", str(tmp_path / "b"), "--processes", "2", *options]) == 0
    a, b = (
        {path.relative_to(tmp_path / each): path.read_bytes() for path in (tmp_path / each).rglob("*.*")}
        for each in ("a", "b")
    )
    assert a == b
    assert any("validation" in str(path) for path in a)


def test_damage_is_found_and_what_it_holds_is_said(data, capsys):
    assert cli.main(["data", "show", str(data)]) == 0
    assert "113 elements of token uint16 below 300, features float16x5 in 6 documents" in capsys.readouterr().out
    assert cli.main(["data", "verify", str(data)]) == 0
    shard = next(data.glob("shard-*.bin"))
    shard.write_bytes(shard.read_bytes()[:-1] + b"\7")
    assert cli.main(["data", "verify", str(data)]) == 1
    assert "is damaged" in capsys.readouterr().err


def test_a_manifest_whose_fields_were_changed_is_refused(data):
    value = json.loads((data / "manifest.json").read_bytes())
    token, features = value["fields"]
    for fields, said in (
        ([features, token], "the digest of its content is"),
        ([token, {**features, "type": "float32"}], "the digest of its content is"),
        ([token, {**features, "type": "complex"}], "the field features has the type complexx5"),
        ([token, token], "the fields are token, token"),
        ([], "the fields are missing"),
        ([{**token, "type": "int64"}], "it must be uint8 or uint16 or uint32"),
    ):
        with pytest.raises(InvalidInput, match=said):
            parse(json.dumps({**value, "fields": fields}).encode(), str(data))
    with pytest.raises(InvalidInput, match="has format 2, but this version reads format 5"):
        parse(json.dumps({**value, "format": 2}).encode(), str(data))


def test_scripts_are_told_that_rows_are_of_tokens(data, data_cache):
    with pytest.raises(InvalidInput, match=r"several fields \(token uint16, features float16x5\), but rows of tokens"):
        Sequences(str(data), LENGTH, 0, CacheSettings(2**20), 1)


def save(folder, **arrays):
    np.savez(folder / "6.npz", **arrays)


FINE = np.zeros((3, WIDTH), np.float16)


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda folder: (folder / "6.npz").write_bytes(b"no"), "6.npz can't be read"),
        (
            lambda folder: save(folder, features=FINE),
            "6.npz has no targets, but features (float16 [3, 5]): name arrays",
        ),
        (
            lambda folder: save(folder, features=FINE[:, :4], targets=[1, 2, 3]),
            "its features has the shape [3, 4], but",
        ),
        (lambda folder: save(folder, features=FINE, targets=[1, 2]), "6.npz has 2 of targets, 3 of features: each"),
        (
            lambda folder: save(folder, features=FINE, targets=[1, 2, 300]),
            "from 1 to 300, and they must be from 0 to 299",
        ),
        (
            lambda folder: save(folder, features=FINE, targets=[-1, 2, 3]),
            "from -1 to 3, and they must be from 0 to 299",
        ),
        (
            lambda folder: save(folder, features=FINE, targets=[1.0, 2, 3]),
            "its targets is a list of float64, but token",
        ),
        (lambda folder: save(folder, features=FINE * np.nan, targets=[1, 2, 3]), "has numbers that are not finite"),
        (
            lambda folder: save(folder, features=FINE + 1e6, targets=[1, 2, 3]),
            "has numbers that are not finite, or too",
        ),
        (lambda folder: save(folder, features=FINE.astype(int) + 4097, targets=[1, 2, 3]), "that the type would round"),
        (lambda folder: save(folder, features=FINE.astype(str), targets=[1, 2, 3]), "its features is a list of <U"),
        (lambda folder: (folder / "6.jsonl").write_text('{"targets": [1], "features": 3}'), "its features is a number"),
        (lambda folder: (folder / "6.jsonl").write_text('{"targets": [1], "features": [[3], [1, 2]]}'), "of different"),
    ],
)
def test_what_can_t_be_built_of_is_named(tmp_path, capsys, spoil, says):
    folder = recordings(tmp_path / "arrays")
    spoil(folder)
    options = ["--out", str(tmp_path / "data"), "--processes", "1", *FIELDS]
    assert cli.main(["data", "build", *options, str(folder)]) == 78
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ([], "0.npz has no text, but features (float16 [13, 5]), targets (int64 [13]): name arrays with --field"),
        ([*FIELDS, "--against", "x.jsonl"], "--chat and --against are for text"),
        (["--tokens", "targets"], "--tokens and --vocab-size go together"),
        ([*FIELDS, "--field", "features=float32"], "the fields are token, features, features: give each field once"),
        (["--field", "token=uint8"], "the fields are token: give each field once, and token ids with --tokens"),
    ],
)
def test_options_that_do_not_fit_are_refused(tmp_path, capsys, options, says):
    folder = recordings(tmp_path / "arrays")
    command = ["data", "build", "--out", str(tmp_path / "data"), "--processes", "1"]
    assert cli.main([*command, *options, str(folder)]) == 78
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    "field", ["time", "time=complex", "time=float32xx", "=float32", "weight=float32", "a=uint8x99999"]
)
def test_a_field_of_another_form_is_refused(tmp_path, capsys, field):
    with pytest.raises(SystemExit, match="2"):
        cli.main(["data", "build", "--out", str(tmp_path), "--field", field, str(tmp_path)])
    assert "give NAME=TYPE, such as features=float16x20" in capsys.readouterr().err
