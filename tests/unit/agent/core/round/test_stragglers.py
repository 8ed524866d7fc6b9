"""Stragglers: the verdict of a window as a table and as laws, and the conditions for naming a rank."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from concertina_agent.core.round.stragglers import IN_A_ROW, WINDOW_SECONDS, WINDOW_STEPS, Stragglers, Work, late
from concertina_agent.core.round.watchdog import BUSY_SECONDS, Watchdog
from concertina_protocol import Heartbeat, Limits, Straggler


@pytest.mark.parametrize(
    ("busy", "step_seconds", "expected"),
    [
        ([0.1, 0.1, 0.3], 0.3, [2]),
        ([0.1, 0.3], 0.3, [1]),  # With two ranks, each is compared with the other.
        ([0.1, 0.11, 0.19], 0.2, []),
        ([0.1, 0.1, 0.3], 5.0, []),  # The step is all communication, so a replacement would gain nothing.
        ([0.3, 0.1, 0.1, 0.3, 0.1], 0.3, [0, 3]),
        ([0.3, 0.3, 0.1], 0.3, []),  # Most ranks are that slow.
    ],
)
def test_who_is_late(busy: list[float], step_seconds: float, expected: list[int]) -> None:
    work = {rank: Work(20, 20 * seconds) for rank, seconds in enumerate(busy)}
    assert late(work, 20 * step_seconds, 2.0) == expected


@given(st.lists(st.floats(0.01, 10), min_size=2, max_size=9), st.floats(1.1, 10), st.floats(0.01, 100))
def test_the_unit_of_time_does_not_matter_and_the_fastest_is_never_late(
    busy: list[float], factor: float, unit: float
) -> None:
    work = {rank: Work(8, 8 * seconds) for rank, seconds in enumerate(busy)}
    late_ranks = late(work, 8 * max(busy), factor)
    assert busy.index(min(busy)) not in late_ranks
    assert all(busy[rank] >= factor * min(busy) * 0.999 for rank in late_ranks)
    scaled = {rank: Work(8, one.busy * 1024) for rank, one in work.items()}  # A power of two is exact.
    assert late(scaled, 8 * max(busy) * 1024, factor) == late_ranks


class Play:
    """Three ranks, observed every quarter of a second; each step takes `step` seconds."""

    def __init__(self, factor: float | None = 2.0, step: float = 0.25) -> None:
        self.stragglers, self.now, self.step = Stragglers(factor), 100.0, step
        self.steps, self.busy = 0, [0.001, 0.001, 0.001]

    def run(self, seconds: float, *busy: float) -> bool:
        """Let time pass, and return whether there was news."""
        news = False
        for _ in range(round(seconds / self.step)):
            self.now, self.steps = self.now + self.step, self.steps + 1
            self.busy = [known + more for known, more in zip(self.busy, busy, strict=True)]
            places = {r: (f"job-{r}", Heartbeat(r, self.steps, "computing", 0.0, b)) for r, b in enumerate(self.busy)}
            news |= self.stragglers.check(places, self.now)
        return news


def test_it_is_named_after_some_windows_and_cleared_by_one() -> None:
    play = Play()
    assert not play.run(WINDOW_SECONDS * IN_A_ROW, 0.05, 0.05, 0.2)
    assert play.run(0.5, 0.05, 0.05, 0.2)
    assert play.stragglers.found == (Straggler("job-2", 2, 0.2, 0.05),)
    assert not play.run(3 * WINDOW_SECONDS, 0.05, 0.05, 0.22), "what was said stays"
    assert play.run(2 * WINDOW_SECONDS, 0.05, 0.05, 0.05)
    assert play.stragglers.found == ()


def test_a_window_with_few_steps_is_too_short() -> None:
    play = Play(step=WINDOW_SECONDS)
    assert not play.run(WINDOW_SECONDS * WINDOW_STEPS, 0.1, 0.1, 4.0)
    assert play.run(WINDOW_SECONDS * WINDOW_STEPS * (IN_A_ROW + 1), 0.1, 0.1, 4.0)


def test_one_slow_window_names_nobody() -> None:
    play = Play()
    for _ in range(4):
        assert not play.run(WINDOW_SECONDS, 0.05, 0.05, 0.05)
        assert not play.run(WINDOW_SECONDS, 0.05, 0.05, 0.2)


def test_without_a_factor_none_is_looked_for() -> None:
    play = Play(factor=None)
    assert not play.run(10 * WINDOW_SECONDS, 0.05, 0.05, 0.2)


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2)), min_size=1, max_size=15),
    st.floats(0.1, 60),
    st.floats(0.1, 60),
)
def test_heartbeats_that_arrive_at_different_times_make_no_rank_slow(
    reports: list[tuple[int, int]], first: float, second: float
) -> None:
    """Report one replica at a time, after more steps of all ranks. Ranks 0 and 1 work alike, rank 2 more in a step."""
    dog, step, now = Watchdog(Limits()), 1, 0.0
    seconds = [first, first, first + second]
    for steps, replica in [(0, 0), (0, 1), (0, 2), *reports]:
        step, now = step + steps, now + BUSY_SECONDS
        heartbeat = Heartbeat(replica, step, "computing", 0.0, round((step - 1) * seconds[replica], 3))
        dog.on_heartbeats(f"job-{replica}", (heartbeat,), now)
        dog.check(now)
        if dog.busy is not None:
            common = dog.busy.coordinator / first
            assert dog.busy.median == pytest.approx(dog.busy.coordinator, abs=0.01)
            assert dog.busy.most == pytest.approx(common * (first + second), rel=0.01, abs=0.01)


def test_a_summary_needs_the_work_of_all_ranks_up_to_one_step() -> None:
    dog = Watchdog(Limits())
    dog.on_heartbeats("job-0", (Heartbeat(0, 7, "computing", 0.0, 60.0),), 1.0)
    dog.on_heartbeats("job-1", (Heartbeat(1, 6, "computing", 0.0, 50.0),), 1.0)
    dog.check(BUSY_SECONDS)
    assert dog.busy is None, "the work of rank 0 up to step 6 is unknown"
    dog.on_heartbeats("job-1", (Heartbeat(1, 8, "computing", 0.0, 70.0),), 3.0)
    dog.check(2 * BUSY_SECONDS)
    assert dog.busy is not None
    assert (dog.busy.coordinator, dog.busy.most) == (60.0, 60.0)


@pytest.mark.parametrize("step_seconds", [0.1, 0.2, 0.5, 3.0])
@pytest.mark.parametrize("replicas", [2, 32])
def test_the_summary_keeps_up_with_steps_of_any_length(step_seconds: float, replicas: int) -> None:
    """Replica r sends a line every half second, r * 0.015 s after the coordinator. The last one works twice as much."""
    dog, work = Watchdog(Limits()), [0.4] * (replicas - 1) + [0.8]
    for tick in range(400):
        now = 0.25 * tick
        for rank in range(replicas) if tick % 2 else (0,):
            step = int(max(0.0, now - rank * 0.015) / step_seconds)
            heartbeat = Heartbeat(rank, step, "computing", 0.0, step * step_seconds * work[rank])
            dog.on_heartbeats(f"job-{rank}", (heartbeat,), now)
        dog.check(now)
    assert dog.busy is not None
    assert dog.busy.most == pytest.approx(100 * 0.8, rel=0.12), "it is at most some seconds old"
    assert dog.busy.coordinator == pytest.approx(dog.busy.most / 2, rel=0.02)
