"""A model of transformers in the trainer's frame: gradients in every world, exact restores, and its export."""

import json

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from builders.train import families, node, states
from builders.train.gradients import check, whole_gradient
from concertina_state.checkpoints.reader import StoredCheckpoint, resolve
from concertina_state.errors import InvalidInput
from concertina_state.format.read_plan import Box
from concertina_state.objects.prefix import ObjectPrefix
from concertina_trainer.config.trainer import TrainerConfig
from concertina_trainer.data.read.sequence_reader import Reader
from concertina_trainer.export.export import export, trainer_of
from concertina_trainer.generation.generate import Continuation, Sampling, load
from concertina_trainer.model.initial import usual
from train.trainer.test_precisions import BOUND as ROUNDED_BLOCKS

REASSOCIATION = 2e-4
"""As in test_resume.py."""
LENGTH = 32
SIZES = {"vocab_size": 260, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4}
MODELS = {
    "gpt2": {"vocab_size": 260, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64},
    "olmo2": {**SIZES, "intermediate_size": 48, "pad_token_id": 0},
    "glm4_moe": {
        **SIZES, "intermediate_size": 48, "pad_token_id": 0, "n_routed_experts": 5, "num_experts_per_tok": 2,
        "moe_intermediate_size": 24, "first_k_dense_replace": 1, "head_dim": 16, "num_key_value_heads": 2,
    },
}  # fmt: skip
"""GPT 2 has a tied output layer, and GLM 4.5 a buffer in its files, and experts of which some ranks use none."""
ROUNDED = {
    "gpt_oss": {
        **SIZES, "intermediate_size": 24, "num_local_experts": 5, "num_experts_per_tok": 2, "num_key_value_heads": 2,
        "head_dim": 8, "pad_token_id": 0,
    },
}  # fmt: skip
"""Model with experts whose files have the names of its module."""
WORLDS = {"1": (1, {}), "3": (3, {}), "hsdp": (4, {"shard": 2})}
LAW = "tests/train/trainer/test_hf.py::test_gradients_are_those_of_transformers[gpt2-3]"


def made(kind, folder):
    """Save a random model in a folder, and return it."""
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **(MODELS | ROUNDED)[kind])).eval()
    model.save_pretrained(folder)
    return model


def config_of(trainer, kind, folder, **options):
    return {**trainer, "model": {"hf": str(folder), "sequenceLength": LENGTH, **options}}


@pytest.mark.parametrize(
    ("kind", "world"),
    [
        pytest.param(kind, world, marks=[] if (kind, world) == ("gpt2", "3") else [pytest.mark.long(law=LAW)])
        for kind in MODELS
        for world in WORLDS
    ],
)
def test_gradients_are_those_of_transformers(parent, trainer, tmp_path, kind, world):
    model = made(kind, tmp_path / "model")
    options = json.loads((tmp_path / "model/config.json").read_text())
    changed = config_of(trainer, kind, tmp_path / "model", options=options)
    config = TrainerConfig.model_validate(changed)
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(usual(name, p.shape, Box((0,) * p.dim(), tuple(p.shape)), config.seed))
    reader = Reader(config.data, LENGTH, config.seed)
    tokens = torch.from_numpy(reader.read(100, 100 + config.global_batch_size))
    loss = F.cross_entropy(model(tokens[:, :-1]).logits.flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    size, parallelism = WORLDS[world]
    found = whole_gradient(parent, changed, size, tmp_path, parallelism=parallelism)
    found["late"] = []  # transformers is imported by each worker
    check(found, {name: p.grad for name, p in model.named_parameters()}, loss.item())


def test_a_run_goes_on_in_another_world_and_is_exported(folder, parent, trainer, tmp_path):
    """Begin with the weights of a folder, lose a worker, and load the exported model with transformers."""
    model = made("gpt2", tmp_path / "model")
    changed = config_of(trainer, "gpt2", tmp_path / "model")
    stored = {"uri": f"file://{tmp_path}/run", "initFrom": str(tmp_path / "model")}
    whole = node.Job(folder / "whole", parent, changed, {**stored, "uri": f"file://{tmp_path}/whole"}).run(1)
    assert whole.codes == {0: 0}, whole.output
    job = node.Job(folder / "killed", parent, changed, stored)
    first = job.run(3, script=node.Script(kill=(6, (1,))))
    (tmp_path / "model/config.json").unlink()
    job.lose(1)
    resumed = job.run(2, job.newest())
    assert set(resumed.codes.values()) == {0}, resumed.output
    assert resumed.progress[-1].restored_from == "Memory"
    assert {**first.losses, **resumed.losses} == pytest.approx(whole.losses, rel=REASSOCIATION)
    read = f"gpt2 with 3 layers and {model.num_parameters():,} weights"
    assert [run.progress[-1].settings["model.hf"] for run in (first, resumed)] == [read, read], "in each round"
    export(StoredCheckpoint(resolve(stored["uri"]))).write(ObjectPrefix(str(tmp_path / "hf"), create=True))
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "hf").eval()
    exported = load_file(tmp_path / "hf/model.safetensors")
    assert "lm_head.weight" not in exported
    for name, weight in again.named_parameters():
        assert torch.equal(weight, exported[name]), name
    assert not torch.equal(again.transformer.wte.weight, model.transformer.wte.weight), "it was trained"
    settings = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    assert again.generate(torch.tensor([[1, 2, 3]]), **settings).shape == (1, 6)


