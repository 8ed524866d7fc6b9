"""Where a new run's state comes from: another run's whole state, or weights alone."""

import json

import pytest
import torch
import torch.nn.functional as F
from transformers import (
    FalconConfig,
    FalconForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
)

from builders.train import node, states
from concertina_state.checkpoints.reader import StoredCheckpoint
from concertina_state.errors import InvalidInput
from concertina_state.format.shardfile import Continued
from concertina_trainer.config.trainer import TrainerConfig
from concertina_trainer.data.read.sequence_reader import Reader
from concertina_trainer.format.hf_config import config_json
from concertina_trainer.model.decoder import Decoder
from concertina_trainer.state.weights import SafetensorsFiles


@pytest.fixture(scope="module")
def before(folder_of_module, parent, trainer, tmp_path_factory):
    """Finish a run of three workers, and return its folder and its job."""
    uri = f"file://{tmp_path_factory.mktemp('before')}"
    [durable] = node.Job(folder_of_module / "before", parent, trainer, {"uri": uri}, uid="before").run(3).durable
    return uri, durable


def test_another_runs_state_is_gone_on_from(folder, parent, trainer, before, tmp_path):
    uri, durable = before
    options = {"uri": f"file://{tmp_path}/new", "resumeFrom": uri}
    outcome = node.Job(folder, parent, {**trainer, "steps": 14}, options, uid="new").run(2)
    assert set(outcome.codes.values()) == {0}, outcome.output
    assert list(outcome.losses) == [13, 14]
    assert [p.position for p in outcome.progress if p.phase == "training"] == [7 * 13, 7 * 14]
    manifest = StoredCheckpoint(outcome.durable[-1].uri).manifest
    assert manifest.continued == Continued("before", 1, durable.step)


def test_weights_of_another_run_are_begun_with_at_step_0(folder, parent, trainer, before, tmp_path):
    uri, _ = before
    plain = node.Job(folder / "plain", parent, {**trainer, "steps": 1}).run(1)
    options = {"uri": f"file://{tmp_path}/new", "initFrom": uri}
    outcome = node.Job(folder / "new", parent, {**trainer, "steps": 1}, options).run(2)
    assert set(outcome.codes.values()) == {0}, outcome.output
    assert outcome.losses[1] < plain.losses[1] - 0.5, "what has been learnt is there"
    assert outcome.durable[-1].step == 1


def llama(trainer) -> tuple[TrainerConfig, LlamaForCausalLM]:
    config = TrainerConfig.model_validate(trainer)
    torch.manual_seed(3)
    return config, LlamaForCausalLM(LlamaConfig(**config_json(config.model)))


def test_a_hugging_face_model_is_begun_with(folder, parent, trainer, tmp_path):
    """The first loss is that of the same model in transformers; two workers, grouped queries, several files."""
    config, model = llama(trainer)
    model.save_pretrained(tmp_path / "llama", max_shard_size="40KB")
    assert len(list((tmp_path / "llama").glob("*.safetensors"))) > 1
    options = {"uri": f"file://{tmp_path}/new", "initFrom": f"file://{tmp_path}/llama"}
    outcome = node.Job(folder, parent, {**trainer, "steps": 1}, options).run(2)
    assert set(outcome.codes.values()) == {0}, outcome.output
    tokens = torch.from_numpy(Reader(config.data, config.model.sequence_length, config.seed).read(0, 7))
    with torch.no_grad():
        logits = model(tokens[:, :-1]).logits
    expected = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).item()
    assert outcome.losses[1] == pytest.approx(expected, rel=1e-5)


MODELS = {
    "llama": ({"ropeTheta": 500000.0, "normEpsilon": 1e-6, "tieEmbeddings": False}, LlamaConfig, LlamaForCausalLM),
    "mistral": ({"hiddenDim": 64, "normEpsilon": 1e-3}, MistralConfig, MistralForCausalLM),
}
"""What spec.trainer.model says besides, and who makes the folder."""


