"""Worlds in blocks: a lost replica ends its block but loses no state, and surplus replicas hand their state over."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from concertina_protocol import RestoreSource
from simulation.runs.schedule import Strike
from simulation.runs.world import World

SEEDS, ENOUGH = range(10), 8
"""Seeds, and the number of jobs that become smaller without a fault."""
LAYOUTS = [{"tensor": 2, "shard": 2}, {"pipeline": 3}]
layouts = pytest.mark.parametrize("parallelism", LAYOUTS, ids=str)


def holds(world: World) -> None:
    """Check that the run completes in whole blocks, without going back to storage."""
    world.run()
    for run in world.collectives.values():
        ranks = sum(member.workers for member in run.assign.members)
        assert ranks % world.cluster.spec.parallelism.block == 0, world.story()
        assert run.assign.restore.source is not RestoreSource.STORAGE, world.story()


@layouts
@pytest.mark.parametrize(
    "fault",
    [
        "kill_agent",
        pytest.param(
            "kill_node",
            marks=pytest.mark.long(
                law="tests/simulation/stories/test_blocks.py::test_a_lost_member_takes_its_block_out_and_no_state"
            ),
        ),
    ],
)
def test_a_lost_member_takes_its_block_out_and_no_state(fault: str, parallelism: Mapping[str, int]) -> None:
    for seed in SEEDS:
        holds(World(seed, schedule=(Strike(8.0, fault, seed),), parallelism=parallelism))


@pytest.mark.parametrize("parallelism", [None, *LAYOUTS], ids=str)
def test_no_step_is_lost_to_fewer_replicas(parallelism: Mapping[str, int] | None) -> None:
    """Neighbours that leave together hold a snapshot and its only copy."""
    shrunk = 0
    for seed in range(30):
        world = World(seed, schedule=(), parallelism=parallelism)
        less = (world.cluster.spec.replicas + 1) // 2
        if world.cluster.spec.min_replicas > less or (world.cluster.spec.replica_step > less):
            continue
        world.clock.after(8.0, lambda world=world, less=less: world.cluster.edit(replicas=less))
        holds(world)
        shrunk += 1
        if shrunk == ENOUGH:
            break
    assert shrunk > 3
