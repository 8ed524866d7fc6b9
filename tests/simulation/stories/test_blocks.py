"""Worlds in blocks: whoever is lost takes a block along and no state."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from simulation.runs.schedule import Strike
from simulation.runs.world import World

SEEDS = range(25)
LAYOUTS = [{"tensor": 2, "shard": 2}, {"tensor": 2}, {"pipeline": 2, "tensor": 2, "shard": 2}, {"tensor": 3}]


@pytest.mark.parametrize("parallelism", LAYOUTS, ids=str)
@pytest.mark.parametrize("fault", ["kill_node", "kill_agent", "spot_notice", "scale", "sudden_end"])
def test_the_state_stays_in_the_memory_of_nodes(fault: str, parallelism: Mapping[str, int]) -> None:
    for seed in SEEDS:
        world = World(seed, schedule=(Strike(8.0, fault, seed),), parallelism=parallelism)
        world.run()
        rounds = [each.assign for each in world.collectives.values()]
        assert "Storage" not in [assign.restore.source for assign in rounds], world.story()
