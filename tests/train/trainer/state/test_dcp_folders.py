"""A run begins with, and continues from, a folder of torch.distributed.checkpoint, also with torchtitan's names."""

import os
import re
import subprocess
import sys
from fractions import Fraction
from importlib.machinery import PathFinder

import pytest
import torch
import torch.distributed.checkpoint as dcp
from typer.testing import CliRunner

import trainingjob.dcp
from builders import pages
from builders.programs import PROGRAMS, SEARCH_PATH
from builders.train import node, states
from concertina.cli.checkpoint import app
from concertina_state.errors import InvalidInput
from concertina_state.format.shardfile import Chunk
from concertina_trainer.config.positions_config import RotaryPairs
from concertina_trainer.config.trainer import TrainerConfig
from concertina_trainer.export import torchtitan
from concertina_trainer.format.dcp_metadata import Location, Piece
from concertina_trainer.format.titan_names import theirs
from concertina_trainer.model.decoder import Decoder
from concertina_trainer.state.dcp_folder import DcpFolder, _separated
from trainingjob._dcp_entries import DerivedArray, StoredArray

STEPS = 3
TITAN_STEPS = 2
ROOT = PROGRAMS.parents[1]
LAW = "tests/train/trainer/state/test_dcp_folders.py::test_a_run_continues_from_a_folder_as_from_our_own_checkpoint"


@pytest.fixture(scope="module")
def config(trainer):
    model = {**trainer["model"], "heads": 4, "kvHeads": 2, "rotaryPairs": "Adjacent"}
    return {**trainer, "steps": STEPS + 2, "model": model}


@pytest.fixture(scope="module")
def durable(folder_of_module, parent, config, tmp_path_factory):
    """Train two workers for STEPS of the steps, and return their checkpoint."""
    uri = f"file://{tmp_path_factory.mktemp('before')}"
    job = node.Job(folder_of_module / "before", parent, config, {"uri": uri, "everySteps": STEPS})
    outcome = job.run(2, script=node.Script(drain=(STEPS, True)))
    assert outcome.errors == [], outcome.output
    [durable] = [each for each in outcome.durable if each.step >= STEPS][:1]
    return durable


@pytest.fixture(scope="module")
def whole(durable):
    return states.of_checkpoint(durable.uri)


def titan_state(whole, step):
    """Return the state as torchtitan 0.3 saves it: moments of queries, keys and values are in one tensor."""
    weights = {theirs(name[6:]): value for name, value in whole.items() if name.startswith("model.")}
    weights["lm_head.weight"] = weights["tok_embeddings.weight"]
    moments = {}
    for moment in ("exp_avg", "exp_avg_sq"):
        own = {name.split(".", 2)[2]: value for name, value in whole.items() if name.startswith(f"optimizer.{moment}.")}
        for layer in range(2):
            parts = [own.pop(f"blocks.{layer}.attention.{kind}.weight") for kind in ("query", "key", "value")]
            groups = torch.cat([part.unflatten(0, (2, -1)) for part in parts], 1)
            moments[f"state.layers.{layer}.attention.qkv_linear.wqkv.weight.{moment}"] = groups.flatten(0, 1)
        moments |= {f"state.{theirs(name)}.{moment}": value for name, value in own.items()}
    steps = {f"{name.removesuffix('exp_avg')}step": torch.tensor(float(step)) for name in moments if name[-1] == "g"}
    rates = {f"param_groups.{name}.lr": 0.1 for name in weights}
    return {
        **weights, "optimizer": {**moments, **steps, **rates}, "train_state": {"step": step, "ntokens_seen": 9},
        "lr_scheduler": {"last_epoch": step}, "dataloader": {"rank_0": b"x"},
    }  # fmt: skip


@pytest.fixture
def run(folder, parent, config, tmp_path):
    """Return a function that runs a job with these options of checkpoint."""

    def run(world, name, **options):
        return node.Job(folder / name, parent, config, {"uri": f"file://{tmp_path}/{name}", **options}).run(world)

    return run


def test_a_run_continues_from_a_folder_as_from_our_own_checkpoint(run, durable, whole, tmp_path):
    expected = run(2, "own", resumeFrom=durable.uri)
    assert min(expected.losses) == durable.step + 1
    trainingjob.dcp.convert(durable.uri, tmp_path / "ours")
    dcp.save(titan_state(whole, durable.step), checkpoint_id=tmp_path / "titan", no_dist=True)
    for name, world in (("ours", 1), ("titan", 2)):
        outcome = run(world, f"run-{name}", resumeFrom=f"file://{tmp_path}/{name}")
        assert set(outcome.codes.values()) == {0}, outcome.output
        assert outcome.losses == pytest.approx(expected.losses, rel=1e-6 if world == 2 else 1e-4), name
        assert f"training continues with sample {7 * durable.step} of data.uri" in outcome.output
    for name, value in states.of_checkpoint(expected.durable[-1].uri).items():
        assert torch.equal(states.of_checkpoint(outcome.durable[-1].uri)[name], value), name


