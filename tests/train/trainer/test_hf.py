"""A model of transformers in the trainer's frame: gradients in every world, exact restores, and its export."""

import json

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from builders.train import families, node, states
from builders.train.gradients import check, computed, whole_gradient
from concertina_protocol import Restore
from concertina_state.checkpoints.reader import StoredCheckpoint, resolve
from concertina_state.errors import InvalidInput
from concertina_state.format.read_plan import Box
from concertina_state.objects.prefix import ObjectPrefix
from concertina_trainer.config.trainer import TrainerConfig
from concertina_trainer.data.read.sequence_reader import Reader
from concertina_trainer.export.export import export, trainer_of
from concertina_trainer.generation.generate import Continuation, Sampling, load
from concertina_trainer.model.initial import usual
from concertina_trainer.parallel.hf_tensor import ADDED_UP
from train.trainer.test_precisions import BOUND as ROUNDED_BLOCKS

REASSOCIATION = 2e-4
"""As in test_resume.py."""
LENGTH = 32
SIZES = {"vocab_size": 260, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4}
HEADS = {**SIZES, "num_key_value_heads": 2, "intermediate_size": 48, "pad_token_id": 0}
MODELS = {
    "gpt2": {"vocab_size": 260, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64},
    "olmo2": {**SIZES, "intermediate_size": 48, "pad_token_id": 0},
    "glm4_moe": {
        **SIZES, "intermediate_size": 48, "pad_token_id": 0, "n_routed_experts": 5, "num_experts_per_tok": 2,
        "moe_intermediate_size": 24, "first_k_dense_replace": 1, "head_dim": 16, "num_key_value_heads": 2,
    },
    "llama": HEADS,
    "qwen3": {**HEADS, "head_dim": 16},
    "gemma2": {**HEADS, **families.GEMMA},
    "phi3": HEADS,
}  # fmt: skip
"""GPT 2 has a tied output layer, and GLM 4.5 a buffer in its files, and experts of which some ranks use none.

The others are divided by their plans for tensor parallelism, like OLMo 2.
"""
ROUNDED = {
    "gpt_oss": {
        **SIZES, "intermediate_size": 24, "num_local_experts": 5, "num_experts_per_tok": 2, "num_key_value_heads": 2,
        "head_dim": 8, "pad_token_id": 0,
    },
}  # fmt: skip
"""Model with experts whose files have the names of its module."""
WORLDS = {
    "1": (1, {}), "3": (3, {}), "hsdp": (4, {"shard": 2}), "tensor": (4, {"tensor": 2}),
    "copies x tensor": (4, {"tensor": 2, "shard": 1}),
}  # fmt: skip
CASES = [
    *((kind, world) for kind in ("gpt2", "olmo2", "glm4_moe") for world in ("1", "3", "hsdp")),
    *((kind, "tensor") for kind in ("llama", "qwen3", "olmo2", "gemma2")),
    ("qwen3", "copies x tensor"),
]
HERE = "tests/train/trainer/test_hf.py"
LAW, TENSOR_LAW = (f"{HERE}::test_gradients_are_those_of_transformers[{case}]" for case in ("gpt2-3", "qwen3-tensor"))


@pytest.fixture(scope="module")
def parent():
    """Return a parent that has imported transformers, which would take each worker more time than its steps."""
    parent = node.Parent("workers.preload_transformers")
    yield parent
    parent.close()


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
        (kind, world)
        if f"[{kind}-{world}]" in LAW + TENSOR_LAW
        else pytest.param(kind, world, marks=pytest.mark.long(law=TENSOR_LAW if "tensor" in world else LAW))
        for kind, world in CASES
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
    found["late"] = []  # transformers imports a model's module when the model is built
    check(found, {name: p.grad for name, p in model.named_parameters()}, loss.item())


DIVIDED = {
    "llama": ("llama", HEADS),
    "biases": ("llama", {**HEADS, "attention_bias": True, "mlp_bias": True}),
    "tied": ("llama", {**HEADS, "tie_word_embeddings": True}),
    "norms of heads": ("qwen3", {**HEADS, "head_dim": 16}),
    "norms of gathered heads": ("olmo2", HEADS),
    "norms without weights": ("olmo", HEADS),
    "gemma2": ("gemma2", {**HEADS, **families.GEMMA}),
    "scaled embedding": ("gemma3_text", {**HEADS, **families.GEMMA, "num_hidden_layers": 7}),
    "merged projections": ("phi3", HEADS),
    "merged feed-forward": ("glm4", {**HEADS, "head_dim": 16, "attention_bias": True}),
    "two layers in the feed-forward": ("starcoder2", {**HEADS, "use_bias": True}),
}
PARTLY_FLOAT32 = {"scaled embedding"}
"""Models that transformers computes in float32 in part."""


