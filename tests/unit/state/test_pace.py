"""How many commits lie between two snapshots."""

from hypothesis import given
from hypothesis import strategies as st

from trainingjob._pace import Pace

SECONDS = st.floats(1e-6, 100)


@given(SECONDS, SECONDS, st.floats(0.001, 1))
def test_snapshots_take_no_more_than_their_part_of_the_time_and_no_less_often_than_they_may(stall, step, overhead):
    pace = Pace(overhead)
    for _ in range(5):
        pace.took(stall, step)
    assert stall <= overhead * step * pace.every * 1.0001
    assert pace.every == 1 or stall > overhead * step * (pace.every - 1) * 0.9999


def test_each_step_is_saved_until_something_is_known_and_a_single_slow_one_fades():
    pace = Pace(0.01)
    assert pace.every == 1
    pace.took(10.0, 1.0)  # the first one, whose pages were allocated
    assert pace.every == 1000
    for _ in range(12):
        pace.took(0.005, 1.0)
    assert pace.every == 1


def test_a_single_slow_one_later_on_hardly_counts_and_those_that_stay_slow_do():
    pace = Pace(0.1)
    for _ in range(5):
        pace.took(0.0009, 0.006)
    assert pace.every == 2
    pace.took(0.095, 0.006)
    assert pace.every == 3
    for _ in range(20):
        pace.took(0.095, 0.006)
    assert pace.every == 159
