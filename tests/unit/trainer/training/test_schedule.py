"""Learning rate as a function of the step, and the scale that clips gradients."""

import math

import pytest
import torch
from pydantic import ValidationError
from torch.optim import lr_scheduler

from concertina_trainer.config.optimizer_config import OptimizerConfig
from concertina_trainer.model.optimizer import learning_rate
from concertina_trainer.parallel.group import interface_of, socket_variables
from concertina_trainer.training.loop import clip_scale

CONFIG = OptimizerConfig(learning_rate=1.0, min_learning_rate_factor=0.1, warmup_steps=4)


@pytest.mark.parametrize(
    ("step", "rate"), [(0, 0.25), (3, 1.0), (4, 1.0), (9, 0.55), (14, 0.1), (99, 0.1)]
)  # of 15 steps, 0 to 14
def test_warm_up_then_a_cosine_to_the_minimum_at_the_last_step(step, rate):
    assert learning_rate(step, 15, CONFIG) == pytest.approx(rate)


@pytest.mark.parametrize(
    ("schedule", "torchs"),
    [
        ("Cosine", lambda adam: lr_scheduler.CosineAnnealingLR(adam, 15, eta_min=0.1)),
        ("Linear", lambda adam: lr_scheduler.LinearLR(adam, 1.0, 0.1, 15)),
        ("Constant", lambda adam: lr_scheduler.ConstantLR(adam, 1.0, 1)),
    ],
)
def test_schedules_are_those_of_torch(schedule, torchs):
    """Of 20 steps, the first four are the warm-up, whose last one has the highest rate."""
    config = OptimizerConfig.model_validate({
        "learningRate": 1.0, "warmupSteps": 4, "schedule": schedule, "minLearningRateFactor": 0.1,
    })  # fmt: skip
    adam = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    reference = torchs(adam)
    for step in range(4, 20):
        assert learning_rate(step, 20, config) == pytest.approx(reference.get_last_lr()[0])
        adam.step()
        reference.step()


@pytest.mark.parametrize(("said", "begin"), [({}, 79), ({"decaySteps": 50}, 49), ({"decaySteps": 1000}, 10)])
def test_a_stable_rate_decays_at_the_end(said, begin):
    config = OptimizerConfig.model_validate({"learningRate": 1.0, "schedule": "WarmupStableDecay", **said})
    rates = [learning_rate(step, 100, config) for step in range(100)]
    assert rates[9 : begin + 1] == [1.0] * (begin - 8)
    assert rates[begin + 1] < 1.0
    assert rates == sorted(rates[:10]) + sorted(rates[10:], reverse=True)
    assert rates[-1] == pytest.approx(0.1)
    quarter = begin + (99 - begin) // 4
    assert rates[quarter] == pytest.approx(1 - 0.9 * math.sqrt((quarter - begin) / (99 - begin)))


def test_other_schedules_have_no_decay_steps():
    with pytest.raises(ValidationError, match=r"decaySteps needs optimizer\.schedule: WarmupStableDecay"):
        OptimizerConfig.model_validate({"decaySteps": 5})


@pytest.mark.parametrize(
    ("said", "last"),
    [
        ({}, 1e-6),
        ({"minLearningRateFactor": 0.0}, 0.0),
        ({"minLearningRateFactor": 1.0}, 1e-5),
    ],
)
def test_the_last_rate_is_a_part_of_the_highest(said, last):
    config = OptimizerConfig.model_validate({"learningRate": 1e-5, **said})
    rates = [learning_rate(step, 200, config) for step in range(200)]
    assert rates[-1] == pytest.approx(last)
    assert max(rates) == pytest.approx(1e-5)


@pytest.mark.parametrize(
    ("steps", "said", "warmup"), [(5000, {}, 100), (60, {}, 6), (9, {}, 0), (60, {"warmupSteps": 100}, 100)]
)
def test_a_short_run_has_a_short_warm_up_unless_a_number_is_said(steps, said, warmup):
    config = OptimizerConfig.model_validate(said)
    rates = [learning_rate(step, steps, config) for step in range(steps)]
    assert rates.index(max(rates)) == min(max(0, warmup - 1), steps - 1)


def test_without_a_warm_up_the_first_step_has_the_highest_rate():
    config = OptimizerConfig(learning_rate=1.0, warmup_steps=0)
    assert learning_rate(0, 1, config) == learning_rate(0, 10, config) == 1.0


@pytest.mark.parametrize(
    ("norm", "limit", "scale"), [(2.0, 1.0, 0.5), (0.5, 1.0, 1.0), (9.0, 0.0, 1.0), (0.0, 1.0, 1.0)]
)
def test_clipping_only_shrinks(norm, limit, scale):
    assert math.isclose(clip_scale(norm * norm, limit), scale)


def test_loopback_addresses_are_on_the_loopback_interface():
    assert interface_of("127.9.8.7") == "lo"
    assert interface_of("::1") == "lo"
    assert interface_of("192.0.2.1") == ""


def test_nccl_is_given_one_interface_and_no_prefix():
    assert socket_variables("eth1") == {"GLOO_SOCKET_IFNAME": "eth1", "NCCL_SOCKET_IFNAME": "=eth1"}
