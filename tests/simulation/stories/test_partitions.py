"""Partitions without any other fault, asymmetric ones too: they end in the right world, in a few rounds."""

from __future__ import annotations

import pytest

from simulation.runs.schedule import Strike
from simulation.runs.world import World

SEEDS, MORE = range(4), range(4, 50)
HERE = "tests/simulation/stories/test_partitions.py"
ENOUGH_ROUNDS = 6
"""Maximum number of rounds: the first one, growing to full size, one without the isolated replicas, and one with
them."""


def seeds(case: str) -> pytest.MarkDecorator:
    """Return the parameter `seeds` of a test, of which `case` runs in the gate."""
    more = pytest.param(MORE, id="more", marks=pytest.mark.long(law=f"{HERE}::{case}"))
    return pytest.mark.parametrize("seeds", [pytest.param(SEEDS, id="gate"), more])


@seeds("test_a_partition_is_answered_in_a_few_rounds[cut_nodes-gate]")
@pytest.mark.parametrize("fault", ["cut_from_peers", "cut_in_two", "cut_nodes", "cut_from_control", "one_way"])
def test_a_partition_is_answered_in_a_few_rounds(fault: str, seeds: range) -> None:
    for seed in seeds:
        world = World(seed, schedule=(Strike(6.0, fault, seed),))
        world.run()
        assert world.status.rounds <= ENOUGH_ROUNDS, world.story()


@seeds("test_doors_that_are_closed_do_not_keep_a_round_from_being_made[closed_door-gate]")
@pytest.mark.parametrize("fault", ["closed_door", "closed_node"])
def test_doors_that_are_closed_do_not_keep_a_round_from_being_made(fault: str, seeds: range) -> None:
    """A replica that can open connections but not accept any stays in the current round. A new round leaves it out."""
    for seed in seeds:
        world = World(seed, schedule=(Strike(5.0, fault, seed), Strike(6.0, "kill_worker", seed)))
        world.run()
        assert world.status.rounds <= ENOUGH_ROUNDS + 1, world.story()
