"""Experts as a Hugging Face model, which transformers computes as we do; or a sentence why there is none."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from builders.train import small
from concertina_state.checkpoints.reader import StoredCheckpoint
from concertina_state.errors import InvalidInput
from concertina_state.objects.prefix import ObjectPrefix
from concertina_trainer.config.trainer import TrainerConfig
from concertina_trainer.export.export import export
from concertina_trainer.model.decoder import Decoder

KINDS = {
    "mixtral": {"count": 4, "hiddenDim": 24},
    "glm4_moe": {"count": 5, "hiddenDim": 16, "scores": "Sigmoid", "shared": 2, "biasRate": 0.1, "firstDense": 1},
}


def published(trainer, experts, tmp_path, monkeypatch):
    """Return a checkpoint of a model with random weights, and the model."""
    changed = {**trainer, "model": {**trainer["model"], "experts": experts}}
    monkeypatch.setenv("CONCERTINA_TRAINER", json.dumps(changed))
    model = Decoder(TrainerConfig.model_validate(changed).model)
    generator = torch.Generator().manual_seed(3)
    weights = {}
    with torch.no_grad():
        for name, value in (*model.named_parameters(), *model.named_buffers()):
            value.copy_(torch.randn(value.shape, generator=generator) * 0.3)
            weights[name] = value.detach().numpy()
    durable = small.publish(f"file://{tmp_path}/run", tmp_path, weights=weights)
    return StoredCheckpoint(durable.uri), model


@pytest.mark.parametrize("kind", KINDS)
def test_transformers_computes_the_same(trainer, tmp_path, monkeypatch, kind):
    checkpoint, model = published(trainer, KINDS[kind], tmp_path, monkeypatch)
    export(checkpoint).write(ObjectPrefix(str(tmp_path / "hf"), create=True))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    assert loaded.config.model_type == kind
    tokens = torch.randint(0, 256, (3, 20), generator=torch.Generator().manual_seed(4))
    with torch.no_grad():
        torch.testing.assert_close(loaded(tokens).logits, model(tokens), rtol=1e-4, atol=1e-4)


def test_averages_are_exported_where_they_are_asked_for(trainer, tmp_path, monkeypatch):
    """Frozen weights and buffers have no average, and are exported themselves."""
    optimizer = {**trainer["optimizer"], "emaDecay": 0.9}
    changed = {**trainer, "optimizer": optimizer, "model": {**trainer["model"], "experts": KINDS["mixtral"]}}
    monkeypatch.setenv("CONCERTINA_TRAINER", json.dumps(changed))
    model = Decoder(TrainerConfig.model_validate(changed).model)
    values = dict((*model.named_parameters(), *model.named_buffers()))
    weights = {name: np.full(value.shape, number, np.float32) for number, (name, value) in enumerate(values.items())}
    averages = {name: value + 0.5 for name, value in weights.items() if "norm" not in name}
    uri = small.publish(f"file://{tmp_path}/run", tmp_path, weights=weights, averages=averages).uri
    found = {}
    for ema in (False, True):
        folder = tmp_path / f"hf-{ema}"
        export(StoredCheckpoint(uri), ema=ema).write(ObjectPrefix(str(folder), create=True))
        found[ema] = load_file(folder / "model.safetensors")
    assert found[True].keys() == found[False].keys()
    for name, weight in found[False].items():
        torch.testing.assert_close(found[True][name], weight if "norm" in name else weight + 0.5, rtol=0, atol=0)


def test_an_average_that_is_not_kept_is_not_exported(trainer, tmp_path, monkeypatch):
    checkpoint, _ = published(trainer, KINDS["mixtral"], tmp_path, monkeypatch)
    with pytest.raises(InvalidInput, match=r"no average of the weights.*trainer\.optimizer\.emaDecay"):
        export(checkpoint, ema=True).write(ObjectPrefix(str(tmp_path / "hf"), create=True))


def test_what_no_model_computes_is_refused(trainer, tmp_path, monkeypatch):
    checkpoint, _ = published(trainer, {"count": 4, "hiddenDim": 24, "shared": 1}, tmp_path, monkeypatch)
    with pytest.raises(InvalidInput, match=r"is mixtral, which does not support these values of experts\.shared"):
        export(checkpoint).write(ObjectPrefix(str(tmp_path / "hf"), create=True))
