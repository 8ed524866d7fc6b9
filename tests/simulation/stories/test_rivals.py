"""Two or three jobs that don't fit at once, beside one that never does: each gets its turn, in the right order."""

from __future__ import annotations

from typing import Any

import pytest

from concertina.controller.cache import capacity_queue
from concertina.plan.lifecycle import admission, line
from simulation.parts.clock import Violation
from simulation.runs.rivals import Rivalry

SEEDS, MORE = range(12), range(12, 120)
"""Seeds. In every fourth there is a job that can never start."""
HERE = "tests/simulation/stories/test_rivals.py"


def fails(seed: int) -> bool:
    try:
        Rivalry(seed).run()
    except Violation:
        return True
    return False


@pytest.mark.parametrize(
    "seeds",
    [
        SEEDS,
        pytest.param(
            MORE, marks=pytest.mark.long(law=f"{HERE}::test_jobs_that_need_the_same_nodes_all_complete[gate]")
        ),
    ],
    ids=["gate", "more"],
)
@pytest.mark.timeout(900)
def test_jobs_that_need_the_same_nodes_all_complete(seeds: range) -> None:
    gave_way = 0
    for seed in seeds:
        rivalry = Rivalry(seed)
        try:
            rivalry.run()
        except Violation as violation:
            pytest.fail(f"seed {seed}: {rivalry.story()}\n{violation}")
        gave_way += any("Requeued" in text for _, text in rivalry.clock.story)
    assert gave_way >= 2


@pytest.mark.parametrize(
    ("where", "name", "says", "seed"),
    [
        pytest.param(
            *(admission, "_may_release", lambda ctx, mine: False, 1),
            marks=pytest.mark.long(law=f"{HERE}::test_a_planted_fault_is_noticed"),
        ),
        (line, "_order", lambda jobs, fitting, before: {uid: job.priority for uid, job in jobs.items()}, 1),
        (admission, "TURN_TIMEOUT", 20.0, 1),
        (admission, "_excluded", lambda alive: False, 25),
        (admission, "_could_hold", lambda least, alive, nodes: True, 29),
        (capacity_queue, "fits_quota", lambda message: None, 13),
    ],
    ids=[
        "room that nobody releases is a deadlock",
        "the job of the lower priority goes first",
        "a turn is cut short",
        "others wait for what no node is made for",
        "others wait for what is too large",
        "others wait for what a quota forbids",
    ],
)
def test_a_planted_fault_is_noticed(
    monkeypatch: pytest.MonkeyPatch, where: Any, name: str, says: Any, seed: int
) -> None:
    """The seed shows the planted bug.

    If a code change alters the runs of the seeds, one of the next hundred will show it.
    """
    assert not fails(seed)
    monkeypatch.setattr(where, name, says)
    assert fails(seed), f"seed {seed} shows it no longer"
