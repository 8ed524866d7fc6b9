"""Job that is deleted while a finalizer holds it: its pods are deleted, whatever else fails, and no step is lost."""

from __future__ import annotations

import pytest

from simulation.faults.table import FAULTS
from simulation.parts.clock import START
from simulation.runs.schedule import SPAN, Strike
from simulation.runs.world import LIMIT, World

HERE = "tests/simulation/stories/test_deletion.py"
SETTLED_SECONDS = 20.0
"""Seconds after the deletion, in which the operator completes what it decided before it learned of the deletion."""


def deleted(seed: int, *others: Strike) -> World:
    """Run the job until it is at rest, after which no pod may be created."""
    world = World(seed, schedule=(Strike(8.0, "delete_held_job", seed), *others))
    assert world.clock.run(START + 8.0, lambda: False) is False
    assert world.clock.run(START + SPAN + LIMIT, lambda: world.over() or at_rest(world)), world.story()
    made = len(world.cluster.made)
    world.clock.run(world.clock.now + SETTLED_SECONDS, lambda: False)
    assert len(world.cluster.made) == made, world.story()
    return world


def at_rest(world: World) -> bool:
    return world.status.phase == "Deleting" and not world.cluster.pods and not world.status.world.members


@pytest.mark.parametrize(
    "seeds",
    [
        range(10),
        pytest.param(
            range(10, 200),
            marks=pytest.mark.long(law=f"{HERE}::test_a_held_job_gives_its_pods_back_and_loses_no_step[seeds0]"),
        ),
    ],
)
def test_a_held_job_gives_its_pods_back_and_loses_no_step(seeds: range) -> None:
    drained = 0
    for seed in seeds:
        world = deleted(seed)
        if world.over() or world.status.progress is None:
            continue
        latest = world.storage.latest
        assert latest is not None, world.story()
        assert latest.step >= world.status.progress.step, world.story()
        drained += 1
    assert drained >= len(seeds) // 2


@pytest.mark.parametrize(
    "seeds",
    [
        range(6),
        pytest.param(
            range(6, 200),
            marks=pytest.mark.long(law=f"{HERE}::test_whatever_else_fails_its_pods_go[seeds0]"),
        ),
    ],
)
def test_whatever_else_fails_its_pods_go(seeds: range) -> None:
    for seed in seeds:
        deleted(seed, Strike(7.0 + seed % 4, FAULTS[seed % len(FAULTS)], seed))
