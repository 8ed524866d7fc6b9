"""Where a new run's state comes from: another run's whole state, or weights alone."""

import node
import pytest
import torch
import torch.nn.functional as F
from transformers import LlamaConfig, LlamaForCausalLM

from concertina_trainer.config import TrainerConfig
from concertina_trainer.data.reader import Reader
from concertina_trainer.state.shardfile import Continued
from concertina_trainer.storage.hf_names import config_json
from concertina_trainer.storage.stored import StoredCheckpoint


@pytest.fixture(scope="module")
def before(folder_of_module, parent, trainer, tmp_path_factory):
    """A finished run of three workers: its folder, and its job."""
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


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"dim": 48}, "embedding.weight is [256, 32] in file://"),
        ({"layers": 1}, "has blocks.1.attention.key_value.weight [32, 32], which this model has not"),
        ({"layers": 3}, "model.blocks.2."),
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
        ({"layers": 1}, "blocks.1.attention.key_value.weight, which the model has no place for"),
        ({"layers": 3}, "is not wholly in the saved state"),
        ({"hiddenDim": 64}, "gate_up.weight was saved as F32 [192, 32] and the model has F32 [128, 32]"),
    ],
)
def test_the_state_of_another_model_is_not_gone_on_from(folder, parent, trainer, before, tmp_path, change, sentence):
    options = {"uri": f"file://{tmp_path}/new", "resumeFrom": before[0]}
    changed = {**trainer, "steps": 14, "model": {**trainer["model"], **change}}
    outcome = node.Job(folder, parent, changed, options).run(1)
    assert outcome.codes == {0: 78}, outcome.output
    assert sentence in outcome.faults[0].message


def test_another_kind_of_model_is_refused(folder, parent, trainer, tmp_path):
    config, _ = llama(trainer)
    other = LlamaForCausalLM(LlamaConfig(**(config_json(config.model) | {"attention_bias": True})))
    other.save_pretrained(tmp_path / "llama")
    options = {"uri": f"file://{tmp_path}/new", "initFrom": f"file://{tmp_path}/llama/model.safetensors"}
    outcome = node.Job(folder, parent, trainer, options).run(1)
    assert outcome.codes == {0: 78}, outcome.output
    assert "_proj.bias, which the bundled model has no place for" in outcome.faults[0].message


@pytest.mark.parametrize("field", ["resumeFrom", "initFrom"])
def test_a_beginning_that_a_store_refuses_is_bad_input_at_once(s3, folder, parent, trainer, tmp_path, field):
    options = {"uri": f"file://{tmp_path}/new", field: "s3://nowhere/run"}
    outcome = node.Job(folder, parent, trainer, options).run(1)
    assert outcome.codes == {0: 78}
    assert outcome.faults[0].reason == "BadInput"
    assert "The bucket nowhere does not exist at http://127.0.0.1" in outcome.faults[0].message