@pytest.mark.long(law=LAW)
def test_so_it_does_with_muon_s_momentum(folder, parent, config, tmp_path):
    """Of matrices of blocks, and with the moments of AdamW of the other parameters."""
    changed = {**config, "optimizer": {**config["optimizer"], "name": "Muon"}}

    def run(world, name, script=None, **options):
        return node.Job(
            folder / name, parent, changed, {"uri": f"file://{tmp_path}/{name}", "everySteps": STEPS, **options}
        ).run(world, script=script)

    begun = run(2, "begun", node.Script(drain=(STEPS, True)))
    [durable] = [each for each in begun.durable if each.step >= STEPS][:1]
    trainingjob.dcp.convert(durable.uri, tmp_path / "folder")
    expected = run(2, "own", resumeFrom=durable.uri)
    found = run(2, "resumed", resumeFrom=f"file://{tmp_path}/folder")
    assert set(found.codes.values()) == {0}, found.output
    assert found.losses == expected.losses
    for name, value in states.of_checkpoint(expected.durable[-1].uri).items():
        assert torch.equal(states.of_checkpoint(found.durable[-1].uri)[name], value), name


def test_a_run_begins_with_the_weights_of_a_folder(run, durable, whole, tmp_path):
    weights = {name: value for name, value in titan_state(whole, 1).items() if isinstance(value, torch.Tensor)}
    dcp.save(weights, checkpoint_id=tmp_path / "titan", no_dist=True)
    expected = run(2, "own", initFrom=durable.uri)
    outcome = run(2, "begun", initFrom=f"file://{tmp_path}/titan")
    assert set(outcome.codes.values()) == {0}, outcome.output
    assert outcome.losses == pytest.approx(expected.losses, rel=1e-6)


def without_moments(state):
    state["optimizer"] = {key: value for key, value in state["optimizer"].items() if "exp_avg_sq" not in key}


def with_another_step(state):
    state["train_state"]["step"] += 1


def with_another_tensor(state):
    state["layers.0.attention.q_norm.weight"] = torch.ones(2)


def with_another_head(state):
    state["lm_head.weight"] = state["lm_head.weight"] + 1


def with_code(state):
    state["train_state"]["step"] = Fraction(3)


def with_moments_of_bfloat16(state):
    state["optimizer"] = {
        key: value.bfloat16() if "exp_avg" in key else value for key, value in state["optimizer"].items()
    }


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (without_moments, r"lacks \d+ arrays of the state, such as optimizer\.exp_avg_sq\."),
        (with_another_step, r"must have one number of finished steps .* and has: \d+, \d+"),
        (with_another_tensor, r"has a tensor layers\.0\.attention\.q_norm\.weight, which this model has no place for"),
        (with_another_head, r"has lm_head\.weight, which is not the embedding: set trainer\.model\.tieEmbeddings"),
        (with_code, r"__0_0\.distcp can't be read: Weights only load failed"),
        (with_moments_of_bfloat16, r"optimizer\.exp_avg\S* was saved as BF16 .* but is now F32"),
    ],
)
def test_a_folder_that_can_not_be_continued_from_is_refused_by_name(run, durable, whole, tmp_path, change, sentence):
    state = titan_state(whole, durable.step)
    change(state)
    dcp.save(state, checkpoint_id=tmp_path / "changed", no_dist=True)
    outcome = run(1, "refused", resumeFrom=f"file://{tmp_path}/changed")
    assert not outcome.losses
    assert re.search(sentence, outcome.faults[0].message), outcome.faults


def test_torchtitans_order_of_pairs_is_required(whole, tmp_path, trainer):
    """Expect a refusal, because with the other order the same weights compute something else."""
    dcp.save(titan_state(whole, 3), checkpoint_id=tmp_path / "titan", no_dist=True)
    model = TrainerConfig.model_validate(trainer).model
    with pytest.raises(InvalidInput, match=r"rotates adjacent elements: set trainer\.model\.rotaryPairs to Adjacent"):
        DcpFolder.open(f"file://{tmp_path}/titan").weights(whole.keys(), model)


