"""A model that a folder's config.json describes: read by the first round, kept in the state, and checked."""

import json
import shutil

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

from builders.train import families, node
from concertina_protocol import Restore
from concertina_state.checkpoints.reader import StoredCheckpoint
from concertina_state.objects.prefix import ObjectPrefix
from concertina_trainer.config.trainer import TrainerConfig
from concertina_trainer.data.read.sequence_reader import Reader
from concertina_trainer.export.export import export

STEP = 4


@pytest.fixture
def described(folder, trainer):
    """Return a model that a folder holds, and the trainer section that names the folder."""
    model = families.made("qwen3", vocab_size=256, tie_word_embeddings=True)
    model.save_pretrained(folder / "qwen")
    model_section = {"from": str(folder / "qwen"), "sequenceLength": 32}
    return model, {**trainer, "model": model_section}


def test_a_job_needs_the_folder_once(folder, parent, described, tmp_path):
    """Take the model of later rounds from the state in memory and in storage, which export writes too."""
    model, trainer = described
    place = trainer["model"]["from"]
    options = {"uri": f"file://{tmp_path}/run", "initFrom": place}
    job = node.Job(folder / "job", parent, trainer, options)
    first = job.run(2, script=node.Script(drain=(STEP - 1, False)))
    assert set(first.codes.values()) == {0}, first.output
    assert f"the model is the one in {place}/config.json: qwen3, 3 layers, " in first.output
    config = TrainerConfig.model_validate(trainer)
    tokens = torch.from_numpy(Reader(config.data, 32, config.seed).read(0, 7))
    with torch.no_grad():
        expected = F.cross_entropy(model(tokens[:, :-1]).logits.flatten(0, 1), tokens[:, 1:].flatten()).item()
    assert first.losses[1] == pytest.approx(expected, rel=1e-5)
    shutil.rmtree(place)
    second = job.run(1, job.newest())
    assert set(second.codes.values()) == {0}, second.output
    assert f"the model is the one in the saved state of step {max(first.losses)}: qwen3, " in second.output
    [*_, durable] = second.durable
    third = job.run(2, Restore("Storage", durable.step, durable=durable))
    assert set(third.codes.values()) == {0}, third.output
    checkpoint = StoredCheckpoint(durable.uri)
    assert checkpoint.manifest.trainer["model"]["headDim"] == 16
    export(checkpoint).write(ObjectPrefix(str(tmp_path / "hf"), create=True))
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "hf").config.model_type == "qwen3"


@pytest.mark.parametrize(
    ("model", "config", "says"),
    [
        ({"heads": 8}, {}, "heads is 4, and spec.trainer.model.heads is 8: remove the field"),
        ({}, {"attention_bias": True}, "attention_bias is true, and the bundled decoder supports only false"),
        ({}, {"hidden_size": 36}, "dim: Input should be a multiple of 8"),
        ({"lora": {"rank": 2}}, {"num_attention_heads": 6, "num_key_value_heads": 3}, "tensor must divide"),
    ],
)
def test_what_can_t_be_is_refused(folder, parent, described, model, config, says):
    _, trainer = described
    file = folder / "qwen" / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **config}))
    job = node.Job(folder / "job", parent, {**trainer, "model": {**trainer["model"], **model}})
    job.environment["CONCERTINA_PARALLELISM"] = json.dumps({"tensor": 4 if "num_attention_heads" in config else 1})
    outcome = job.run(4 if "num_attention_heads" in config else 1)
    # The first rank that ends makes the agent kill the others.
    assert set(outcome.codes.values()) - {-9} == {78}, outcome.output
    assert says in outcome.faults[0].message


def test_another_folder_s_model_does_not_resume(folder, parent, described):
    _, trainer = described
    job = node.Job(folder / "job", parent, trainer)
    first = job.run(1, script=node.Script(drain=(1, False)))
    assert set(first.codes.values()) == {0}, first.output
    families.made("qwen3", vocab_size=256, tie_word_embeddings=True, rms_norm_eps=1e-5).save_pretrained(
        folder / "other"
    )
    job.trainer = {**trainer, "model": {**trainer["model"], "from": str(folder / "other")}}
    outcome = job.run(1, job.newest())
    assert outcome.codes == {0: 78}, outcome.output
    assert "model.normEpsilon was 1e-06 and is now 1e-05" in outcome.faults[0].message
