"""Shares of a batch by speed: they are whole, bounded and fair, and unchanged if a change gains nothing."""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from concertina_trainer.data.read.batch import plan_batch
from concertina_trainer.training.shares import BOUND, LEAST_GAIN, even, rebalanced, soonest

SECONDS = st.lists(st.floats(1e-4, 1e3), min_size=1, max_size=12)
TOTAL = st.integers(12, 400)


def end(shares, seconds):
    return max(share * each for share, each in zip(shares, seconds, strict=True))


@given(total=TOTAL, seconds=SECONDS)
def test_shares_are_the_whole_batch_within_the_bounds_and_who_is_faster_has_no_less(total, seconds):
    shares = soonest(total, seconds)
    assert sum(shares) == total
    for share in shares:
        assert max(1, total // (BOUND * len(seconds))) <= share <= math.ceil(BOUND * total / len(seconds))
    for (one, fast), (other, slow) in itertools.permutations(zip(shares, seconds, strict=True), 2):
        assert fast >= slow or one >= other
        assert fast != slow or abs(one - other) <= 1


@given(total=st.integers(3, 9), seconds=st.lists(st.floats(0.01, 10), min_size=1, max_size=3))
def test_no_other_shares_end_sooner(total, seconds):
    world = len(seconds)
    allowed = range(max(1, total // (BOUND * world)), math.ceil(BOUND * total / world) + 1)
    all_of_them = (shares for shares in itertools.product(allowed, repeat=world) if sum(shares) == total)
    best = min(end(shares, seconds) for shares in all_of_them)
    assert end(soonest(total, seconds), seconds) == pytest.approx(best)


@given(total=TOTAL, seconds=SECONDS, data=st.data())
def test_noise_of_five_percent_changes_nothing(total, seconds, data):
    shares = soonest(total, seconds)
    noise = data.draw(st.lists(st.floats(0.951, 1.049), min_size=len(seconds), max_size=len(seconds)))
    assert rebalanced(shares, [each * one for each, one in zip(seconds, noise, strict=True)]) == shares


@given(total=TOTAL, seconds=SECONDS)
def test_a_change_pays_and_is_the_last_one(total, seconds):
    before = even(total, len(seconds))
    shares = rebalanced(before, seconds)
    assert shares == before or end(shares, seconds) <= (1 - LEAST_GAIN) * end(before, seconds)
    assert rebalanced(shares, seconds) == shares


@given(
    total=st.integers(8, 300), world=st.integers(2, 8), fixed=st.floats(0, 1), factor=st.floats(1, 6),
    slow=st.integers(0, 7),
)  # fmt: skip
def test_work_that_does_not_depend_on_the_share_makes_it_neither_swing_nor_worse(total, world, fixed, factor, slow):
    """The seconds of a sequence then depend on the share.

    Later windows converge, and each is better than the one before.
    """
    own = [factor if rank == slow % world else 1.0 for rank in range(world)]

    def steps(shares):
        return [fixed * each + share * each / total for share, each in zip(shares, own, strict=True)]

    shares, ends = even(total, world), []
    for _ in range(40):
        ends.append(max(steps(shares)))
        before, shares = shares, rebalanced(shares, [each / n for each, n in zip(steps(shares), shares, strict=True)])
    assert shares == before, "it has settled"
    assert ends == sorted(ends, reverse=True)


@pytest.mark.parametrize("seconds", [(1.0, 0.0), (1.0, math.nan), (math.inf, 1.0), (-1.0, 1.0)])
def test_what_is_no_measurement_changes_nothing(seconds):
    assert rebalanced((4, 4), seconds) == (4, 4)


def test_a_rank_of_half_the_speed_has_half_as_much():
    assert rebalanced((4, 4, 4), (1.0, 1.0, 2.0)) == (5, 5, 2)
    assert rebalanced((10, 10), (1.0, 100.0)) == (15, 5), "not less than half the even share"
    assert rebalanced((0, 1, 1), (1.0, 1.0, 9.0)) == (0, 1, 1), "nobody computes less than one"


@given(seconds=SECONDS, total=TOTAL, micro=st.integers(1, 64))
def test_the_parts_of_all_ranks_are_the_batch_in_as_many_microbatches(seconds, total, micro):
    plan = plan_batch(total, micro, len(seconds)).shared_out(soonest(total, seconds), micro)
    slices = [plan.slices(rank) for rank in range(len(seconds))]
    assert {len(mine) for mine in slices} == {plan.microbatches}
    assert [sequence for mine in slices for cut in mine for sequence in cut] == list(range(total))
    assert tuple(sum(map(len, mine)) for mine in slices) == plan.shares
    assert all(len(cut) <= plan.rows_for(len(cut)) <= max(1, plan.rows) <= micro for mine in slices for cut in mine)
    assert all(max(map(len, mine)) - min(map(len, mine)) <= 1 for mine in slices)
