"""`concertina plan` as a command: what it prints and writes, what it refuses, and with which Python it measures."""

from __future__ import annotations

import importlib.metadata
import json
import re
import subprocess
import sysconfig
import venv
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as xml

import pytest
from click.testing import Result
from transformers import AutoConfig, AutoModelForCausalLM
from typer.testing import CliRunner

from builders.train import families
from concertina.cli.main import app
from concertina_data.data_manifest import FORMAT, NAME, DataManifest, Field, TokenizerFacts, token_field
from concertina_trainer.config.model_config import ModelConfig
from concertina_trainer.format import hf_config

ROOT = Path(__file__).resolve().parents[3]
MODEL = {
    "layers": 4, "dim": 128, "heads": 8, "kvHeads": 4, "hiddenDim": 352, "vocabSize": 512, "sequenceLength": 128,
    "tieEmbeddings": False,
}  # fmt: skip
TRAINER = {"steps": 100, "data": {"uri": "/data"}, "model": MODEL, "globalBatchSize": 32, "microBatchSize": 4}
SPEC: dict[str, Any] = {
    "replicas": 4,
    "elastic": {"minReplicas": 2},
    "workersPerReplica": 2,
    "parallelism": {"tensor": 2},
    "price": {"perReplicaHour": "12.0", "currency": "EUR"},
    "template": {"spec": {"containers": [{"name": "trainer", "image": "concertina/trainer:test"}]}},
    "trainer": TRAINER,
}
OWN_COMMAND = {"spec": {"containers": [{"name": "trainer", "image": "python", "command": ["python3", "train.py"]}]}}
PLANNED = {
    "replicas", "ranks", "ranksPerReplica", "degrees", "schedule", "activations", "acrossNodes", "parameters",
    "trainedParameters", "flopsPerToken", "flopsCounted", "microbatches", "rows", "filling", "memory", "fits",
    "snapshotBytes", "offloadedBytes", "dataGroups", "dataGroupsRead", "traffic", "gpu", "fabric",
    "stepSeconds", "seconds", "bubble", "mfu", "hfu", "tokensPerSecond", "budget", "bottleneck",
}  # fmt: skip
"""Of each size or layout in the JSON. Whoever reads it counts on all of them: add, and take none away."""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return written(tmp_path)


def written(folder: Path, **changes: Any) -> Path:
    """Write a manifest in JSON, which is also YAML."""
    spec = {name: value for name, value in {**SPEC, **changes}.items() if value is not None}
    metadata = {"name": "planned"}
    manifest = {"apiVersion": "concertina.dev/v1beta1", "kind": "TrainingJob", "metadata": metadata, "spec": spec}
    path = folder / "job.yaml"
    path.write_text(json.dumps(manifest))
    return path


def plan(*arguments: object, stdin: str | None = None) -> Result:
    return CliRunner().invoke(app, ["plan", *map(str, arguments)], input=stdin)


def planned(*arguments: object) -> dict[str, Any]:
    done = plan(*arguments, "-o", "json")
    assert done.exit_code == 0, done.output
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_a_screen_for_the_wanted_size_and_a_line_for_the_least(file: Path) -> None:
    done = plan(file, "--no-memory", "--tokens", "1e9")
    assert done.exit_code == 0, done.output
    first, *others = done.stdout.splitlines()
    assert first == "planned: 8 ranks in 4 replicas, H100, InfiniBand-400"
    rows = {row[0]: row[1] for row in (re.split(r"  +", line.strip(), maxsplit=1) for line in others) if len(row) == 2}
    assert rows["Sizes"] == "2, 3, 4 replicas"
    assert rows["Layout"] == "shard 4 x tensor 2"
    assert rows["On nodes"] == "2 ranks each; between nodes: shard"
    assert rows["Batch"] == "32 sequences of 128 tokens: 2 microbatches of 4 on each of 4"
    assert re.fullmatch(
        r"a replica reads 4 of 16 groups, [\d,.]+ MiB/s; all replicas together read the data 1 times an epoch",
        rows["Data"],
    )
    assert re.fullmatch(r"1e\+09 tokens in .*, [\d,]+ EUR, if nothing fails", rows["Run"])
    assert {"tensor", "shard"} < set(rows), "what is sent"
    assert "First bottleneck: " in done.stdout
    assert "Shrunk to 2 replicas (shard 2 x tensor 2): " in done.stdout
    assert "Memory is not measured" not in done.stdout, "nobody asked for it"


