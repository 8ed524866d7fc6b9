"""Repeated resets of connections between living agents: no round ends because of them, and nothing is lost."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import concertina_protocol as p
from concertina_agent.core.round.coordinator import Coordinator
from simulation.faults.table import FAULTS
from simulation.parts.agents import AgentProcess
from simulation.parts.clock import Violation
from simulation.runs.schedule import Strike
from simulation.runs.world import World

HERE = "tests/simulation/stories/test_resets.py"
RESETS = 30
FIRST_SECONDS, EVERY_SECONDS = 3.0, 0.7


def with_resets(seed: int, *others: Strike) -> World:
    at = (FIRST_SECONDS + EVERY_SECONDS * number for number in range(RESETS))
    resets = [Strike(when, "reset_connection", seed * RESETS + number) for number, when in enumerate(at)]
    return World(seed, schedule=tuple(sorted((*resets, *others), key=lambda strike: strike.at)))


def undisturbed(seed: int) -> int:
    """Run to the end without a failure, and return the number of resets.

    Raises:
        Violation: If it does not hold.
    """
    world = with_resets(seed)
    world.run()
    if world.status.restarts.total:
        raise Violation(f"a reset ended a round: {world.status.restarts.recent}\n{world.story()}")
    return sum("is reset" in text for _, text in world.clock.story)


@pytest.mark.parametrize(
    "seeds",
    [
        range(10),
        pytest.param(range(10, 200), marks=pytest.mark.long(law=f"{HERE}::test_resets_alone_end_no_round[seeds0]")),
    ],
)
def test_resets_alone_end_no_round(seeds: range) -> None:
    assert sum(undisturbed(seed) for seed in seeds) > len(seeds)


@pytest.mark.parametrize(
    "seeds",
    [
        range(6),
        pytest.param(
            range(6, 200), marks=pytest.mark.long(law=f"{HERE}::test_the_job_completes_whatever_else_fails[seeds0]")
        ),
    ],
)
def test_the_job_completes_whatever_else_fails(seeds: range) -> None:
    for seed in seeds:
        with_resets(seed, Strike(5.0 + seed % 4, FAULTS[seed % len(FAULTS)], seed)).run()


def the_coordinator_takes_nobody_back(patch: pytest.MonkeyPatch) -> None:
    join = Coordinator.join

    def once(self: Coordinator, message: p.Join, now: float) -> str | None:
        return "it has joined before" if message.replica in self._joined else join(self, message, now)

    patch.setattr(Coordinator, "join", once)


def a_reset_is_a_death(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(AgentProcess, "reset_stream", AgentProcess._unlink)


def fails(seed: int) -> bool:
    try:
        undisturbed(seed)
    except Violation:
        return True
    return False


@pytest.mark.parametrize(
    "planted", [the_coordinator_takes_nobody_back, a_reset_is_a_death], ids=lambda planted: planted.__name__
)
def test_a_planted_fault_is_noticed(
    planted: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same seeds pass without the planted bug (test above)."""
    planted(monkeypatch)
    assert any(fails(seed) for seed in range(6))
