"""Quantized frozen weights: the same numbers in every part of a matrix, by torch and by numpy."""

import itertools
from statistics import NormalDist

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from concertina_trainer.config.model_config import BLOCK, NORMAL_FLOAT, FrozenDtype
from concertina_trainer.export.quantized import as_quantized
from concertina_trainer.model.quantized import dequantized, linear, quantized

DTYPES = [FrozenDtype.int8, FrozenDtype.normal_float4]


def weights(rows=5, blocks=4):
    values = torch.randn(rows, blocks * BLOCK, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    values[1, :BLOCK] = 0
    values[2] *= 1e-30
    values[3, 7] = 1e30
    return values


def values_of(weight, dtype):
    return dequantized(*quantized(weight, dtype), torch.float32)


def test_the_codes_are_quantiles_of_the_normal_distribution():
    """Compute them as QLoRA does: 8 equal shares of probability on the positive side, and 7 on the negative side."""
    farthest = 0.9677083

    def quantiles(count):
        step = (farthest - 0.5) / (count - 1)
        return [NormalDist().inv_cdf(farthest - i * step) for i in range(count - 1)]

    values = sorted([0.0, *quantiles(9), *(-value for value in quantiles(8))])
    assert pytest.approx([value / values[-1] for value in values], abs=1e-6) == list(NORMAL_FLOAT)


@pytest.mark.parametrize("dtype", DTYPES)
def test_parts_of_a_matrix_have_the_numbers_of_the_whole(dtype):
    weight = weights()
    whole = values_of(weight, dtype)
    for rows, columns in itertools.product([slice(0, 2), slice(2, 5), slice(5, 5)], [slice(0, 64), slice(64, 256)]):
        assert torch.equal(values_of(weight[rows, columns], dtype), whole[rows, columns])


@pytest.mark.parametrize("dtype", DTYPES)
def test_numpy_computes_the_same_bits(dtype):
    ours = as_quantized(weights().float().numpy(), dtype)
    assert np.array_equal(ours.view(np.int32), values_of(weights(), dtype).numpy().view(np.int32))


@pytest.mark.parametrize("dtype", DTYPES)
def test_no_element_is_further_from_its_value_than_half_a_gap_between_codes(dtype):
    """Rounding in float32 adds at most three times 2^-24 of the largest element, and half a gap is 2^-8 of it."""
    codes = [i / 127 for i in range(-127, 128)] if dtype is FrozenDtype.int8 else NORMAL_FLOAT
    gap = max(high - low for low, high in itertools.pairwise(codes))
    weight = weights().float().view(-1, BLOCK)
    largest = weight.abs().amax(1, keepdim=True)
    error = (values_of(weights(), dtype).view(-1, BLOCK) - weight).abs()
    assert (error <= largest * (gap / 2) * (1 + 2**-14)).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_weight_that_is_not_finite_stays_visible(dtype):
    weight = weights()
    weight[0, 3] = torch.nan
    weight[4, 3] = torch.inf
    found = values_of(weight, dtype)
    assert not found[0, :BLOCK].isfinite().any()
    assert not found[4, 3].isfinite()
    assert torch.equal(found[1:4], values_of(weights(), dtype)[1:4])


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_product_is_compiled_in_one_graph(dtype):
    codes, scales = quantized(weights()[:3], dtype)
    x = torch.randn(2, 4 * BLOCK, requires_grad=True)
    compiled = torch.compile(linear, backend="aot_eager", fullgraph=True)
    found = compiled(x, codes, scales, None)
    torch.testing.assert_close(found, linear(x, codes, scales, None))
    assert torch.autograd.grad(found.sum(), x)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_product_is_that_with_the_values(dtype):
    codes, scales = quantized(weights()[:3], dtype)
    whole = dequantized(codes, scales, torch.float32)
    x, y = (torch.randn(2, 7, 4 * BLOCK, generator=torch.Generator().manual_seed(3)) for _ in range(2))
    x.requires_grad_(), y.requires_grad_()
    bias = torch.arange(3.0)
    ours, plain = linear(x, codes, scales, bias), F.linear(y, whole, bias)
    torch.testing.assert_close(ours, plain)
    ours.square().sum().backward()
    plain.square().sum().backward()
    torch.testing.assert_close(x.grad, y.grad)