def test_the_manifest_from_standard_input_at_another_size(file: Path) -> None:
    done = plan(
        "-", "--no-memory", "--replicas", 2, "--gpu", "B200", "--fabric", "Ethernet-100", stdin=file.read_text()
    )
    assert done.stdout.startswith("planned: 4 ranks in 2 replicas, B200, Ethernet-100\n"), done.output
    assert "Shrunk" not in done.stdout


def test_a_search_is_ordered_by_speed(file: Path) -> None:
    found = planned(file, "--top-layouts", 6, "--no-memory")
    assert found.keys() == {"job", "validReplicas", "settings", "remedies", "layouts"}
    seconds = [each["stepSeconds"] for each in found["layouts"]]
    assert seconds == sorted(seconds)
    assert len(seconds) == 6
    assert {each["ranks"] for each in found["layouts"]} == {8}


def test_a_picture(file: Path, tmp_path: Path) -> None:
    done = plan(file, "--no-memory", "--picture", tmp_path / "ranks.svg")
    assert done.exit_code == 0, done.output
    titles = [each.text or "" for each in xml.parse(tmp_path / "ranks.svg").iter("{http://www.w3.org/2000/svg}title")]
    assert titles[0] == "Ranks of planned on nodes"
    assert "rank 5: shard 2, tensor 1" in titles
    assert len(titles) == 1 + 8
    done = plan(file, "--no-memory", "--picture", tmp_path / "none" / "ranks.svg")
    assert (done.exit_code, done.stdout) == (1, "")
    assert "can't be written: No such file or directory" in done.stderr


@pytest.mark.parametrize(
    ("changes", "options", "sentence"),
    [
        ({"trainer": None, "template": OWN_COMMAND}, (), "runs its own command, which `concertina plan` can't plan"),
        ({"parallelism": {"tensor": 3}}, (), "tensor is 3: the nearest that fit: 2 and 4"),
        ({"parallelism": {"pipeline": 5}}, (), "pipeline is 5: the nearest that fit: 4"),
        (
            {"workersPerReplica": 1},
            ("--replicas", 3),
            "not a multiple of the block of 2 workers: the nearest that fit: 2 and 4",
        ),
        (
            {"trainer": {**TRAINER, "model": {"hf": "/none", "sequenceLength": 128}}, "parallelism": {"tensor": 2}},
            (),
            "does not know what the tensor groups of trainer.model.hf send: plan the job without parallelism.tensor",
        ),
        ({"parallelism": {"shard": 16}}, (), "it must be a multiple of 8"),
        (
            {},
            ("--gpu", "H300"),
            "H300 on InfiniBand-400 is not known. Known ones: A100, H100, H200, B200, Ethernet-100",
        ),
        ({}, ("--fabric", "Token-Ring"), "H100 on Token-Ring is not known"),
        ({}, ("--python", "/no/python"), "`/no/python` can't be run"),
        ({}, ("--python", "python 'is"), "can't be run: No closing quotation"),
        ({}, ("--python", "false"), "the layout could not be measured: exit status 1"),
        (
            {},
            ("--python", "echo"),
            "did not answer as concertina_trainer.planning of this version does: '-m",
        ),
        ({}, ("--python", "printf [{}]"), "planning of this version does: TypeError: list indices"),
        ({}, ("--tokens", "inf"), "--tokens is the number of tokens of a run: it must be above 0, not inf"),
        ({}, ("--tokens", "nan"), "it must be above 0, not nan"),
        ({}, ("--tokens", "-5"), "it must be above 0, not -5"),
    ],
)
def test_what_can_not_be_planned_is_one_sentence(
    tmp_path: Path, changes: dict[str, Any], options: tuple[Any, ...], sentence: str
) -> None:
    done = plan(written(tmp_path, **changes), *options)
    assert sentence in done.stderr
    assert "Traceback" not in done.stderr
    assert (done.exit_code, done.stdout) == (1, "")