@pytest.mark.long(law="tests/train/trainer/test_pairs.py::test_muon_goes_on_in_another_layout")
def test_muon_updates_layers_and_their_experts_in_every_world(folder, parent, trainer, tmp_path):
    model = made("glm4_moe", tmp_path / "model")
    save_file(model.state_dict(), tmp_path / "model/model.safetensors")  # save_pretrained separates experts
    changed = config_of(trainer, "glm4_moe", tmp_path / "model")
    changed["optimizer"] = {**trainer["optimizer"], "name": "Muon"}
    losses = {}
    for name, (size, parallelism) in WORLDS.items():
        stored = {"uri": f"file://{tmp_path}/{name}", "initFrom": str(tmp_path / "model")}
        job = node.Job(folder / name, parent, changed, stored)
        job.environment["CONCERTINA_PARALLELISM"] = json.dumps(parallelism)
        outcome = job.run(size)
        assert set(outcome.codes.values()) == {0}, outcome.output
        losses[name] = outcome.losses
    assert losses["3"] == pytest.approx(losses["1"], rel=REASSOCIATION)
    assert losses["hsdp"] == pytest.approx(losses["1"], rel=REASSOCIATION)
    moments = {name for name in states.of_checkpoint(outcome.durable[-1].uri) if ".momentum_buffer." in name}
    assert "optimizer.momentum_buffer.model.layers.1.mlp.experts.gate_up_proj" in moments
    assert all(".layers." in name and "norm" not in name and "bias" not in name for name in moments)


@pytest.mark.long(law=LAW)
@pytest.mark.parametrize("kind", ["gpt2", "gpt_oss"])
def test_in_float16_losses_differ_by_its_rounding(folder, parent, trainer, tmp_path, kind):
    """Also those of experts, whose products round in another way beside other tokens."""
    made(kind, tmp_path / "model")
    sgd = {"name": "SGD", "learningRate": 0.1, "warmupSteps": 1}
    losses = {}
    for precision in ("Float32", "Float16"):
        configured = {**config_of(trainer, kind, tmp_path / "model"), "steps": 4, "optimizer": sgd}
        stored = {"uri": f"file://{tmp_path}/{precision}", "initFrom": str(tmp_path / "model")}
        outcome = node.Job(folder / precision, parent, {**configured, "precision": precision}, stored).run(2)
        assert set(outcome.codes.values()) == {0}, outcome.output
        losses[precision] = outcome.losses
    assert losses["Float16"] == pytest.approx(losses["Float32"], rel=ROUNDED_BLOCKS)
    assert losses["Float16"] != losses["Float32"]


EXPERTS_LAW = "tests/train/trainer/test_hf.py::test_experts_are_read_and_exported_one_by_one[olmoe]"


