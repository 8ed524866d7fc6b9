"""Initial weights: any box of a weight equals that part of the whole weight."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from concertina_state.format.read_plan import Box
from concertina_trainer.config.model_config import ModelConfig
from concertina_trainer.model import initial
from concertina_trainer.model.initial import initial_value

CONFIG = ModelConfig()


def whole(shape, name="blocks.0.attention.query.weight", seed=0):
    return initial_value(name, shape, Box((0,) * len(shape), tuple(shape)), CONFIG, seed)


@st.composite
def boxes(draw):
    shape = draw(st.lists(st.integers(1, 9), min_size=2, max_size=3))
    offsets = [draw(st.integers(0, size - 1)) for size in shape]
    sizes = [draw(st.integers(1, size - offset)) for size, offset in zip(shape, offsets, strict=True)]
    return shape, Box(tuple(offsets), tuple(sizes))


@given(boxes(), st.integers(1, 40))
def test_a_box_has_the_bits_of_the_whole(cut, at_once):
    shape, box = cut
    expected = whole(shape)[box.within(Box((0,) * len(shape), tuple(shape)))]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(initial, "AT_ONCE", at_once)
        box_values = initial_value("blocks.0.attention.query.weight", shape, box, CONFIG, 0)
    assert torch.equal(box_values, expected)


def test_they_are_normal_and_others_for_another_name_or_seed():
    value = whole((400, 500))
    assert value.dtype == torch.float32
    scaled = np.sort(value.numpy().ravel() / 0.02)
    assert abs(scaled.mean()) < 0.01
    assert abs(scaled.std() - 1) < 0.01
    assert np.abs(np.quantile(scaled, [0.025, 0.16, 0.84, 0.975]) - [-1.96, -0.994, 0.994, 1.96]).max() < 0.03
    for other in (whole((400, 500), seed=1), whole((400, 500), "blocks.1.attention.query.weight")):
        assert abs(np.corrcoef(value.flatten(), other.flatten())[0, 1]) < 0.01


def test_what_writes_into_the_residual_stream_is_smaller_and_norms_are_one():
    assert whole((400, 500), "blocks.0.feed_forward.down.weight").std() < 0.5 * whole((400, 500)).std()
    assert torch.equal(whole((5,), "norm.weight"), torch.ones(5))
