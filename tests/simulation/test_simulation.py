"""plan(), the agents' core, a cluster and a network in one virtual time: runs with faults drawn from a seed.

A run that breaks an invariant fails with its seed and its story. To run more: CONCERTINA_SEEDS=5000 (or 1000:6000)
`pytest tests/simulation`; one seed again: CONCERTINA_SEEDS=117:118.
"""

from __future__ import annotations

import os
import traceback

import pytest

from simulation.clock import Violation
from simulation.mutations import MUTATIONS, Patch
from simulation.world import World

CALM = 100
ENOUGH = 1500
"""Seeds within which every planted fault shows."""


def seeds() -> range:
    first, _, last = os.environ.get("CONCERTINA_SEEDS", "2000").rpartition(":")
    return range(int(first or 0), int(last))


def run(seed: int, calm: bool = False) -> str:
    """The story of the run, if it broke an invariant."""
    world = World(seed, calm)
    try:
        world.run()
    except Violation as violation:
        return f"{world.story()}\n{violation}"
    except Exception:
        return f"{world.story()}\n{traceback.format_exc()}"
    return ""


@pytest.mark.timeout(1200)
def test_whatever_fails_the_invariants_hold_and_the_job_completes() -> None:
    for seed in seeds():
        story = run(seed)
        assert not story, story


def test_a_disturbed_operator_changes_nothing_when_nothing_is_wrong() -> None:
    for seed in range(CALM):
        story = run(seed, calm=True)
        assert not story, story


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.__name__)
def test_a_planted_fault_is_noticed(mutation: object, monkeypatch: Patch) -> None:
    mutation(monkeypatch)
    assert any(run(seed) for seed in range(ENOUGH))


def test_a_seed_is_the_same_run_every_time() -> None:
    first, second = World(7), World(7)
    first.run()
    second.run()
    assert first.clock.story == second.clock.story
    assert first.clock.events == second.clock.events
