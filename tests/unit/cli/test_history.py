"""History of a run's loss: a few points, drawn in one line."""

from __future__ import annotations

import pytest

from concertina.api.loss_history import FIRST_EVERY, MOST_CHARACTERS, MOST_POINTS, LossHistory, Point, unpacked
from concertina.api.packed import pack
from concertina.terminal import curves

T0 = 1_800_000_000


def run(seconds: int, every: int = 2, shrunk_at: int = -1) -> LossHistory:
    """Return a history to which points were offered at this interval.

    At one time there are two replicas instead of three.
    """
    known = LossHistory()
    for at in range(0, seconds, every):
        known = known.with_point(Point(T0 + at, at, 1 + 9 / (1 + at), 2 if at == shrunk_at else 3))
    return known


def test_a_run_of_any_length_has_few_points_from_its_first_to_its_last() -> None:
    for seconds in (30, 1000, 100_000):
        known = run(seconds)
        assert MOST_POINTS / 2 <= len(known.points) <= MOST_POINTS or seconds < 100
        assert known.points[0].at - T0 < 2 * known.every
        assert T0 + seconds - known.points[-1].at <= 2 * known.every
        assert all(b.at - a.at >= known.every for a, b in zip(known.points, known.points[1:], strict=False))


def test_a_short_loss_of_members_stays_in_sight_however_long_the_run_goes_on() -> None:
    known = run(100_000, shrunk_at=64)
    assert min(point.replicas for point in known.points) == 2


def test_a_point_that_comes_too_soon_changes_nothing_and_a_clock_set_back_is_not_waited_for() -> None:
    known = run(20)
    assert known.with_point(Point(known.points[-1].at + FIRST_EVERY - 1, 99, 1.0, 3)) is known
    back = known.with_point(Point(T0 + 7, 99, 1.0, 3))
    assert [point.at - T0 for point in back.points] == [0, 2, 4, 6, 7]


def test_packed_it_is_short_and_comes_back_the_same() -> None:
    known = run(100_000).with_point(Point(T0 + 200_000, 7, None, 3))
    assert unpacked(known.packed()) == known
    assert len(known.packed()) < MOST_CHARACTERS / 4


@pytest.mark.parametrize(
    "text", ["", "no base64", pack([]), pack([2, [1], [1], [1]]), pack([2, ["x"], [1], [1], [1]]), pack({"every": 2})]
)
def test_what_is_no_history_is_an_empty_one(text: str) -> None:
    assert unpacked(text) == LossHistory()


def test_curves() -> None:
    points = tuple(Point(T0 + 10 * at, at, float(8 - at), 4 if at < 4 else 2) for at in range(8))
    assert curves.loss(LossHistory(2, points)) == "█▇▆▅▄▃▂▁"
    assert curves.world(LossHistory(2, points)) == "████▅▅▅▅"
    late = (*points, *(Point(T0 + 1000 + 10 * at, 8 + at, 1.0, 4) for at in range(4)))
    assert " " in curves.world(LossHistory(2, late), 12), "it did not train for long"
    assert " " not in curves.world(LossHistory(2, points), 8)
    without = tuple(Point(point.at, point.step, None, 3) for point in points)
    assert (curves.loss(LossHistory(2, without)), curves.world(LossHistory())) == ("", "")
    assert curves.loss(LossHistory(2, points[:1])) == "▁"
