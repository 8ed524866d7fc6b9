"""Named sizes of the decoder."""

from __future__ import annotations

import pytest

from concertina_trainer.config.changes import identity_changes, other_changes
from concertina_trainer.config.model_config import ModelConfig
from concertina_trainer.config.model_sizes import SIZES, ModelSize
from concertina_trainer.config.trainer import TrainerConfig

PUBLISHED = {
    "135M": 134_515_008, "1B": 1_235_814_400, "3B": 3_212_749_824, "8B": 8_030_261_248, "70B": 70_553_706_496,
    "8x7B": 46_702_792_704,
}  # fmt: skip
"""Numbers of parameters of the published models, from their model cards and weights."""


def config(**model: object) -> TrainerConfig:
    return TrainerConfig.model_validate({"data": {"uri": "/data"}, "model": model})


@pytest.mark.parametrize("size", PUBLISHED)
def test_a_size_has_the_parameters_of_the_published_model(size: str) -> None:
    assert ModelConfig.model_validate({"size": size}).weights == PUBLISHED[size]


@pytest.mark.parametrize("size", ModelSize)
def test_a_size_is_the_same_model_as_its_fields(size: ModelSize) -> None:
    sized, spelled = config(size=size), config(**SIZES[size])
    assert identity_changes(sized, spelled) == other_changes(sized, spelled) == []
    assert sized.digest() == spelled.digest()
    assert TrainerConfig.model_validate_json(sized.model_dump_json(by_alias=True)) == sized


def test_fields_of_the_data_are_the_job_s() -> None:
    model = ModelConfig.model_validate({"size": "8B", "vocabSize": 256, "sequenceLength": 4096, "layers": 4})
    assert (model.vocab_size, model.sequence_length, model.layers) == (256, 4096, 32)


@pytest.mark.parametrize(
    "fields",
    [{"layers": 31}, {"kvHeads": 4}, {"ropeTheta": 1e6}, {"experts": {"count": 8}}, {"tieEmbeddings": True, "dim": 64}],
)
def test_another_field_is_refused_beside_a_size(fields: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="size sets the other fields of the decoder"):
        ModelConfig.model_validate({"size": "8B", **fields})


def test_experts_of_a_size_may_be_balanced_in_another_way() -> None:
    model = ModelConfig.model_validate({"size": "8x7B", "experts": {"count": 8, "balanceLoss": 0.0}})
    assert model.experts is not None
    assert (model.experts.balance_loss, model.layers) == (0.0, 32)
    with pytest.raises(ValueError, match="size sets the other fields"):
        ModelConfig.model_validate({"size": "8x7B", "experts": {"count": 8, "shared": 1}})