def test_a_described_model_is_planned_as_its_config_says(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(hf_config.config_json(ModelConfig.model_validate(MODEL))))
    typed = planned(written(tmp_path), "--no-memory")
    described = {**TRAINER, "model": {"from": str(tmp_path), "sequenceLength": 128}}
    assert planned(written(tmp_path, trainer=described), "--no-memory") == typed
    done = plan(written(tmp_path, trainer=described, parallelism={"tensor": 3}), "--no-memory")
    assert "tensor is 3: the nearest that fit: 2 and 4" in done.stderr
    (tmp_path / "config.json").unlink()
    done = plan(written(tmp_path, trainer=described))
    assert f"trainer.model.from can't be planned: {tmp_path} has no config.json" in done.stderr


def environment(folder: Path, lock: str) -> list[str]:
    """Return a Python with concertina and those packages of requirements/LOCK.txt that are installed here."""
    venv.create(folder, symlinks=True)
    [packages] = folder.glob("lib/python*/site-packages")
    (packages / "concertina.pth").write_text(f"{ROOT / 'operator'}\n{ROOT / 'trainer_image'}\n")
    here = Path(sysconfig.get_path("purelib"))
    pinned = re.findall(r"^([a-z0-9-]+)==", (ROOT / "requirements" / f"{lock}.txt").read_text(), re.MULTILINE)
    installed = {each.metadata["Name"].lower().replace("_", "-").replace(".", "-"): each for each in
                 importlib.metadata.distributions(path=[str(here)])}  # fmt: skip
    for name in installed.keys() & set(pinned):
        for top in {file.parts[0] for file in installed[name].files or ()} - {"..", "__pycache__"}:
            if not (packages / top).exists():
                (packages / top).symlink_to(here / top)
    return [str(folder / "bin" / "python"), "-I"]


@pytest.fixture(scope="module")
def environments(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], list[str]]:
    """Pythons as of the base install of concertina-cli, which is without torch, and in the trainer's image."""
    folder = tmp_path_factory.mktemp("environments")
    return environment(folder / "cli", "cli"), environment(folder / "trainer", "trainer")


