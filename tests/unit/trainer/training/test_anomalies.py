"""Skipped samples: the count without them, and the reaction to a step that looks wrong."""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from concertina_protocol.messages.ranges import MOST_RANGES, united
from concertina_state.errors import InvalidInput
from concertina_state.format.shardfile import Trend
from concertina_trainer.config.trainer import TrainerConfig
from concertina_trainer.data.read.skips import positions
from concertina_trainer.errors import RollBack
from concertina_trainer.training.agreement import StepFlags, StepResult
from concertina_trainer.training.anomalies import IN_A_ROW, SEASONED, Anomalies

RANGES = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)).map(sorted).map(tuple), max_size=6)


@given(skipped=RANGES, start=st.integers(0, 40), length=st.integers(0, 40))
def test_samples_are_counted_without_what_is_skipped(skipped, start, length):
    skipped = united(skipped)
    remaining = [at for at in range(300) if not any(begin <= at < end for begin, end in skipped)]
    found = positions(start, start + length, skipped)
    assert [at for begin, end in found for at in range(begin, end)] == remaining[start : start + length]
    assert len(found) == 1 or all(end > begin for begin, end in found)


@given(RANGES, RANGES)
def test_united_ranges_hold_the_same_and_never_touch(some, more):
    joined = united(some, more)
    assert {at for b, e in joined for at in range(b, e)} == {at for b, e in [*some, *more] for at in range(b, e)}
    assert all(a[1] < b[0] for a, b in itertools.pairwise(joined))


@given(skipped=RANGES, consumed=st.integers(0, 50), more=st.integers(0, 30), length=st.integers(1, 20))
def test_a_range_ahead_changes_nothing_of_the_past(skipped, consumed, more, length):
    skipped = united(skipped)
    ahead = positions(consumed + more, consumed + more + length, skipped)
    assert positions(0, consumed, united(skipped, ahead)) == positions(0, consumed, skipped)


def anomalies(skipped=(), **policy):
    config = {"data": {"uri": "/d"}, "globalBatchSize": 4, "anomalies": {"rollbackSteps": 10, **policy}}
    return Anomalies(TrainerConfig.model_validate(config), skipped, Trend(2.0, 0.01, SEASONED))


def agreed(loss, squared_norm=1.0):
    return StepResult(loss, squared_norm, StepFlags())


def test_a_skipped_batch_is_recorded_and_the_same_step_goes_on_with_the_next():
    watch = anomalies(nonFinite="Skip")
    assert "samples 80 to 83" in watch.skips(20, 80, agreed(math.nan))
    assert watch.skipped == ((80, 84),)
    assert "samples 84 to 87" in watch.skips(20, 80, agreed(1.0, math.inf))
    assert watch.skipped == ((80, 88),)
    assert watch.skips(20, 80, agreed(2.0)) == ""


def test_batches_that_are_all_wrong_are_not_skipped_for_ever():
    watch = anomalies(nonFinite="Skip")
    for _ in range(IN_A_ROW):
        watch.skips(20, 80, agreed(math.nan))
    with pytest.raises(FloatingPointError, match="the batch is not the cause"):
        watch.skips(20, 80, agreed(math.nan))


def test_by_default_a_loss_that_is_not_finite_fails_the_step_and_a_spike_is_borne():
    with pytest.raises(FloatingPointError, match="the results of that step are discarded"):
        anomalies().skips(20, 80, agreed(math.inf))
    assert anomalies().skips(20, 80, agreed(50.0)) == ""


def test_a_spike_is_far_above_the_losses_before_and_only_once_there_are_enough():
    watch = anomalies(spike="Stop")
    assert watch.skips(20, 80, agreed(2.79)) == ""
    with pytest.raises(InvalidInput, match=r"the loss is 4\.5"):
        watch.skips(20, 80, agreed(4.5))
    young = anomalies(spike="Stop")
    young.trend = Trend(2.0, 0.01, SEASONED - 1)
    assert young.skips(20, 80, agreed(50.0)) == ""


def test_more_than_can_be_recorded_ends_the_run_with_a_sentence():
    most = tuple((2 * at, 2 * at + 1) for at in range(MOST_RANGES))
    sentence = f"already left out in {MOST_RANGES} places"
    with pytest.raises(InvalidInput, match=sentence):
        anomalies(most, nonFinite="Skip").skips(200, 800, agreed(math.nan))
    with pytest.raises(InvalidInput, match=sentence):
        anomalies(most, spike="RollBack").skips(200, 800, agreed(50.0))
    with pytest.raises(InvalidInput, match=sentence):
        anomalies((*most, (900, 901)))


def test_a_rollback_undoes_steps_and_leaves_out_all_their_samples():
    with pytest.raises(RollBack) as found:
        anomalies(((10, 14),), spike="RollBack").skips(20, 80, agreed(50.0))
    assert (found.value.reason, found.value.step) == ("LossSpike", 10)
    assert found.value.skipped == ((10, 14), (44, 88)), "positions of samples 40 to 83, of which one range was left out"
