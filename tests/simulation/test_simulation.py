"""plan(), the agents' core, a cluster and a network in one virtual time: runs with faults drawn from a seed.

A run that breaks an invariant fails with its seed and its story. To run more: CONCERTINA_SEEDS=5000 (or 1000:6000)
`pytest tests/simulation`; one seed again: CONCERTINA_SEEDS=117:118.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest

from simulation.mutations import ALONE, MUTATIONS, Patch
from simulation.schedule import Strike
from simulation.shrink import shortest
from simulation.world import World, failure

CALM = 100
ENOUGH = 1500
"""Seeds within which every planted fault shows."""


def seeds() -> range:
    first, _, last = os.environ.get("CONCERTINA_SEEDS", "2000").rpartition(":")
    return range(int(first or 0), int(last))


@pytest.mark.timeout(1200)
def test_whatever_fails_the_invariants_hold_and_the_job_completes() -> None:
    for seed in seeds():
        broken = failure(seed)
        assert not broken, f"{broken.story}\n\n{shortest(seed)}"


def test_a_disturbed_operator_changes_nothing_when_nothing_is_wrong() -> None:
    for seed in range(CALM):
        broken = failure(seed, calm=True)
        assert not broken, f"{broken.story}\n\n{shortest(seed, calm=True)}"


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.__name__)
def test_a_planted_fault_is_noticed(mutation: Callable[[Patch], None], monkeypatch: Patch) -> None:
    mutation(monkeypatch)
    alone = ALONE.get(mutation, ())
    strikes = [tuple(Strike(5.0 + i, name, seed) for i, name in enumerate(alone)) for seed in range(ENOUGH)]
    schedules = (schedule or None for schedule in strikes)
    assert any(failure(seed, schedule=schedule) for seed, schedule in enumerate(schedules))


def test_a_seed_is_the_same_run_every_time() -> None:
    first, second = World(7), World(7)
    first.run()
    second.run()
    assert first.clock.story == second.clock.story
    assert first.clock.events == second.clock.events
