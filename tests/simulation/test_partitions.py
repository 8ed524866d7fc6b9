"""Asymmetric partitions end in the right world, in a few rounds: alone, without any other fault."""

from __future__ import annotations

import pytest

from simulation.schedule import Strike
from simulation.world import World

SEEDS = range(40)
ENOUGH_ROUNDS = 6
"""The first one, growing to full size, the one without whoever is cut off, and those with them again."""


@pytest.mark.parametrize("fault", ["cut_from_peers", "cut_in_two", "cut_nodes", "cut_from_control"])
def test_a_partition_is_answered_in_a_few_rounds(fault: str) -> None:
    for seed in SEEDS:
        world = World(seed, schedule=(Strike(6.0, fault, seed),))
        world.run()
        assert world.status.rounds <= ENOUGH_ROUNDS, world.story()
