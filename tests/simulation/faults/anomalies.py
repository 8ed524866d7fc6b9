"""Faults of the training itself: samples that spoil a step, a glitch that does not repeat, bits that flip."""

from __future__ import annotations

import math
from random import Random
from typing import TYPE_CHECKING

from simulation.parts.lineage import BATCH, steps_of

if TYPE_CHECKING:
    from simulation.parts.collective import Collective
    from simulation.runs.world import World

SPIKE = 1e6


def bad_samples(world: World, random: Random) -> None:
    """Make some of the next samples give a loss that is not finite, or one far above the others, in every world."""
    first = _consumed(world) + random.randrange(6 * BATCH)
    positions = range(first, first + random.choice((1, 1, BATCH, 3 * BATCH)))
    loss = random.choice((math.nan, math.nan, SPIKE))
    world.tell(f"samples {first} to {positions[-1]} make a loss of {loss}")
    world.spoilt.update(dict.fromkeys(positions, loss))


def bad_run(world: World, random: Random) -> None:
    """Make every loss from some later step on not finite, whichever samples are skipped.

    The job tolerates only a few failures.
    """
    policy = world.cluster.spec.failure_policy.model_copy(update={"max_restarts": random.randint(3, 6)})
    world.cluster.edit(failure_policy=policy)
    first = _consumed(world) + random.randrange(6 * BATCH)
    world.tell(f"from sample {first} on no loss is finite")
    world.spoilt.update(dict.fromkeys(range(first, 100_000), math.nan))


def glitch(world: World, random: Random) -> None:
    """Make the loss of one step wrong, once."""
    loss, run = random.choice((math.nan, SPIKE)), _training(world, random)
    if run is not None and run.judge is not None:
        world.tell(f"the next loss of round {run.round} is {loss}, once")
        run.judge.glitch = loss


def flip_bits(world: World, random: Random) -> None:
    """Flip bits in memory of one member's worker to which nothing writes."""
    run = _training(world, random)
    if run is not None and run.judge is not None and run.here:
        run.judge.flipped = random.choice(sorted(run.here))
        world.tell(f"bits flip in the memory of {run.judge.flipped}")


def _training(world: World, random: Random) -> Collective | None:
    """Return a round whose workers step, whether it is the current one or one that is cut off."""
    runs = [run for run in world.collectives.values() if run.judge and run.here and not run.broken and not run.over]
    return random.choice(runs) if runs else None


def _consumed(world: World) -> int:
    """Return the number of consumed samples of the newest state so far."""
    states = (run.lineage for run in world.collectives.values() if run.lineage is not None)
    return max((BATCH * steps_of(state) for state in states), default=0)
