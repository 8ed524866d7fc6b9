"""Number of commits between two snapshots."""

import random

from hypothesis import given
from hypothesis import strategies as st

from concertina_state.pace import Pace

SECONDS = st.floats(1e-6, 100)


def trained(pace, commits, step, stall, slower=lambda: 0.0):
    """Return the number of snapshots in a number of commits, taken as `State` takes them."""
    taken, left, behind = 0, 0, False
    for _ in range(commits):
        pace.stepped(step() + behind * slower(), behind)
        left -= 1
        behind = left <= 0
        if behind:
            pace.took(stall())
            taken, left = taken + 1, pace.every
    return taken


@given(SECONDS, SECONDS, st.floats(0.001, 1))
def test_snapshots_take_no_more_than_their_part_of_the_time_and_no_less_often_than_they_may(stall, step, overhead):
    pace = Pace(overhead)
    for _ in range(5):
        pace.stepped(step, False)
        pace.took(stall)
    assert stall <= overhead * step * pace.every * 1.0001
    assert pace.every == 1 or stall > overhead * step * (pace.every - 1) * 0.9999


def test_each_step_is_saved_until_something_is_known_and_a_single_slow_one_fades():
    pace = Pace(0.01)
    assert pace.every == 1
    pace.stepped(1.0, False)
    pace.took(10.0)  # This is the first snapshot, whose pages were allocated.
    assert pace.every == 1000
    for _ in range(12):
        pace.took(0.005)
    assert pace.every == 1


def test_a_single_slow_one_later_on_hardly_counts_and_those_that_stay_slow_do():
    pace = Pace(0.1)
    pace.stepped(0.006, False)
    for _ in range(5):
        pace.took(0.0009)
    assert pace.every == 2
    pace.took(0.095)
    assert pace.every == 3
    for _ in range(20):
        pace.took(0.095)
    assert pace.every == 159


def test_what_snapshots_take_from_the_step_behind_them_counts():
    """The next step loses 4 ms of 45, while the loop waits for a snapshot. One of eleven commits costs a hundredth."""
    draw = random.Random(3)
    pace = Pace(0.01)
    taken = trained(pace, 3000, lambda: draw.gauss(0.045, 0.003), lambda: 0.001, lambda: 0.004)
    assert 200 < taken < 500
    assert trained(Pace(0.01), 3000, lambda: draw.gauss(0.045, 0.003), lambda: 0.001) > 850, "nothing is taken"


def test_chance_alone_hardly_keeps_snapshots_apart():
    """Steps differ by a tenth, and a snapshot may be taken after each."""
    draw = random.Random(5)
    assert trained(Pace(0.01), 3000, lambda: draw.gauss(0.2, 0.02), lambda: 0.0015) > 2000


def test_steps_that_become_longer_or_shorter_are_known_again():
    for step, fewest, most in ((0.4, 900, 1000), (0.05, 200, 600)):
        pace = Pace(0.01)
        trained(pace, 500, lambda: 0.2, lambda: 0.0015)
        assert fewest <= trained(pace, 1000, lambda step=step: step, lambda: 0.0015) <= most


def test_what_made_snapshots_dear_for_a_while_is_forgotten():
    """Other processes used the cores when the job began, for example."""
    pace = Pace(0.01)
    trained(pace, 2000, lambda: 0.2, lambda: 0.0015, lambda: 0.1)
    assert 40 <= pace.every <= 60
    trained(pace, 400, lambda: 0.2, lambda: 0.0015)
    assert pace.every <= 2


def test_all_steps_beside_a_commit_count_as_what_the_snapshot_costs():
    """The checksum takes four steps, and makes each of them a tenth slower. Nothing else costs time."""
    pace = Pace(0.01)
    for _ in range(400):
        pace.stepped(1.1, behind_snapshot=True)
        for _ in range(3):
            pace.stepped(1.1, behind_snapshot=False, committing=True)
        for _ in range(30):
            pace.stepped(1.0, behind_snapshot=False)
        pace.took(0.0)
    assert 38 <= pace.every <= 42
    assert pace.share(pace.every) <= 0.0101


def test_the_share_of_the_time_is_known_once_a_step_is():
    pace = Pace(0.01)
    assert pace.share(1) == 0
    pace.stepped(2.0, behind_snapshot=False)
    pace.took(0.1)
    assert pace.share(5) == 0.01