def without_torch(environments: tuple[list[str], list[str]], *options: object) -> str:
    command = [*environments[0], "-m", "concertina.cli", "plan", *map(str, options)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_without_torch_it_says_how_to_measure_in_the_trainers_image(
    environments: tuple[list[str], list[str]], file: Path
) -> None:
    told = without_torch(environments, file)
    assert "Memory is not measured: that needs torch, which is not installed here." in told
    assert "\n  pip install 'concertina-cli[torch]'\n" in told
    assert f"concertina plan {file} --python 'docker run --rm -i --entrypoint python3 concertina/trainer:test'" in told
    assert "at the peak" not in told
    assert "First bottleneck: " in told
    assert "Shrunk to 2 replicas" in told


def test_json_has_names_that_stay_and_memory_as_the_trainers_image_measures_it(
    environments: tuple[list[str], list[str]], tmp_path: Path
) -> None:
    file = written(tmp_path, trainer={**TRAINER, "model": {**MODEL, "layers": 2}})
    python = " ".join(environments[1])
    measured = json.loads(without_torch(environments, file, "--replicas", 2, "-o", "json", "--python", python))
    assert measured.keys() == {"job", "validReplicas", "settings", "remedies", "sizes"}
    assert (measured["job"], measured["validReplicas"]) == ("planned", [2, 3, 4])
    assert measured["settings"] == {"memory.activations": "Keep", "memory.reshardAfterForward": "Never"}
    assert measured["remedies"] == []
    [size] = measured["sizes"]
    assert size.keys() == PLANNED
    assert size["degrees"] == {"replicate": 1, "shard": 2, "pipeline": 1, "context": 1, "tensor": 2, "expert": 1}
    assert size["seconds"].keys() == {"compute", "bubble", "optimizer", "host", "communication"}
    assert size["budget"].keys() == {"tokens", "days", "cost", "currency"}
    for part in size["traffic"]:
        assert part.keys() == {
            "dimension", "what", "ranks", "times", "bytes", "sent", "acrossNodes", "bytesPerSecond", "hidden",
        }  # fmt: skip
    [rank] = size["memory"]
    assert rank.keys() == {"rank", "phase", "total", "kinds", "hostBytes"}
    assert rank["total"] == sum(rank["kinds"].values()) > 0
    assert size["fits"] is True
    both = planned(file, "--no-memory")["sizes"]
    assert [each["replicas"] for each in both] == [4, 2]
    assert both[1] == size | {"memory": [], "fits": None}


LAW = "tests/unit/cli/test_plan.py::test_json_has_names_that_stay_and_memory_as_the_trainers_image_measures_it"


@pytest.mark.long(law=LAW)
def test_memory_in_the_text_and_in_a_search(file: Path) -> None:
    done = plan(file, "--replicas", 2)
    assert done.exit_code == 0, done.output
    [head, row] = re.findall(r"^(?:MiB at the peak|rank 0) .*", done.stdout, re.MULTILINE)
    assert head.split()[4:] == [
        "weights", "moments", "gradients", "gathered", "activations", "routed", "communication", "temporary", "all",
    ]  # fmt: skip
    assert len(row.split()) == 2 + 1 + 9
    done = plan(file, "--top-layouts", 1)
    assert done.exit_code == 0, done.output
    title, _, _, row = done.stdout.splitlines()
    assert title == "The fastest layouts of planned on 8 H100, InfiniBand-400:"
    assert re.search(r"\d+\.\d%  +\d+\.\d [MG]iB  +\w", row), "MFU, memory and what holds it back"


OF_TRANSFORMERS = {
    "gpt2": {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 128, "vocab_size": 512},
    "olmo2": {**families.SIZES, "max_position_embeddings": 128, "pad_token_id": 0},
    "olmoe": {**families.OF_TRANSFORMERS["olmoe"], "max_position_embeddings": 128},
}
"""A model with a tied output layer, one like Llama, and one with experts."""
HF_LAW = "tests/unit/trainer/model/test_hf.py::test_tied_weights_are_planned_once"


def of_transformers(folder: Path) -> Path:
    trainer = {**TRAINER, "model": {"hf": str(folder), "sequenceLength": 128}}
    return written(folder, trainer=trainer, parallelism=None, workersPerReplica=1)


@pytest.mark.long(law=HF_LAW)
@pytest.mark.parametrize("kind", OF_TRANSFORMERS)
def test_a_model_of_transformers_is_planned_with_the_weights_that_it_has(tmp_path: Path, kind: str) -> None:
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **OF_TRANSFORMERS[kind]))
    model.config.save_pretrained(tmp_path)
    weights = sum(parameter.numel() for parameter in model.parameters())
    [size] = planned(of_transformers(tmp_path), "--replicas", 4, "--vocab-size", 100)["sizes"]
    assert (size["parameters"], size["trainedParameters"]) == (weights, weights)
    [rank] = size["memory"]
    assert rank["kinds"]["weights"] == pytest.approx(4 * weights / 4, rel=0.01)
    assert rank["kinds"]["moments"] == pytest.approx(8 * weights / 4, rel=0.01)
    assert size["snapshotBytes"] == 5 * 12 * weights // 4 + (9 << 20)


def test_a_model_of_transformers_without_its_config_is_refused(tmp_path: Path) -> None:
    done = plan(of_transformers(tmp_path), "--vocab-size", 100)
    assert f"trainer.model.hf can't be planned: {tmp_path} has no config.json" in done.stderr
    assert (done.exit_code, done.stdout) == (1, "")


AUDIO = ROOT / "examples" / "audio"
OWN = {
    "entrypoint": "audio_model:spec", "options": {"dim": 64, "blocks": 3, "kernel": 5}, "sequenceLength": 100,
}  # fmt: skip


def own(folder: Path, uri: str = "/no/data", **model: Any) -> Path:
    trainer = {"steps": 100, "model": {**OWN, **model}, "globalBatchSize": 64, "data": {"uri": uri}}
    return written(folder, trainer=trainer, parallelism=None, workersPerReplica=1)