def published(trainer, kind, folder, **changed):
    """Write a folder like one of Hugging Face for the model of spec.trainer.model, with the given changes."""
    said, config, model = MODELS[kind]
    trainer = {**trainer, "model": {**trainer["model"], **said}}
    ours = config_json(TrainerConfig.model_validate(trainer).model)
    del ours["architectures"], ours["model_type"]
    torch.manual_seed(3)
    made = model(config(**({"sliding_window": None} | ours | {"initializer_range": 0.5} | changed)))
    made.save_pretrained(folder, max_shard_size="30KB" if kind == "llama" else "1GB")
    return trainer, made


@pytest.mark.parametrize("kind", MODELS)
def test_what_is_begun_with_has_the_logits_that_it_had(folder, parent, trainer, tmp_path, kind):
    """Taken from the run's own state after a step at rate 0."""
    changed, model = published(trainer, kind, tmp_path / kind)
    frozen = {**changed, "steps": 1, "optimizer": {"learningRate": 0.0}}
    options = {"uri": f"file://{tmp_path}/new", "initFrom": f"file://{tmp_path}/{kind}"}
    job = node.Job(folder, parent, frozen, options)
    outcome = job.run(2)
    assert set(outcome.codes.values()) == {0}, outcome.output
    assert "so only the names and shapes" not in outcome.output
    decoder = Decoder(TrainerConfig.model_validate(changed).model)
    weights = states.whole(job)
    tokens = torch.arange(64).view(2, 32) * 37 % 256
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            parameter.copy_(weights[f"model.{name}"])
        torch.testing.assert_close(decoder(tokens), model(tokens).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("kind", "changed", "sentence"),
    [
        ("llama", {"rope_theta": 1e4}, "rope_theta is 10000.0, and spec.trainer.model.ropeTheta is 500000.0: set it"),
        ("llama", {"rms_norm_eps": 1e-5}, "rms_norm_eps is 1e-05, and spec.trainer.model.normEpsilon is 1e-06: set it"),
        ("llama", {"num_attention_heads": 1, "head_dim": 32}, "num_attention_heads is 1, and spec.trainer.model.heads"),
        ("llama", {"num_key_value_heads": 2}, "num_key_value_heads is 2, and spec.trainer.model.kvHeads is 1: set it"),
        ("llama", {"head_dim": 8}, "head_dim is 8, and spec.trainer.model.headDim is absent: set it to 8"),
        ("llama", {"tie_word_embeddings": True}, "tie_word_embeddings is true, and spec.trainer.model.tieEmbeddings"),
        ("llama", {"num_hidden_layers": 3}, "num_hidden_layers is 3, and spec.trainer.model.layers is 2: set it to 3"),
        ("llama", {"vocab_size": 300}, "vocab_size is 300, and spec.trainer.model.vocabSize is 256: set it to 300"),
        ("llama", {"intermediate_size": 32}, "intermediate_size is 32, and spec.trainer.model.hiddenDim is 96: set it"),
        ("llama", {"hidden_act": "gelu"}, 'hidden_act is "gelu", and the bundled decoder supports only "silu"'),
        ("llama", {"attention_bias": True}, "attention_bias is true, and the bundled decoder supports only false"),
        ("llama", {"mlp_bias": True}, "mlp_bias is true, and the bundled decoder supports only false"),
        (
            "llama",
            {"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                              "original_max_position_embeddings": 16}},
            'rope_type is "Llama3", and spec.trainer.model.ropeScaling.type is absent: set it to "Llama3"',
        ),
        (
            "llama",
            {"rope_scaling": {"rope_type": "dynamic", "factor": 8.0}},
            'rope_type is "dynamic", and the bundled decoder supports linear, llama3, yarn',
        ),
        (
            "llama",
            {"rope_scaling": {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 16,
                              "mscale": 0.7, "mscale_all_dim": 1.0}},
            "mscale is 0.7, and the bundled decoder does not support it",
        ),
        ("mistral", {"sliding_window": 16}, "sliding_window is 16, and spec.trainer.model.window.size is absent: set"),
    ],
)  # fmt: skip
def test_a_model_that_computes_otherwise_is_refused_by_its_config(trainer, tmp_path, kind, changed, sentence):
    changed_trainer, _ = published(trainer, kind, tmp_path / "model", **changed)
    files = SafetensorsFiles(f"file://{tmp_path}/model")
    with pytest.raises(InvalidInput) as refused:
        files.of(TrainerConfig.model_validate(changed_trainer).model)
    assert f"file://{tmp_path}/model/config.json" in str(refused.value)
    assert sentence in str(refused.value)


@pytest.mark.parametrize(
    ("model", "config", "named"),
    [
        (FalconForCausalLM, FalconConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, vocab_size=256),
         "falcon"),
        (GPT2LMHeadModel, GPT2Config(n_embd=32, n_layer=2, n_head=2, vocab_size=256, n_positions=32), "gpt2"),
    ],
)  # fmt: skip
def test_another_architecture_is_refused_by_its_name(trainer, tmp_path, model, config, named):
    model(config).save_pretrained(tmp_path / "model")
    with pytest.raises(InvalidInput, match=f'model_type is "{named}", and the bundled decoder supports llama, mis'):
        SafetensorsFiles(f"file://{tmp_path}/model").of(TrainerConfig.model_validate(trainer).model)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"rope_parameters": None, "rope_theta": 7e4}, "rope_theta is 70000.0"),
        ({"rope_parameters": None}, "rope_theta is 10000.0, and"),
        ({"rope_parameters": None, "rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}}, '"Linear"'),
        ({"rms_norm_eps": None}, ""),
        ({"num_attention_heads": None}, "num_attention_heads is missing"),
        ({"model_type": None}, "model_type is missing"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config is"),
        ({"rope_parameters": [1]}, "can't be read as a config.json"),
    ],
)
def test_files_of_other_versions_of_transformers_are_understood(trainer, tmp_path, change, sentence):
    changed, _ = published(trainer, "llama", tmp_path)
    file = tmp_path / "config.json"
    said = {key: value for key, value in {**json.loads(file.read_text()), **change}.items() if value is not None}
    file.write_text(json.dumps(said))
    files, model = SafetensorsFiles(f"file://{tmp_path}"), TrainerConfig.model_validate(changed).model
    if not sentence:
        assert files.of(model)[1] == ""
    else:
        with pytest.raises(InvalidInput, match=sentence):
            files.of(model)


def test_of_a_folder_that_holds_the_weights_twice_those_of_the_index_are_read(trainer, tmp_path):
    changed, _ = published(trainer, "llama", tmp_path)
    names = {path.name for path in tmp_path.glob("*.safetensors")}
    assert len(names) > 1
    (tmp_path / "consolidated.safetensors").write_bytes(b"of another kind")
    model = TrainerConfig.model_validate(changed).model
    chunks = [name for shard in SafetensorsFiles(f"file://{tmp_path}").of(model)[0] for name in shard.header.chunks]
    decoder = Decoder(model)
    assert {name.removeprefix("model.") for name in chunks} == {name for name, _ in decoder.named_parameters()}


def test_another_rope_theta_ends_the_job_before_it_begins(folder, parent, trainer, tmp_path):
    changed, _ = published(trainer, "llama", tmp_path / "llama", rope_theta=1e4)
    options = {"uri": f"file://{tmp_path}/new", "initFrom": f"file://{tmp_path}/llama"}
    outcome = node.Job(folder, parent, changed, options).run(1)
    assert outcome.codes == {0: 78}, outcome.output
    assert "set it to 10000.0" in outcome.faults[0].message


def test_weights_without_a_config_are_begun_with_and_what_that_leaves_open_is_said(folder, parent, trainer, tmp_path):
    changed, _ = published(trainer, "mistral", tmp_path / "bare")
    (tmp_path / "bare" / "config.json").unlink()
    options = {"uri": f"file://{tmp_path}/new", "initFrom": f"file://{tmp_path}/bare/model.safetensors"}
    outcome = node.Job(folder, parent, {**changed, "steps": 1}, options).run(1)
    assert set(outcome.codes.values()) == {0}, outcome.output
    assert "bare/config.json is missing, so only the names and shapes of the weights were checked" in outcome.output
    assert "trained with the same heads" in outcome.output


FILE = "tests/train/trainer/state/test_beginnings.py"
NOT_FITTING = pytest.mark.long(law=f"{FILE}::test_weights_that_do_not_fit_are_refused")
NOT_CONTINUED = pytest.mark.long(law=f"{FILE}::test_the_state_of_another_model_is_not_gone_on_from")


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"dim": 48}, "dim is 32, and spec.trainer.model.dim is 48: set it to 32"),
        pytest.param({"layers": 1}, "layers is 2, and spec.trainer.model.layers is 1: set it to 2", marks=NOT_FITTING),
        pytest.param({"heads": 1}, "heads is 2, and spec.trainer.model.heads is 1: set it to 2", marks=NOT_FITTING),
        ({"ropeTheta": 5e5}, "ropeTheta is 10000.0, and spec.trainer.model.ropeTheta is 500000.0: set it to 10000.0"),
    ],
)
def test_weights_that_do_not_fit_are_refused(folder, parent, trainer, before, tmp_path, change, sentence):
    options = {"uri": f"file://{tmp_path}/new", "initFrom": before[0]}
    changed = {**trainer, "model": {**trainer["model"], **change}}
    outcome = node.Job(folder, parent, changed, options).run(1)
    assert outcome.codes == {0: 78}, outcome.output
    assert sentence in outcome.faults[0].message


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"layers": 1}, "model.layers was 2 and is now 1"),
        pytest.param({"layers": 3}, "model.layers was 2 and is now 3", marks=NOT_CONTINUED),
        pytest.param({"hiddenDim": 64}, "model.hiddenDim was 96 and is now 64", marks=NOT_CONTINUED),
    ],
)
def test_the_state_of_another_model_is_not_gone_on_from(folder, parent, trainer, before, tmp_path, change, sentence):
    options = {"uri": f"file://{tmp_path}/new", "resumeFrom": before[0]}
    changed = {**trainer, "steps": 14, "model": {**trainer["model"], **change}}
    outcome = node.Job(folder, parent, changed, options).run(1)
    assert outcome.codes == {0: 78}, outcome.output
    assert sentence in outcome.faults[0].message


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"attention_bias": True}, "_proj.bias, which the bundled model does not have"),
        ({"vocab_size": 300}, "embedding.weight is [300, 32] in file://"),
        ({"num_hidden_layers": 3}, "contains blocks.2.attention_norm.weight [32], which this model does not have"),
        ({"num_hidden_layers": 1}, "model.blocks.1."),
    ],
)
def test_without_a_config_tensors_that_do_not_fit_are_refused(folder, parent, trainer, tmp_path, change, sentence):
    changed, _ = published(trainer, "mistral" if "attention_bias" not in change else "llama", tmp_path / "m", **change)
    (tmp_path / "m" / "config.json").unlink()
    options = {"uri": f"file://{tmp_path}/new", "initFrom": f"file://{tmp_path}/m"}
    outcome = node.Job(folder, parent, changed, options).run(1)
    assert outcome.codes == {0: 78}, outcome.output
    assert sentence in outcome.faults[0].message


@pytest.mark.parametrize("field", ["resumeFrom", "initFrom"])
def test_a_beginning_that_a_store_refuses_is_bad_input_at_once(s3, folder, parent, trainer, tmp_path, field):
    options = {"uri": f"file://{tmp_path}/new", field: "s3://nowhere/run"}
    outcome = node.Job(folder, parent, trainer, options).run(1)
    assert outcome.codes == {0: 78}
    assert outcome.faults[0].reason == "InvalidInput"
    assert "The bucket nowhere does not exist at http://127.0.0.1" in outcome.faults[0].message
