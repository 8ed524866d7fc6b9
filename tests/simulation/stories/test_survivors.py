"""Workers that outlive their round: they end its last step one by one, leave late, speak too late, and fail again."""

from __future__ import annotations

import enum
from collections.abc import Iterable

import pytest

from simulation.parts.clock import START, Violation
from simulation.parts.survivors import Stay
from simulation.runs.schedule import one_death, twice
from simulation.runs.world import World
from simulation.test_simulation import GATE

HERE = "tests/simulation/stories/test_survivors.py"
LONGEST = 30.0
"""Maximum seconds of a recovery."""


class Moment(enum.Enum):
    """Moment of a recovery."""

    UNNOTICED = enum.auto()
    ASKED = enum.auto()
    """The operator has begun a round, and no agent has answered."""
    ANSWERED = enum.auto()
    COMMITTED = enum.auto()
    """The members are chosen, and none has started its workers."""
    STARTING = enum.auto()
    OVER = enum.auto()


def moment(world: World, ended: int) -> Moment:
    """Return the present moment of the recovery from the end of the round `ended`."""
    claim = world.status.world.claim
    if claim is None or claim.round <= ended:
        return Moment.UNNOTICED
    seen = (claim.round, claim.claim_id)
    if not claim.committed:
        prepared = (agent.core.preparation for agent in world.agents.values() if agent.core.seen == seen)
        return Moment.ANSWERED if any(some and some.answer for some in prepared) else Moment.ASKED
    run = world.collectives.get(seen)
    if run is None:
        return Moment.COMMITTED
    return Moment.OVER if run.first_step_at else Moment.STARTING


def play(seed: int, stay: Stay = Stay.SOON) -> World:
    """Play a run to its end, in which a worker is killed.

    Raises:
        Violation: If it does not hold.
    """
    world = World(seed, schedule=(one_death(seed),), stay=stay)
    world.run()
    if world.status.restarts.total > 1:
        raise Violation(f"what was said too late ended a round\n{world.story()}")
    return world


def recovery_seconds(seed: int, stay: Stay) -> float:
    """Return the seconds from the death of a worker until the next round trains; 0 if no round ends."""
    death = one_death(seed)
    world = World(seed, schedule=(death,), stay=stay)
    world.clock.run(START + death.at - 0.001, world.over)
    ended = world.status.world.round
    world.clock.run(START + death.at + LONGEST, lambda: moment(world, ended) is Moment.OVER)
    return world.clock.now - START - death.at if moment(world, ended) is Moment.OVER else 0.0


def play_twice(seed: int, stay: Stay) -> Moment:
    """Play a run with a second failure during the recovery from the first. Return the moment at which it came.

    Raises:
        Violation: If it does not hold.
    """
    first, second = twice(seed, recovery_seconds(seed, stay))
    world, moments = World(seed, schedule=(first, second), stay=stay), list[Moment]()

    def look(ended: int) -> None:
        moments.append(moment(world, ended))

    def watch() -> None:
        world.clock.after(second.at - first.at, look, world.status.world.round)

    world.clock.after(first.at - 0.001, watch)
    try:
        world.run()
    except Violation as violation:
        raise Violation(f"{world.story()}\n{violation}") from violation
    return moments[0] if moments else Moment.OVER


def _play_all(seeds: Iterable[int], stay: Stay = Stay.SOON) -> list[World]:
    return [play(seed, stay) for seed in seeds]


def test_by_its_seed_a_job_has_workers_that_end_or_stay() -> None:
    assert {Stay.of(seed) for seed in range(GATE)} == set(Stay)


@pytest.mark.parametrize(
    "seeds",
    [
        range(10),
        pytest.param(range(10, 200), marks=pytest.mark.long(law=f"{HERE}::test_survivors_spoil_no_round[seeds0]")),
    ],
)
def test_survivors_spoil_no_round(seeds: range) -> None:
    survivors = [world.survivors for world in _play_all(seeds)]
    said = {word for some in survivors for word in some.said}
    assert {"Progress", "Committed", "WantDurable", "WorkerExited"} <= said
    assert sum(some.torn for some in survivors) > 0
    assert sum(some.apart for some in survivors) > 0


@pytest.mark.parametrize(
    ("stay", "seeds"),
    [
        (Stay.SOON, range(8)),
        (Stay.LATE, range(8)),
        *(
            pytest.param(
                stay,
                range(8, 400),
                marks=pytest.mark.long(law=f"{HERE}::test_a_second_failure_meets_them[{stay}-seeds{i}]"),
            )
            for i, stay in enumerate((Stay.SOON, Stay.LATE))
        ),
    ],
)
def test_a_second_failure_meets_them(stay: Stay, seeds: range) -> None:
    """At any moment of the recovery."""
    moments = {play_twice(seed, stay) for seed in seeds}
    if len(seeds) > 8:
        assert moments == set(Moment)
    else:
        assert len(moments) >= 3


@pytest.mark.parametrize(
    "seeds",
    [
        range(6),
        pytest.param(range(6, 100), marks=pytest.mark.long(law=f"{HERE}::test_a_late_answer_costs_no_state[seeds0]")),
    ],
)
def test_a_late_answer_costs_no_state(seeds: range) -> None:
    """The operator waits for the answer of a survivor that may hold the newest state."""
    _play_all(seeds, Stay.LATE)