ATTENTION = {
    "layers.*.self_attn.q_proj": "colwise", "layers.*.self_attn.k_proj": "colwise",
    "layers.*.self_attn.v_proj": "colwise", "layers.*.self_attn.o_proj": "rowwise",
}  # fmt: skip
FEED_FORWARD = {
    "layers.*.mlp.gate_proj": "colwise", "layers.*.mlp.up_proj": "colwise", "layers.*.mlp.down_proj": "rowwise",
}  # fmt: skip
WRONG = {
    "left out": ("qwen3", ATTENTION, "have different gradients of model.layers.0.self_attn.q_norm.weight"),
    "added up": (
        "qwen3", {**FEED_FORWARD, "layers.*.self_attn.q_norm": ADDED_UP},
        "have equal gradients of model.layers.0.self_attn.q_norm.weight",
    ),
    "not gathered": (
        "phi3", {"layers.*.mlp.gate_up_proj": "colwise", "layers.*.mlp.down_proj": "rowwise"},
        "is wrong for this configuration: it changes logits",
    ),
}  # fmt: skip
"""Mistakes of plans that give wrong gradients, or another model, without an error."""


@pytest.fixture(scope="module")
def of_group(parent, trainer, tmp_path_factory):
    """Results of a tensor group of two ranks. Padding is in the middle of the second rank's vocabulary."""
    models = {**DIVIDED, **{
        name: (kind, {**MODELS[kind], "base_model_tp_plan": plan}) for name, (kind, plan, _) in WRONG.items()
    }}  # fmt: skip
    models = {name: (kind, {**options, "pad_token_id": 201}) for name, (kind, options) in models.items()}
    path = tmp_path_factory.mktemp("group")
    return computed(parent, "workers.hf_tensor:main", trainer, 2, path, {"tensor": 2}, MODELS=json.dumps(models))


def test_a_tensor_group_computes_the_gradients_of_one_process(of_group):
    """Compare the gradients of every parameter in float64, without FSDP."""
    for name in DIVIDED:
        (loss, expected), (divided_loss, gradients) = of_group[name]
        assert divided_loss == pytest.approx(loss, rel=1e-12, abs=0), name
        assert gradients.keys() == expected.keys()
        for parameter, gradient in expected.items():
            close = (1e-6 if name in PARTLY_FLOAT32 else 1e-12) * gradient.abs().max().item() + 1e-14
            torch.testing.assert_close(
                gradients[parameter], gradient, rtol=0, atol=close,
                msg=lambda said, at=(name, parameter): f"{at}: {said}",
            )  # fmt: skip


def test_a_plan_that_is_wrong_is_refused(of_group):
    for name, (_, _, says) in WRONG.items():
        assert says in of_group[name], name


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
    for name in ("1", "3", "hsdp"):
        size, parallelism = WORLDS[name]
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


@pytest.mark.long(law="tests/train/trainer/test_pairs.py::test_muon_goes_on_in_another_layout")
@pytest.mark.parametrize(("kind", "world"), [("qwen3", "tensor"), ("phi3", "copies x tensor")])
def test_muon_orthogonalizes_whole_matrices_of_a_tensor_group(folder, parent, trainer, tmp_path, kind, world):
    """Phi 3 has one weight for queries, keys and values, which is one matrix."""
    made(kind, tmp_path / "model")
    changed = {**config_of(trainer, kind, tmp_path / "model"), "steps": 3}
    changed["optimizer"] = {**trainer["optimizer"], "name": "Muon"}
    trained = []
    for size, parallelism in (WORLDS["1"], WORLDS[world]):
        stored = {"uri": f"file://{tmp_path}/{size}", "initFrom": str(tmp_path / "model")}
        job = node.Job(folder / str(size), parent, changed, stored)
        job.environment["CONCERTINA_PARALLELISM"] = json.dumps(parallelism)
        outcome = job.run(size)
        assert set(outcome.codes.values()) == {0}, outcome.output
        trained.append(states.of_checkpoint(outcome.durable[-1].uri))
    alone, divided = trained
    assert "optimizer.momentum_buffer.model.layers.0.self_attn.o_proj.weight" in alone
    assert divided.keys() == alone.keys()
    for name, value in alone.items():
        close = REASSOCIATION * value.abs().max().item()
        torch.testing.assert_close(divided[name], value, rtol=0, atol=close, msg=lambda said, of=name: f"{of}: {said}")


