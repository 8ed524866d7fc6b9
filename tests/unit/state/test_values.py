"""Values of a state as text: decoded values are equal, and of the same types."""

import collections
import enum
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainingjob import _values

PLAIN = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
KEYS = st.text() | st.integers() | st.tuples(st.integers(), st.text())
TREES = st.recursive(
    PLAIN,
    lambda inner: st.lists(inner) | st.dictionaries(KEYS, inner) | st.tuples(inner, inner) | st.sets(st.integers()),
    max_leaves=20,
)


@given(TREES)
def test_what_is_written_comes_back(tree):
    assert _values.decode(_values.encode(tree, "state")) == tree


@pytest.mark.parametrize(
    "value",
    [
        {frozenset({1, 2}): 3, "a": {frozenset({"b"}), frozenset()}},
        collections.Counter({"a": 2, 3: 1}),
        collections.Counter(),
        {"$counter": [["a", 1]]},
    ],
)
def test_frozensets_and_counters_are_what_they_were(value):
    decoded = _values.decode(_values.encode(value, "state"))
    assert (decoded, type(decoded)) == (value, type(value))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.uint8])
@pytest.mark.parametrize("shape", [(), (0,), (3, 5)])
def test_tensors_keep_dtype_shape_and_bits(dtype, shape):
    tensor = torch.randint(0, 2, shape).to(dtype)
    decoded = _values.decode(_values.encode({"a": tensor.t() if tensor.dim() == 2 else tensor}, "state"))["a"]
    assert (decoded.dtype, decoded.tolist()) == (dtype, (tensor.t() if tensor.dim() == 2 else tensor).tolist())


def test_a_dtype_is_what_it_was():
    values = {"dtypes": [torch.bfloat16, torch.float8_e4m3fn]}
    assert _values.decode(_values.encode(values, "state")) == values


def test_arrays_of_numpy():
    for array in (np.arange(6, dtype=np.uint32).reshape(2, 3), np.float64(2.5), np.array([True, False])):
        decoded = _values.decode(_values.encode(array, "state"))
        assert (decoded.dtype, decoded.tolist()) == (array.dtype, array.tolist())


def test_numbers_that_json_has_no_word_for():
    decoded = _values.decode(_values.encode([math.inf, -math.inf, math.nan], "state"))
    assert (decoded[0], decoded[1]) == (math.inf, -math.inf)
    assert math.isnan(decoded[2])


@given(st.dictionaries(st.sampled_from(["$tuple", "$items", "$bytes", "$torch", "a"]), st.integers()))
def test_a_dict_may_have_our_own_words_as_keys(tree):
    assert _values.decode(_values.encode(tree, "state")) == tree


class Colour(enum.Enum):
    RED = 1


@pytest.mark.parametrize("value", [object(), Colour.RED, len, collections.deque([1])])
def test_what_can_not_be_saved_is_named(value):
    with pytest.raises(_values.Unsaveable, match=r"scheduler\.a\[1\] is a .*, which can't be saved"):
        _values.encode({"a": [0, value]}, "scheduler")