@pytest.fixture
def audio(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{ROOT / 'trainer_image'}:{AUDIO}")


@pytest.fixture
def features(tmp_path: Path) -> str:
    """Write the manifest of a data set. Nothing else of the data set is read."""
    fields = (token_field(8), Field("features", "float16", 20))
    facts = TokenizerFacts("frames", "digest", 0)
    folder = tmp_path / "features"
    folder.mkdir()
    (folder / NAME).write_bytes(DataManifest(FORMAT, 8, facts, fields, ()).to_json())
    return str(folder)


@pytest.mark.long(law="tests/unit/cli/test_plan.py::test_a_model_of_one_s_own_in_words")
def test_a_model_of_one_s_own_is_planned_as_its_data_and_its_code_say(
    audio: None, features: str, tmp_path: Path
) -> None:
    found = planned(own(tmp_path, features), "--replicas", 4)
    [size] = found["sizes"]
    assert size.keys() == PLANNED
    # An entry, blocks of two norms, a convolution and a feed-forward, and an exit for 20 numbers and 8 targets.
    block = 2 * 2 * 64 + (5 * 64 * 64 + 64) + (2 * 4 * 64 * 64 + 5 * 64)
    weights = (20 * 64 + 64) + 3 * block + (64 * 28 + 28)
    assert (size["parameters"], size["trainedParameters"]) == (weights, weights)
    assert (size["flopsPerToken"], size["flopsCounted"]) == (6 * weights, False), "as the ModelSpec says"
    [rank] = size["memory"]
    assert rank["kinds"]["weights"] == pytest.approx(4 * weights / 4, rel=0.01)
    assert rank["kinds"]["moments"] == pytest.approx(8 * weights / 4, rel=0.01)
    assert size["fits"] is True
    assert size["snapshotBytes"] == 5 * 12 * weights // 4 + (9 << 20)
    assert {part["dimension"] for part in size["traffic"]} == {"shard"}
    assert 0 < size["mfu"] < 1


def test_a_model_of_one_s_own_in_words(audio: None, tmp_path: Path) -> None:
    """Its data are told, as nobody here can read them."""
    done = plan(own(tmp_path), "--no-memory", "--vocab-size", 8, "--field", "features=float16x20")
    assert done.exit_code == 0, done.output
    assert re.search(r"^Parameters +\d+,\d+, [\d.e+]+ FLOPs a frame *$", done.stdout, re.MULTILINE)
    assert re.search(r"^Batch +64 sequences of 100 frames: ", done.stdout, re.MULTILINE)
    assert re.search(r"^Speed +[\d,]+ frames/s, MFU [\d.]+%, HFU [\d.]+% ", done.stdout, re.MULTILINE)
    assert re.search(r"^Shrunk to 2 replicas \(shard 2\): .* frames/s", done.stdout, re.MULTILINE)


MISSING = "tests/unit/cli/test_plan.py::test_what_is_missing_to_plan_a_model_of_one_s_own_is_one_sentence"


@pytest.mark.parametrize(
    ("model", "options", "sentence"),
    [
        pytest.param(
            OWN, (), "/no/data does not exist: build the data there, or correct the URI of the data. Or give "
            "--vocab-size", id="data",
        ),
        pytest.param(
            {**OWN, "entrypoint": "no_such_package:spec"}, ("--vocab-size", 8), "can't be imported "
            "(ModuleNotFoundError: No module named 'no_such_package'): `concertina plan` runs it, so install its "
            "package, add its folder to PYTHONPATH, or plan in its image (--python 'docker run", id="package",
            marks=pytest.mark.long(law=f"{MISSING}[data]"),
        ),
        pytest.param(MODEL, ("--field", "a=int64"), "--vocab-size and --field are for a model of", id="decoder"),
    ],
)  # fmt: skip
def test_what_is_missing_to_plan_a_model_of_one_s_own_is_one_sentence(
    audio: None, tmp_path: Path, model: dict[str, Any], options: tuple[Any, ...], sentence: str
) -> None:
    done = plan(
        written(tmp_path, trainer={**TRAINER, "model": model, "data": {"uri": "/no/data"}}, parallelism=None), *options
    )
    assert sentence in done.stderr
    assert (done.exit_code, done.stdout) == (1, "")
