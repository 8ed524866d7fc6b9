"""plan(), the agents' core, a cluster and a network in one virtual time: runs with faults drawn from a seed.

A run that breaks an invariant fails with its seed and its story. To run others: CONCERTINA_SEEDS=5000 (or 1000:6000)
`pytest tests/simulation`; one seed again: CONCERTINA_SEEDS=117:118.
"""

from __future__ import annotations

import os
import time

import pytest

from builders.cluster.drills import FIGURES
from simulation.mutations import MUTATIONS, Patch, Planted
from simulation.runs.world import World, failure
from simulation.shrink import shortest

CALM = 24
GATE, MORE = 60, 2000
HERE = "tests/simulation/test_simulation.py"


def seeds() -> range:
    first, _, last = os.environ.get("CONCERTINA_SEEDS", str(GATE)).rpartition(":")
    return range(int(first or 0), int(last))


def all_hold(seeds: range) -> None:
    for seed in seeds:
        broken = failure(seed)
        assert not broken, f"{broken.story}\n\n{shortest(seed)}"


@pytest.mark.timeout(1200)
def test_whatever_fails_the_invariants_hold_and_the_job_completes() -> None:
    all_hold(seeds())


@pytest.mark.long(law=f"{HERE}::test_whatever_fails_the_invariants_hold_and_the_job_completes")
@pytest.mark.timeout(1800)
def test_so_they_do_in_other_runs_each_time(request: pytest.FixtureRequest) -> None:
    """CONCERTINA_SEEDS_FROM sets the first seed, to repeat the same runs."""
    first = int(os.environ.get("CONCERTINA_SEEDS_FROM") or GATE + int(time.time()) // 60 * MORE % 10**9)
    command = f"simulation: CONCERTINA_SEEDS={first}:{first + MORE}"
    request.config.stash.setdefault(FIGURES, []).append(command)
    all_hold(range(first, first + MORE))


def test_a_disturbed_operator_changes_nothing_when_nothing_is_wrong() -> None:
    for seed in range(CALM):
        broken = failure(seed, calm=True)
        assert not broken, f"{broken.story}\n\n{shortest(seed, calm=True)}"


@pytest.mark.parametrize("planted", MUTATIONS, ids=lambda planted: planted.name)
def test_a_planted_fault_is_noticed(planted: Planted, monkeypatch: Patch) -> None:
    """The planted bug is detected, and no other violation occurs."""
    without = planted.play(planted.seed)
    assert without is None, without.story
    planted.mutation(monkeypatch)
    broken = planted.play(planted.seed)
    assert broken, f"seed {planted.seed} shows it no longer; `python -m simulation.mutations {planted.name}` finds one"
    assert broken.invariant, broken.story


def test_a_seed_is_the_same_run_every_time() -> None:
    first, second = World(7), World(7)
    first.run()
    second.run()
    assert first.clock.story == second.clock.story
    assert first.clock.events == second.clock.events
