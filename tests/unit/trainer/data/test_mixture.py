"""Mixtures: exact at any prefix, the same from anywhere; and positions that are skipped."""

import hashlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from concertina_trainer.data import consumed
from concertina_trainer.data.batch_order import Skipped
from concertina_trainer.data.read import interleave as plain
from concertina_trainer.data.read.mixture import Interleave

weights = st.lists(st.integers(1, 60), min_size=1, max_size=8)


@settings(deadline=None)
@given(weights=weights)
def test_at_any_prefix_each_source_has_its_share_to_less_than_one(weights):
    sources, before = Interleave(weights).at(np.arange(2 * sum(weights)))
    n = np.arange(1, len(sources) + 1)
    for source, weight in enumerate(weights):
        taken = np.cumsum(sources == source)
        assert (np.abs(taken * sum(weights) - n * weight) < sum(weights)).all()
        assert before[sources == source].tolist() == list(range(taken[-1]))


@settings(deadline=None)
@given(weights=weights, start=st.integers(0, 10**12))
def test_any_position_of_a_mixture_is_found_by_itself(weights, start):
    interleave = Interleave(weights)
    sources, before = interleave.at(np.arange(start, start + 50))
    counts = np.array(interleave.before(start))
    for source, nth in zip(sources.tolist(), before.tolist(), strict=True):
        assert nth == counts[source]
        counts[source] += 1
    assert interleave.before(start + 50) == counts.tolist() == plain.before(weights, start + 50)


def test_the_mixture_never_changes():
    """A run that is resumed by a newer version goes on in the same order: this hash may never change."""
    sources, before = Interleave([50, 30, 15, 5, 1]).at(np.arange(10_000))
    golden = hashlib.sha256(np.stack([sources, before]).astype("<i8").tobytes()).hexdigest()
    assert golden == "711a70a1499dd49facafe0210c6b407bcc09ff5a66cba903d69f7c6fd4026e6a"


stretches = st.lists(st.integers(1, 30), max_size=12).map(
    lambda gaps: [(int(b), int(e)) for b, e in np.cumsum(gaps[: len(gaps) // 2 * 2]).reshape(-1, 2)]
)


@settings(deadline=None)
@given(stretches=stretches)
def test_all_but_the_skipped_are_consumed_in_order(stretches):
    found = Skipped(stretches).position_of(np.arange(300)).tolist()
    kept = [p for p in range(1000) if not any(begin <= p < end for begin, end in stretches)]
    assert found == kept[:300]
    assert [consumed.positions(n, n + 1, tuple(stretches))[0] for n in range(300)] == found


@settings(deadline=None)
@given(stretches=stretches.filter(bool))
def test_what_is_skipped_later_changes_nothing_of_what_was_consumed(stretches):
    everything = np.arange(400)
    before, more = (Skipped(part).position_of(everything) for part in (stretches[:-1], stretches))
    consumed = before < stretches[-1][0]
    assert (before[consumed] == more[consumed]).all()


@pytest.mark.parametrize("wrong", [[(3, 3)], [(5, 4)], [(1, 5), (4, 9)], [(6, 7), (1, 2)]])
def test_stretches_that_can_t_be_are_refused(wrong):
    with pytest.raises(ValueError, match="sorted ranges"):
        Skipped(wrong)
