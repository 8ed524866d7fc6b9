"""Reading with which `concertina dashboard` compares a job."""

from __future__ import annotations

from concertina.cli.dashboard import MOST_READINGS, MOST_SECONDS, WINDOW_SECONDS, Readings


def job(uid: str, version: int = 0) -> dict[str, dict[str, str]]:
    return {"metadata": {"uid": uid, "resourceVersion": str(version)}}


def test_the_earlier_reading_is_a_window_old_or_two() -> None:
    readings, ages = Readings(), []
    for second in range(0, 200, 5):
        found = readings.earlier(job("a", second), second)
        ages.append(second - int(found["metadata"]["resourceVersion"]) if found else None)
    assert ages[0] is None
    assert ages[1:7] == [5, 10, 15, 20, 25, 30], "soon after the first look there is something to go by"
    assert all(WINDOW_SECONDS <= age <= 2 * WINDOW_SECONDS for age in ages[7:] if age)


def test_after_a_long_time_nobody_looked_it_begins_anew() -> None:
    readings = Readings()
    readings.earlier(job("a"), 0)
    assert readings.earlier(job("a", 1), MOST_SECONDS + 1) is None


def test_a_job_made_again_is_another_one_and_few_are_kept() -> None:
    readings = Readings()
    assert readings.earlier(job("a"), 0) is None
    assert readings.earlier(job("b"), 5) is None
    for number in range(MOST_READINGS):
        readings.earlier(job(f"c{number}"), 6)
    assert readings.earlier(job("a"), 10) is None, "it was forgotten for others"
