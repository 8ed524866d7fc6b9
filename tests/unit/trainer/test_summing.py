"""Sums whose bits don't depend on the division of the numbers among ranks."""

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from concertina_trainer.data.read.batch import plan_batch
from concertina_trainer.model.stages import Stages
from concertina_trainer.parallel import summing
from concertina_trainer.parallel.step_times import StepTimes
from concertina_trainer.parallel.summing import OrderedSums

NUMBERS = st.floats(width=32, allow_nan=False, min_value=-1e4, max_value=1e4)


def sums(world, rank=0, size=16):
    return OrderedSums(Stages([]), plan_batch(size, 2, world, fixed=True), rank, StepTimes(torch.device("cpu")))


def added(words):
    return [sum(column) for column in zip(*(word.tolist() for word in words), strict=True)]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.lists(NUMBERS, min_size=3, max_size=3), min_size=1, max_size=40), st.data())
def test_the_squared_norm_is_the_same_bits_however_rows_are_cut(rows, data):
    whole = torch.tensor(rows)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(rows)), max_size=5)))
    shards = [whole[a:b] for a, b in zip([0, *cuts], [*cuts, len(rows)], strict=True) if b > a]
    one = sums(1)
    expected = one.squared_norm(one.squares([whole]).tolist())
    assert one.squared_norm(added([one.squares([shard]) for shard in shards])) == expected
    exact = sum(Fraction(value) ** 2 for row in whole.tolist() for value in row)
    assert expected == pytest.approx(float(exact), rel=1e-12, abs=2.0**-90)


@pytest.mark.parametrize("bad", [math.inf, math.nan, 1e30])
def test_what_is_not_finite_or_far_too_large_is_said(bad):
    one = sums(1)
    assert one.squared_norm(one.squares([torch.tensor([1.0, bad])]).tolist()) == math.inf


@pytest.mark.parametrize("world", [1, 2, 3, 5, 8, 11])
def test_losses_are_added_in_the_order_of_the_batch(world):
    parts = [torch.tensor(1.0 / (7 * i + 3)) for i in range(8)]
    plan = plan_batch(16, 2, world, fixed=True)
    filled = [*parts, *[torch.tensor(9.0)] * 20]
    words = [sums(world, r).losses([filled[i * world + r] for i in range(plan.microbatches)]) for r in range(world)]
    total = 0.0
    for part in parts:
        total += float(part)
    assert sums(world).loss(added(words)) == total


class Largest(TorchDispatchMode):
    """Record of the largest float64 tensor that an operation makes."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.dtype == torch.float64:
                self.elements = max(self.elements, tensor.untyped_storage().nbytes() // 8)
        return result


def test_no_gradient_is_copied_whole_to_float64(monkeypatch):
    gradients = [torch.randn(50, 40), torch.randn(7, 3, 5), torch.randn(64)]
    ordered = sums(1)
    whole = ordered.squares(gradients)
    monkeypatch.setattr(summing, "PIECE", 100)
    with Largest() as seen:
        pieces = ordered.squares(gradients)
    assert torch.equal(pieces, whole)
    assert seen.elements <= 50 + 7 + 64, "a row of each gradient has one number"