def test_an_export_for_torchtitan_has_its_names_and_its_order_of_rows(durable, whole, config, tmp_path):
    values = {"s3://bucket/run-1": durable.uri, "outputs/checkpoint/step-1000": f"{tmp_path}/out"}
    [command] = pages.commands("dcp.md", "concertina checkpoint export s3://bucket/run-1 outputs", values)
    said = CliRunner().invoke(app, command[2:])
    assert said.exit_code == 0, said.output
    expected = titan_state(whole, durable.step)
    group = {name.split(".", 1)[1].rpartition(".")[0] for name in expected["optimizer"] if name.endswith(".step")}
    rates = {
        "lr": config["optimizer"]["learningRate"],
        "eps": 1e-8,
        "betas": (0.9, 0.95),
        "fused": True,
        "weight_decay": 0.1,
    }
    optimizer = {key: value for key, value in expected["optimizer"].items() if key.startswith("state.")}
    for name in group:
        optimizer |= {f"param_groups.{name}.{option}": value for option, value in rates.items()}
    for name in group:
        if "norm" in name or "tok_embeddings" in name:
            optimizer[f"param_groups.{name}.weight_decay"] = 0.0
    model = TrainerConfig.model_validate(config).model
    trained = durable.step * config["globalBatchSize"] * model.sequence_length
    expected |= {"optimizer": optimizer, "train_state": {"step": durable.step, "ntokens_seen": trained}}
    del expected["dataloader"]
    loaded = {
        name: torch.zeros_like(value) if isinstance(value, torch.Tensor) else dict.fromkeys(value)
        for name, value in expected.items()
    }
    loaded["optimizer"] = {
        key: torch.zeros_like(value) if isinstance(value, torch.Tensor) else None for key, value in optimizer.items()
    }
    dcp.load(loaded, checkpoint_id=tmp_path / "out", no_dist=True)
    torch.testing.assert_close(loaded, expected, rtol=0, atol=0)


def test_with_pairs_of_halves_the_rows_of_an_export_are_in_torchtitans_order(trainer):
    """Compute the same logits with the rows in the other order and the other pairs."""
    halves = TrainerConfig.model_validate(trainer).model
    adjacent = halves.model_copy(update={"rotary_pairs": RotaryPairs.adjacent})
    assert halves.rotary_pairs is RotaryPairs.halves
    torch.manual_seed(0)
    before, after = Decoder(halves), Decoder(adjacent)
    state = {name: torch.randn_like(value) * 0.2 for name, value in before.state_dict().items()}
    before.load_state_dict(state)
    arrays = {f"model.{name}": StoredArray((), f"model.{name}", "F32", value.shape) for name, value in state.items()}
    for name, array in arrays.items():
        entry = torchtitan._entry((name,), [array], halves)
        if isinstance(entry, DerivedArray):
            state[name[6:]] = entry.compute([state[name[6:]]])
    after.load_state_dict(state)
    tokens = torch.arange(24).view(2, 12) % halves.vocab_size
    with torch.no_grad():
        assert not torch.allclose(before(tokens), Decoder(halves)(tokens), atol=0.1)
        torch.testing.assert_close(after(tokens), before(tokens), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"model": {"window": {"size": 4}}}, "has another model than torchtitan's Llama"),
        ({"optimizer": {"name": "SGD"}}, "has moments of SGD, and torchtitan's optimizer is AdamW"),
    ],
)
def test_what_torchtitan_computes_otherwise_is_not_exported(config, change, sentence):
    changed = {key: {**config.get(key, {}), **change.get(key, {})} for key in ("model", "optimizer")}
    with pytest.raises(InvalidInput, match=sentence):
        torchtitan._check("file:///x", TrainerConfig.model_validate({**config, **changed}))