@pytest.mark.long(law=LAW)
@pytest.mark.parametrize("kind", ["gpt2", "gpt_oss"])
def test_in_float16_losses_differ_by_its_rounding(folder, parent, trainer, tmp_path, kind):
    """Compare losses, also of a model with experts, whose products round in another way beside other tokens."""
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


@pytest.mark.long(law=f"{HERE}::test_a_run_goes_on_in_another_world_and_is_exported")
def test_a_run_goes_on_with_tensor_parallelism_and_without(folder, parent, trainer, tmp_path):
    """Workers stay, and get other parts of the weights. Masked documents, tied weights, and clipped gradients."""
    made("gemma2", tmp_path / "model")
    changed = config_of(trainer, "gemma2", tmp_path / "model")
    changed["optimizer"] = {**changed["optimizer"], "maxGradNorm": 0.05}
    changed["data"] = {**changed["data"], "documents": "Masked"}
    stored = {"uri": f"file://{tmp_path}/run", "initFrom": str(tmp_path / "model")}
    whole = node.Job(folder / "whole", parent, changed, {**stored, "uri": f"file://{tmp_path}/whole"}).run(1)
    assert whole.codes == {0: 0}, whole.output
    job, losses, restore = node.Job(folder / "cut", parent, changed, stored, stays=True), {}, node.FRESH
    for step, size, parallelism in ((3, 3, {}), (6, 4, {"tensor": 2}), (9, 2, {"tensor": 2}), (None, 3, {})):
        job.environment["CONCERTINA_PARALLELISM"] = json.dumps(parallelism)
        outcome = job.run(size, restore, node.Script(kill=(step, (size - 1,))) if step else node.Script())
        assert outcome.losses, outcome.output
        losses |= outcome.losses
        restore = job.newest() if step else restore
    assert set(outcome.codes.values()) == {0}, outcome.output
    assert losses == pytest.approx(whole.losses, rel=REASSOCIATION)


@pytest.mark.long(
    law="tests/train/checkpoints/test_layouts.py::test_a_checkpoint_holds_the_bits_of_one_rank[fsdp x tensor]"
)
def test_a_checkpoint_of_a_tensor_group_holds_the_bits_of_one_rank(folder, parent, trainer, tmp_path):
    made("qwen3", tmp_path / "model")
    changed = {**config_of(trainer, "qwen3", tmp_path / "model"), "steps": 3}
    alone = {"uri": f"file://{tmp_path}/alone", "initFrom": str(tmp_path / "model")}
    [durable] = node.Job(folder / "alone", parent, changed, alone).run(1).durable
    job = node.Job(folder / "cut", parent, changed, {"uri": f"file://{tmp_path}/cut"})
    job.environment["CONCERTINA_PARALLELISM"] = json.dumps({"tensor": 2})
    outcome = job.run(4, Restore("Storage", 3, durable=durable))
    assert outcome.errors == [], outcome.output
    expected, found = (states.of_checkpoint(uri) for uri in (durable.uri, outcome.durable[0].uri))
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name].view(torch.uint8), value.view(torch.uint8)), name
    for uri, out in ((durable.uri, "of one"), (outcome.durable[0].uri, "of four")):
        export(StoredCheckpoint(uri)).write(ObjectPrefix(str(tmp_path / out), create=True))
    files = [(tmp_path / out / "model.safetensors").read_bytes() for out in ("of one", "of four")]
    assert files[0] == files[1]


@pytest.mark.long(law=f"{HERE}::test_a_plan_that_is_wrong_is_refused")
@pytest.mark.parametrize("mistake", WRONG)
def test_a_job_with_a_plan_that_is_wrong_fails_before_its_first_update(folder, parent, trainer, tmp_path, mistake):
    kind, plan, says = WRONG[mistake]
    made(kind, tmp_path / "model")
    config = tmp_path / "model/config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "base_model_tp_plan": plan}))
    stored = {"uri": f"file://{tmp_path}/run", "initFrom": str(tmp_path / "model")}
    job = node.Job(folder, parent, config_of(trainer, kind, tmp_path / "model"), stored)
    job.environment["CONCERTINA_PARALLELISM"] = json.dumps({"tensor": 2})
    outcome = job.run(2)
    assert any(says in fault.message for fault in outcome.faults.values()), outcome.output
    assert not outcome.losses


@pytest.mark.long(law=f"{HERE}::test_a_run_goes_on_in_another_world_and_is_exported")
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
