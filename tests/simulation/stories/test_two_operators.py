"""Second release that serves the same job with another master key: it does not affect the job."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from concertina.api.spec import Launcher
from concertina.controller.cache.taken_back import TakenBack
from concertina.plan import plan
from concertina.plan.lifecycle import start
from simulation.parts.clock import Violation
from simulation.parts.operators import OperatorProcess
from simulation.runs.schedule import Strike
from simulation.runs.world import World

HERE = "tests/simulation/stories/test_two_operators.py"
BEGINS_SECONDS = 3.0
"""Seconds after the job's own operator has created its pods."""
FAULTS = ("kill_worker", "kill_agent", "delete_pod", "kill_operator", "second_operator", "suspend", "scale")
MOST_WRITES = 3
"""Maximum number of writes of the second release, as the job's own operator writes from time to time."""


def with_a_stranger(seed: int, *faults: Strike) -> World:
    """Run to the end with the second release.

    Raises:
        Violation: If it does not hold.
    """
    world = World(seed, schedule=faults, key="ours")
    writes: list[str] = []
    write = world.cluster.write_status

    def counted(who: str, *statuses: object) -> None:
        writes.append(who)
        write(who, *statuses)  # type: ignore[arg-type]

    world.cluster.write_status = counted  # type: ignore[method-assign]
    world.clock.after(BEGINS_SECONDS, OperatorProcess, world, "stranger", "theirs")
    world.run()
    if writes.count("stranger") > MOST_WRITES:
        raise Violation(f"the stranger writes {writes.count('stranger')} times")
    return world


@pytest.mark.parametrize(
    "seeds",
    [
        range(6),
        pytest.param(range(6, 150), marks=pytest.mark.long(law=f"{HERE}::test_the_stranger_costs_nothing[seeds0]")),
    ],
)
def test_the_stranger_costs_nothing(seeds: range) -> None:
    for seed in seeds:
        assert not with_a_stranger(seed).status.restarts.total


@pytest.mark.parametrize(
    "seeds",
    [
        range(6),
        pytest.param(range(6, 150), marks=pytest.mark.long(law=f"{HERE}::test_whatever_else_fails[seeds0]")),
    ],
)
def test_whatever_else_fails(seeds: range) -> None:
    for seed in seeds:
        with_a_stranger(seed, Strike(4.0 + seed % 4, FAULTS[seed % len(FAULTS)], seed))


def it_acts_without_the_key(patch: pytest.MonkeyPatch) -> None:
    others = tuple(policy for policy in plan.AGENT if policy is not start.master_key_missing)
    assert len(others) == len(plan.AGENT) - 1
    patch.setattr(plan, "POLICIES", {**plan.POLICIES, Launcher.AGENT: others})
    it_writes_beside_the_other(patch)


def it_writes_beside_the_other(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(TakenBack, "yield_seconds_left", lambda *known: 0.0)


def violation(seed: int) -> str:
    """Return the violation of a run in which the job is suspended, so that every operator has something to do."""
    try:
        with_a_stranger(seed, Strike(6.0, "suspend", seed))
    except Violation as noticed:
        return str(noticed)
    return ""


@pytest.mark.parametrize(
    ("planted", "words"),
    [
        (it_acts_without_the_key, "acts on a job whose key it does not have"),
        (it_writes_beside_the_other, "the stranger writes"),
    ],
    ids=["it acts without the key", "it writes beside the other"],
)
def test_a_planted_fault_is_noticed(
    planted: Callable[[pytest.MonkeyPatch], None], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same seeds pass without the planted bug (test above)."""
    planted(monkeypatch)
    assert any(words in violation(seed) for seed in range(3))
