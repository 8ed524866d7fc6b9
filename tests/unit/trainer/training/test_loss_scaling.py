"""Loss scaling: powers of two that change nothing but the range of gradients."""

import dataclasses
import math

import pytest
import torch
from torch import nn

from concertina_state.errors import InvalidInput
from concertina_state.format.shardfile import LossScale
from concertina_state.saving import StepFlags
from concertina_trainer.config.model_config import ModelConfig
from concertina_trainer.config.trainer import Precision
from concertina_trainer.data.read.batches import Microbatch
from concertina_trainer.model.decoder import Decoder
from concertina_trainer.training.agreement import StepResult
from concertina_trainer.training.loss_scaling import GROWTH_STEPS, MOST_EXPONENT, LossScaling

GOOD = StepResult(2.0, 4.0, StepFlags())
OVERFLOW = dataclasses.replace(GOOD, squared_norm=math.inf)


def test_an_overflow_halves_the_scale_until_it_is_one() -> None:
    scaling = LossScaling(Precision.float16, LossScale(2, 5))
    assert [scaling.lowered(OVERFLOW) for _ in range(3)] == [True, True, False]
    assert scaling.state == LossScale(0, 0, 2)


def test_a_batch_that_is_left_out_halves_the_scale_once() -> None:
    """Its gradient may overflow at any scale, and the next batches need a scale."""
    scaling = LossScaling(Precision.float16, LossScale(16, 5))
    while scaling.lowered(OVERFLOW):
        pass
    scaling.skipped()
    assert scaling.state == LossScale(15, 0, 16)
    scaling.stepped()
    scaling.skipped()
    assert scaling.state.exponent == 15, "it left out a batch for another reason"


def test_steps_without_overflow_double_the_scale() -> None:
    scaling = LossScaling(Precision.float16, LossScale(3, GROWTH_STEPS - 2, 1))
    assert not scaling.lowered(GOOD)
    states = []
    for _ in range(2):
        scaling.stepped()
        states.append(scaling.state)
    assert states == [LossScale(3, GROWTH_STEPS - 1, 1), LossScale(4, 0, 1)]
    most = LossScaling(Precision.float16, LossScale(MOST_EXPONENT, GROWTH_STEPS - 1))
    most.stepped()
    assert most.state.exponent == MOST_EXPONENT


def test_a_loss_that_is_not_finite_is_no_matter_of_the_scale() -> None:
    scaling = LossScaling(Precision.float16, LossScale())
    assert not scaling.lowered(dataclasses.replace(OVERFLOW, loss=math.nan))


def test_a_custom_model_s_loss_may_overflow_by_its_scale() -> None:
    """Its code may add up losses in float16. A bad batch costs at most as many repetitions as the scale has bits."""
    scaling = LossScaling(Precision.float16, LossScale(3, 5), own=True)
    infinite = dataclasses.replace(OVERFLOW, loss=math.inf)
    assert [scaling.lowered(infinite), scaling.lowered(OVERFLOW), scaling.lowered(GOOD)] == [True, True, False]
    assert scaling.state == LossScale(1, 0, 2)
    bad = LossScaling(Precision.float16, LossScale(), own=True)
    repeated = 0
    while bad.lowered(dataclasses.replace(OVERFLOW, loss=math.nan)):
        repeated += 1
    assert repeated == LossScale().exponent
    bad.skipped()
    assert bad.state.exponent == LossScale().exponent - 1
    assert not LossScaling(Precision.bfloat16, LossScale(), own=True).lowered(infinite)


def test_other_precisions_have_no_scale_and_keep_that_of_the_state() -> None:
    scaling = LossScaling(Precision.bfloat16, LossScale(7, 8, 9))
    assert not scaling.lowered(OVERFLOW)
    scaling.stepped()
    assert (scaling.state, scaling.scale, scaling.metrics) == (LossScale(7, 8, 9), 1.0, {})


@pytest.mark.parametrize("state", [LossScale(-1), LossScale(MOST_EXPONENT + 1), LossScale(1, -1), LossScale(1, 10**9)])
def test_a_scale_that_no_run_has_is_refused(state: LossScale) -> None:
    with pytest.raises(InvalidInput, match="has the loss scale"):
        LossScaling(Precision.float16, state)


def gradients(dtype: torch.dtype, scaling: LossScaling) -> tuple[float, torch.Tensor]:
    """Return the loss of a small decoder that computes in `dtype`, and its gradients as float64, without the scale."""
    torch.manual_seed(3)
    model = Decoder(ModelConfig(layers=2, dim=64, heads=4, vocab_size=256, sequence_length=64)).double()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.1) if parameter.dim() > 1 else nn.init.ones_(parameter)
    model.to(dtype)
    tokens = torch.randint(0, 256, (4, 65))
    # As many tokens as a batch of a million has: the gradients of single tokens are below the range of float16.
    batch = Microbatch(tokens, torch.full((4, 64), 2.0**-20), None)
    [scaled] = scaling.scaled([batch])
    loss = model(scaled.tokens[:, :-1], None, scaled.tokens[:, 1:], scaled.weights)
    loss.backward()
    [found] = scaling.unscaled([loss.detach()])
    whole = torch.cat([p.grad.double().flatten() for p in model.parameters() if p.grad is not None])
    return float(found), whole / scaling.scale


def test_float16_computes_gradients_as_precisely_as_its_digits_allow() -> None:
    """A block rounds 13 times in a row, its backward pass twice as often, and the ends 10 times: by 2^-11 each time."""
    bound = (2 * 39 + 10) * 2.0**-11
    expected_loss, expected = gradients(torch.float64, LossScaling(Precision.float32, LossScale()))
    loss, found = gradients(torch.float16, LossScaling(Precision.float16, LossScale()))
    assert loss == pytest.approx(expected_loss, rel=bound)
    assert (found - expected).norm() <= bound * expected.norm()
    _, without = gradients(torch.float16, LossScaling(Precision.float16, LossScale(0)))
    assert (without - expected).norm() > bound * expected.norm()
