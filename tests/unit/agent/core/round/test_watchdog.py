"""Hangs and their beginning: the verdicts as tables and laws."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from concertina_agent.core.round.watchdog import (
    FIRST_STEP,
    LASTING,
    LEAST,
    STACKS_SECONDS,
    STEP_PHASES,
    Heartbeats,
    Watchdog,
    limit,
    position,
    suspects,
    waits,
)
from concertina_protocol import Heartbeat, Limits

IN_COLLECTIVE = (
    "process 7: state S (sleeping), 9 threads",
    "Current thread 0x1 (most recent call first):",
    '  File "/x/torch/distributed/distributed_c10d.py", line 4000 in all_gather_into_tensor',
    '  File "/x/torch/distributed/fsdp/_collectives.py", line 20 in foreach_all_gather',
)
IN_SCRIPT = (
    "process 8: state S (sleeping), 9 threads",
    "Current thread 0x1 (most recent call first):",
    '  File "/x/train.py", line 12 in forward',
    '  File "/x/torch/nn/module.py", line 20 in __call__',
    '  File "/x/torch/nn/module.py", line 21 in __call__',
    '  File "/x/torch/nn/module.py", line 22 in __call__',
    '  File "/x/torch/distributed/fsdp/_state.py", line 20 in wrapper',
)


def heartbeat(rank: int, phase: str = "computing", step: int = 5, still: float = 0.0, **more) -> Heartbeat:
    return Heartbeat(rank, step, phase, still, **more)


@pytest.mark.parametrize(
    ("heartbeats", "expected"),
    [
        ([heartbeat(0), heartbeat(1, "loading data"), heartbeat(2)], [1]),
        ([heartbeat(0, "reducing"), heartbeat(1, "reducing"), heartbeat(2)], [2]),
        ([heartbeat(0, "checkpointing", 6), heartbeat(1, "computing", 6)], [0]),
        ([heartbeat(0, "reducing", 4), heartbeat(1, "checkpointing", 5)], [0]),
        ([heartbeat(0, "starting", 0), heartbeat(1, "restoring", 0)], [0]),
        ([heartbeat(0), heartbeat(1, "loading data"), heartbeat(2, "loading data")], [1, 2]),
        ([heartbeat(0), heartbeat(1)], [0, 1]),
        ([heartbeat(0, stack=IN_COLLECTIVE), heartbeat(1, stack=IN_SCRIPT)], [1]),
        ([heartbeat(0, stack=IN_COLLECTIVE), heartbeat(1, stack=IN_COLLECTIVE)], [0, 1]),
        # Only rank 0 of a user's own script reports its position. The stacks show that of the others.
        ([heartbeat(0, stack=IN_COLLECTIVE), Heartbeat(1, -1, "", 0.0, stack=IN_SCRIPT)], [1]),
        ([heartbeat(0), Heartbeat(1, -1, "", 0.0)], [0, 1]),
    ],
)
def test_who_is_behind(heartbeats: list[Heartbeat], expected: list[int]) -> None:
    assert [found.rank for found in suspects(heartbeats)] == expected


def test_a_frame_of_fsdp_further_out_is_no_collective() -> None:
    assert waits(IN_COLLECTIVE)
    assert not waits(IN_SCRIPT)
    assert not waits(())


@given(
    st.lists(st.tuples(st.integers(0, 3), st.sampled_from(STEP_PHASES)), min_size=1, max_size=8),
    st.permutations(range(8)),
)
def test_suspects_are_those_furthest_behind_whatever_the_order(places: list, order: list[int]) -> None:
    heartbeats = [heartbeat(rank, phase, step) for rank, (step, phase) in enumerate(places)]
    shuffled = [heartbeats[i] for i in order if i < len(heartbeats)]
    behind = suspects(shuffled)
    assert behind == suspects(heartbeats)
    assert behind
    assert {position(one) for one in behind} == {min(map(position, heartbeats))}


@pytest.mark.parametrize(
    ("told", "steps", "phase", "seconds"),
    [
        (0.0, [0.1] * 9, "computing", LEAST),
        (0.0, [10.0] * 9, "loading data", 200.0),
        (5.0, [10.0] * 9, "computing", 5.0),
        (5.0, [10.0], "checkpointing", LASTING["checkpointing"]),
        (5000.0, [10.0], "checkpointing", 5000.0),
        (0.0, [], "computing", FIRST_STEP),
        (5.0, [], "computing", FIRST_STEP),
        (5.0, [], "restoring", LASTING["restoring"]),
    ],
)
def test_how_long_is_too_long(told: float, steps: list[float], phase: str, seconds: float) -> None:
    assert limit(Limits(hang_seconds=told), steps, phase) == seconds


def watchdog(seconds: float = 10.0) -> Watchdog:
    made = Watchdog(Limits(hang_seconds=seconds))
    made.step_took(0.1)
    return made


def test_a_round_hangs_when_no_rank_has_moved_and_is_named_when_the_stacks_are_there() -> None:
    dog = watchdog()
    dog.on_heartbeats("a", (heartbeat(0, still=9.0),), 100.0)
    dog.on_heartbeats("b", (heartbeat(1, "loading data", still=0.0),), 100.0)
    assert not dog.check(109.9)
    assert not dog.hung, "rank 1 has moved"
    assert not dog.check(110.0)
    assert dog.hung
    dog.on_heartbeats("a", (heartbeat(0, still=20.0, stack=IN_COLLECTIVE),), 111.0)
    assert not dog.check(111.0), "a stack is missing"
    dog.on_heartbeats("b", (heartbeat(1, "loading data", still=11.0, stack=IN_SCRIPT),), 111.0)
    assert dog.check(111.0)
    hang = dog.hang
    assert hang is not None
    assert (hang.replica, hang.rank, hang.phase, hang.others) == ("b", 1, "loading data", "computing")
    assert (hang.seconds, hang.stack) == (11.0, IN_SCRIPT)
    dog.on_heartbeats("b", (heartbeat(1, "loading data", still=13.0, stack=IN_SCRIPT),), 113.0)
    assert not dog.check(113.0), "what was found stays the same"
    dog.on_heartbeats("b", (heartbeat(1, step=6),), 114.0)
    assert dog.check(114.0)
    assert (dog.hung, dog.hang) == (False, None)


def test_stacks_that_do_not_come_are_not_waited_for() -> None:
    dog = watchdog()
    dog.on_heartbeats("a", (heartbeat(0, still=10.0),), 100.0)
    dog.check(100.0)
    assert not dog.check(100.0 + STACKS_SECONDS - 0.1)
    assert dog.check(100.0 + STACKS_SECONDS)
    assert dog.hang is not None
    assert dog.hang.rank == 0


def test_where_all_wait_alike_nobody_is_blamed() -> None:
    dog = watchdog()
    dog.on_heartbeats("a", (heartbeat(0, still=10.0, stack=IN_COLLECTIVE),), 100.0)
    dog.on_heartbeats("b", (heartbeat(1, still=10.0, stack=IN_COLLECTIVE),), 100.0)
    dog.check(100.0)
    assert dog.check(100.25)
    assert dog.hang is not None
    assert (dog.hang.replica, dog.hang.rank, dog.hang.suspects) == ("", None, 2)


def test_workers_that_tell_nothing_never_hang() -> None:
    dog = watchdog()
    dog.on_heartbeats("a", (Heartbeat(0, -1, "", 0.0),), 100.0)
    dog.check(1e6)
    assert not dog.hung


@given(st.floats(-1e9, 1e9), st.floats(0, 50))
def test_the_clocks_of_members_do_not_matter(offset: float, still: float) -> None:
    """A member reports the same ages whatever its clock shows."""
    hearts = Heartbeats()
    hearts.on_beat(0, 5, "training", offset)
    hearts.update((), [0], offset + still)
    dog = watchdog(25.0)
    dog.on_heartbeats("a", hearts.heartbeats, 100.0)
    dog.check(100.0)
    assert dog.hung == (hearts.heartbeats[0].still >= 25.0)
    assert hearts.heartbeats[0].still == pytest.approx(still, abs=1e-3)


def test_a_worker_is_stopped_when_it_is_so_twice() -> None:
    hearts = Heartbeats()
    assert hearts.stopped([(1, 50)]) == frozenset()
    assert hearts.stopped([(1, 50), (2, 60)]) == {1}
    assert hearts.stopped([]) == frozenset()
    assert hearts.stopped([(2, 60)]) == frozenset()


def test_a_worker_that_is_stopped_for_moments_is_slow_and_not_stopped() -> None:
    hearts = Heartbeats()
    for still, found in ((0.1, set()), (0.3, set()), (0.45, set()), (0.6, {1})):
        hearts.update([Heartbeat(1, 7, "computing", still)], [1], now=0.0)
        assert hearts.stopped([(1, 50)]) == found


def test_a_worker_that_computes_between_its_stops_is_slow_and_not_stopped() -> None:
    """The worker is slow, however long its step takes."""
    hearts = Heartbeats()
    for used, found in ((50, set()), (58, set()), (66, set()), (66, {1})):
        hearts.update([Heartbeat(1, 7, "computing", 2.0)], [1], now=0.0)
        assert hearts.stopped([(1, used)]) == found


def test_who_says_again_and_again_that_data_are_waited_for_does_not_hang_until_it_falls_silent() -> None:
    """A script has no heartbeat file: `trainingjob.data` sends a message once a second while its store is away."""
    hearts, dog, now = Heartbeats(), Watchdog(Limits()), 0.0

    def look() -> bool:
        hearts.update([], [0], now)
        dog.on_heartbeats("a", hearts.heartbeats, now)
        return dog.check(now) and dog.hang is not None

    for step in range(1, 40):
        now += 1.0
        hearts.on_beat(0, step, "training", now)
        dog.step_took(1.0)
    for _ in range(int(5 * LEAST)):
        now += 1.0
        hearts.on_beat(0, 39, "loading data", now)
        assert not look()
    for _ in range(int(2 * LEAST)):
        now += 1.0
        if look():
            break
    assert dog.hang is not None
    assert dog.hang.phase == "loading data"
