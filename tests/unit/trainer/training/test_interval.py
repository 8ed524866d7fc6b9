"""Interval between checkpoints: it is the best one in theory, and never shorter than an upload takes."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from concertina_protocol import JobHistory
from concertina_state.interval import SHORTEST, Interval, best


def lost(interval, cost, between):
    """Return the share of time lost with exponential failures (Daly 2006, eq. 20, without the restart's own time)."""
    return between * math.expm1((interval + cost) / between) / interval


@given(cost=st.floats(0.01, 100), between=st.floats(300, 1e6))
def test_no_other_interval_loses_noticeably_less(cost, between):
    chosen = best(cost, between)
    least = min(lost(chosen * factor, cost, between) for factor in (0.25, 0.5, 0.8, 1.25, 2, 4))
    assert lost(chosen, cost, between) <= least * 1.001


def test_young_s_estimate_is_its_first_term():
    assert best(0.001, 1e6) == pytest.approx(math.sqrt(2 * 0.001 * 1e6), rel=0.01)
    assert best(100, 10) == 10


def test_a_set_interval_stands_and_auto_follows_what_is_measured():
    history = JobHistory(seconds=36_000, failures=9)
    assert (Interval(None, history).seconds, Interval(300, history).seconds) == (None, 300.0)
    auto = Interval("Auto", history)
    auto.saved(2.0)
    assert auto.seconds == pytest.approx(best(2.0, 3600), rel=1e-3)
    assert auto.reported.suggested == pytest.approx(auto.seconds, abs=0.1)
    more = Interval("Auto", JobHistory(seconds=36_000, failures=99))
    more.saved(2.0)
    assert SHORTEST < more.seconds < auto.seconds
    cheap = Interval("Auto", history)
    cheap.saved(1e-4)
    assert cheap.seconds == SHORTEST