@pytest.mark.parametrize("cut", [1, 7, 8, 15, 16, 25, 31, 40, 63])
def test_rows_of_fused_tensors_come_into_their_places_however_they_are_cut(config, tmp_path, cut):
    """Two groups of two queries' heads, a key and a value, of 8 rows each."""
    model = TrainerConfig.model_validate(config).model
    whole, place = torch.arange(64.0 * 3).view(64, 3), Location("f", 0, 1)
    name = "optimizer.state.layers.0.attention.qkv_linear.wqkv.weight.exp_avg"
    groups = whole.view(2, 4, 8, 3)
    expected = {"query": groups[:, :2], "key": groups[:, 2], "value": groups[:, 3]}
    found = {kind: torch.full((part.numel() // 3, 3), -1.0) for kind, part in expected.items()}
    for begin, end in ((0, cut), (cut, 64)):
        piece = Piece(Chunk(name, "F32", (begin, 0), (end - begin, 3), (64, 3)), place)
        for part in _separated(piece, "a", model):
            (to, _), (count, _) = part.chunk.offsets, part.chunk.shape
            first = begin + part.begin // (3 * 4)
            found[part.chunk.name.split(".")[1]][to : to + count] = whole[first : first + count]
    for kind, part in expected.items():
        assert torch.equal(found[kind], part.reshape(-1, 3)), kind


@pytest.mark.long(law=LAW)
@pytest.mark.timeout(600)
def test_torchtitans_own_checkpoint_has_the_same_logits_here_and_is_continued(titan, folder, parent, data, tmp_path):
    """torchtitan trains its debug model on two ranks; its own code computes the logits and takes moments apart.

    Then it continues from our checkpoint of that model.
    """
    titan.train(tmp_path / "titan", TITAN_STEPS)
    tokens, expected, separated = titan.logits(tmp_path / f"titan/checkpoint/step-{TITAN_STEPS}")
    rope = {"type": "Llama3", "factor": 8.0, "lowFrequencyFactor": 1.0, "highFrequencyFactor": 4.0}
    fields = {
        "layers": 6, "dim": 256, "heads": 16, "hiddenDim": 768, "vocabSize": 2048, "sequenceLength": 64,
        "tieEmbeddings": False, "rotaryPairs": "Adjacent", "ropeTheta": 500000.0, "normEpsilon": 1e-5,
        "ropeScaling": {**rope, "originalLength": 8192},
    }  # fmt: skip
    trainer = {
        "steps": TITAN_STEPS, "data": {"uri": str(data)}, "globalBatchSize": 4, "microBatchSize": 2, "model": fields,
        "optimizer": {"learningRate": 0.0},
    }  # fmt: skip
    uri = f"file://{tmp_path}/titan/checkpoint/step-{TITAN_STEPS}"
    job = node.Job(folder, parent, trainer, {"uri": f"file://{tmp_path}/new", "resumeFrom": uri})
    outcome = job.run(2)
    assert set(outcome.codes.values()) == {0}, outcome.output
    state = states.of_checkpoint(outcome.durable[-1].uri)
    decoder = Decoder(TrainerConfig.model_validate(trainer).model)
    decoder.load_state_dict({name[6:]: value for name, value in state.items() if name.startswith("model.")})
    with torch.no_grad():
        torch.testing.assert_close(decoder(tokens), expected, rtol=1e-4, atol=1e-4)
    for kind, part in (("query", "wq"), ("key", "wk"), ("value", "wv")):
        assert torch.equal(state[f"optimizer.exp_avg.blocks.3.attention.{kind}.weight"], separated[part]), kind
    torchtitan.convert(outcome.durable[-1].uri, tmp_path / f"ours/checkpoint/step-{TITAN_STEPS}")
    again, logits, moments = titan.logits(tmp_path / f"ours/checkpoint/step-{TITAN_STEPS}")
    torch.testing.assert_close((again, logits, moments), (tokens, expected, separated), rtol=0, atol=0)
    (tmp_path / "ours/world").write_text("0")  # torchtitan_debug.py then leaves the data loader out
    text = titan.train(tmp_path / "ours", TITAN_STEPS + 1)
    assert f"starts at step {TITAN_STEPS}" in text, text
    assert f"through at step {TITAN_STEPS + 1}" in text, text


class Titan:
    """Runs torchtitan's own code, with this environment."""

    def __init__(self, environment):
        self._environment = environment

    def train(self, folder, steps):
        """Train on two ranks, from the newest checkpoint in the folder if it has one, and return the output."""
        script = str(ROOT / "examples" / "scripts" / "torchtitan_debug.py")
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", script]
        options = ["--steps", str(steps), "--save-every", str(steps), "--checkpoints", str(folder)]
        run = subprocess.run([*torchrun, *options], env=self._environment, stdout=subprocess.PIPE, text=True)
        assert run.returncode == 0, run.stdout
        return run.stdout

    def logits(self, saved):
        """Return tokens, logits and the moments of a layer's attention, as torchtitan's own code computes them."""
        out = saved.with_name("logits")
        command = [sys.executable, str(PROGRAMS / "titan_logits.py"), str(saved), str(out)]
        subprocess.run(command, env=self._environment, check=True)
        return torch.load(out)


@pytest.fixture
def titan():
    """Train by torchtitan; return tokens, logits and the moments of a layer's attention as its own code gives them."""
    places = [*os.environ.get("CONCERTINA_FRAMEWORKS", "").split(os.pathsep), *sys.path]
    place = next((each for each in places if PathFinder.find_spec("torchtitan", [each])), None)
    if place is None:
        pytest.skip("torchtitan is not installed, nor in a folder of CONCERTINA_FRAMEWORKS")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([SEARCH_PATH, place]), "OMP_NUM_THREADS": "1"}
    return Titan(environment)