@pytest.mark.parametrize(
    "kind",
    [
        kind if kind == "olmoe" else pytest.param(kind, marks=pytest.mark.long(law=EXPERTS_LAW))
        for kind in families.OF_TRANSFORMERS
    ],
)
def test_experts_are_read_and_exported_one_by_one(folder, parent, trainer, tmp_path, kind):
    """Three ranks have parts of the experts of a layer. The files have one tensor for each expert."""
    fields = {**families.OF_TRANSFORMERS[kind], "vocab_size": 260}
    torch.manual_seed(3)
    AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **fields)).save_pretrained(tmp_path / "model")
    changed = {**config_of(trainer, kind, tmp_path / "model"), "steps": 2}
    stored = {"uri": f"file://{tmp_path}/run", "initFrom": str(tmp_path / "model")}
    outcome = node.Job(folder, parent, changed, stored).run(3)
    assert set(outcome.codes.values()) == {0}, outcome.output
    begun = AutoModelForCausalLM.from_pretrained(tmp_path / "model").eval()
    config = TrainerConfig.model_validate(changed)
    reader = Reader(config.data, LENGTH, config.seed)
    tokens = torch.from_numpy(reader.read(0, config.global_batch_size))
    with torch.no_grad():
        loss = F.cross_entropy(begun(tokens[:, :-1]).logits.flatten(0, 1), tokens[:, 1:].flatten())
    assert outcome.losses[1] == pytest.approx(loss.item(), rel=1e-5)
    checkpoint = StoredCheckpoint(resolve(stored["uri"]))
    export(checkpoint).write(ObjectPrefix(str(tmp_path / "hf"), create=True))
    published, exported = (load_file(tmp_path / name / "model.safetensors") for name in ("model", "hf"))
    assert {name: weight.shape for name, weight in exported.items()} == {
        name: weight.shape for name, weight in published.items()
    }
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "hf").eval()
    trained = load(checkpoint, trainer_of(checkpoint).model)
    with torch.no_grad():
        logits = [model(tokens[:, :-1]).logits for model in (trained, again, begun)]
    torch.testing.assert_close(logits[0], logits[1], rtol=1e-5, atol=1e-5)
    assert not torch.allclose(logits[0], logits[2], atol=1e-3), "it was trained"


def test_it_generates_as_transformers_does(folder, parent, trainer, tmp_path):
    made("gpt2", tmp_path / "model")
    changed = {**config_of(trainer, "gpt2", tmp_path / "model"), "steps": 2}
    stored = {"uri": f"file://{tmp_path}/run", "initFrom": str(tmp_path / "model")}
    assert node.Job(folder, parent, changed, stored).run(1).codes == {0: 0}
    checkpoint = StoredCheckpoint(resolve(stored["uri"]))
    export(checkpoint).write(ObjectPrefix(str(tmp_path / "hf"), create=True))
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "hf").eval()
    tokens = list(b"The ")
    settings = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    written = theirs.generate(torch.tensor([tokens]), **settings)[0, len(tokens) :].tolist()
    ours = Continuation(checkpoint, device="cpu")
    assert not set(written) & set(ours.vocabulary.ends)
    assert ours.text("The ", sampling=Sampling(tokens=5)) == ours.vocabulary.decode(written)
    with pytest.raises(InvalidInput, match="the text has 65 tokens, and max_position_embeddings of the model is 64"):
        ours.logits([1] * 65)


@pytest.mark.long(law="tests/train/trainer/test_hf.py::test_a_run_goes_on_in_another_world_and_is_exported")
def test_what_can_t_begin_is_refused(folder, parent, trainer, tmp_path):
    made("olmo2", tmp_path / "model")
    made("gpt2", tmp_path / "other")
    changed = config_of(trainer, "olmo2", tmp_path / "model")
    uri = f"file://{tmp_path}/run"
    cases = {
        "trains weights that exist: set checkpoint.initFrom": ({"uri": uri}, changed),
        "the initial weights belong to another model than spec.trainer.model.hf: in": (
            {"uri": uri, "initFrom": str(tmp_path / "other")}, changed
        ),
        "none does not exist: create it, or correct the URI": (
            {"uri": uri, "initFrom": str(tmp_path / "model")}, config_of(trainer, "olmo2", tmp_path / "none")
        ),
        "spec.trainer.model.options differ from": (
            {"uri": uri, "initFrom": str(tmp_path / "model")},
            config_of(trainer, "olmo2", tmp_path / "model", options={"model_type": "olmo2"}),
        ),
    }  # fmt: skip
    for number, (says, (checkpoint, configuration)) in enumerate(cases.items()):
        outcome = node.Job(folder / str(number), parent, configuration, checkpoint).run(1)
        assert set(outcome.codes.values()) != {0}
        assert any(says in fault.message for fault in outcome.faults.values()), outcome.faults
