"""Checkpoints of this project with which a model may begin: those of models that compute the same."""

import pytest

from concertina_state.errors import InvalidInput
from concertina_trainer.config.model_config import ModelConfig
from concertina_trainer.format.hf_config import check_ours

LORA = {"lora": {"rank": 16, "alpha": 16}}
EXPERTS = {"experts": {"count": 4, "activePerToken": 2}}


def checked(stored, mine):
    check_ours(ModelConfig.model_validate(stored), "s3://b/run/step-8", ModelConfig.model_validate(mine))


@pytest.mark.parametrize(
    ("stored", "mine", "says"),
    [
        (LORA, {"lora": {"rank": 16}}, r"lora\.alpha is 16\.0, and spec\.trainer\.model\.lora\.alpha is 32\.0: set it"),
        (EXPERTS, {"experts": {"count": 4, "activePerToken": 1}}, r"experts\.activePerToken is 2, and .* is 1: set"),
        (
            EXPERTS,
            {"experts": {"count": 4, "shareScale": 2.5}},
            r"experts\.shareScale is 1\.0, and .* is 2\.5: set it to",
        ),
        (EXPERTS, {"experts": {"count": 4, "scores": "Sigmoid"}}, r'experts\.scores is "Softmax", and .* is "Sigmoid"'),
        ({"ropeTheta": 1e4}, {"ropeTheta": 5e5}, r"ropeTheta is 10000\.0"),
        ({"ropeScaling": {"type": "Linear", "factor": 2}}, {}, r'ropeScaling\.type is "Linear", and .* is absent: set'),
        ({}, {"qkvBias": True}, r"qkvBias is false, and .* is true: set it to false"),
        ({}, {"window": {"size": 8}}, r"window\.size is absent, and .* is 8: remove it"),
    ],
)
def test_one_that_computes_otherwise_is_refused(stored, mine, says):
    with pytest.raises(InvalidInput, match=says):
        checked(stored, mine)


@pytest.mark.parametrize(
    ("stored", "mine"),
    [
        (LORA, LORA),
        (LORA, {"lora": {**LORA["lora"], "dropout": 0.1}}),
        ({}, LORA),  # Adapters begin with their initial values.
        (LORA, {}),  # The names of its adapters are refused with the weights.
        (EXPERTS, {"experts": {"count": 4, "activePerToken": 2, "balanceLoss": 0.5}}),
    ],
)
def test_one_that_computes_alike_is_not(stored, mine):
    checked(stored, mine)
