"""Model that `spec.trainer.model.from` describes: what the status says of it, and when it can't be read."""

from pathlib import Path
from typing import cast

import pytest
from transformers import AutoConfig

from builders.train import families
from concertina_protocol import Durable, Restore, RestoreSource
from concertina_state.errors import DamagedInput
from concertina_state.saved import Requests
from concertina_trainer.config.trainer import TrainerConfig
from concertina_trainer.state.described_model import read_model_setting, with_described_model


def test_a_damaged_checkpoint_is_named_if_the_folder_of_the_model_is_gone(tmp_path: Path) -> None:
    checkpoint = tmp_path / "step-5"
    checkpoint.mkdir()
    (checkpoint / "manifest.json").write_text("{broken")
    config = TrainerConfig.model_validate({"data": {"uri": "/none"}, "model": {"from": f"file://{tmp_path}/gone"}})
    durable = Durable(uid="u", uri=f"file://{checkpoint}", round=1, step=5)
    start = Restore(RestoreSource.STORAGE, 5, durable=durable)
    with pytest.raises(DamagedInput, match="step-5"):
        with_described_model(config, start, cast(Requests, None))


def test_the_status_names_the_model_and_the_layers_that_are_left_out(tmp_path: Path) -> None:
    kind, fields = families.MODELS["glm4_moe"]
    AutoConfig.for_model(kind, **families.SIZES, **fields, num_nextn_predict_layers=1).save_pretrained(tmp_path)
    model = {"from": str(tmp_path), "lora": {}}
    config = TrainerConfig.model_validate({"data": {"uri": "/none"}, "model": model})
    config, sentence = with_described_model(config, Restore(RestoreSource.FRESH), cast(Requests, None))
    weights = f"{families.made('glm4_moe').num_parameters():,} weights"
    assert "num_nextn_predict_layers is 1: the layers that predict further tokens are neither loaded" in sentence
    assert f"glm4_moe, 3 layers, {weights}" in sentence
    read = f"glm4_moe with 3 layers and {weights}, without the layers of num_nextn_predict_layers"
    assert read_model_setting(config.model, 0, 0, "") == {"model.from": read}, "without the adapters"


def test_the_status_names_no_model_that_the_spec_has() -> None:
    config = TrainerConfig.model_validate({"data": {"uri": "/none"}})
    assert read_model_setting(config.model, 0, 0, "") == {}
