"""Two or three jobs that don't fit at once, beside one that never does: each gets its turn, and who comes first goes
first."""

from __future__ import annotations

from typing import Any

import pytest

from concertina.plan.lifecycle import admission, room
from concertina.plan.types import Competitor
from simulation.clock import Violation
from simulation.rivals import Rivalry

SEEDS = range(20)
ENOUGH = range(60)
IMPOSSIBLE = range(1, 80, 4)
"""Seeds with a job that can never start."""


def fails(seed: int) -> bool:
    try:
        Rivalry(seed).run()
    except Violation:
        return True
    return False


def test_jobs_that_need_the_same_nodes_all_complete() -> None:
    gave_way = 0
    for seed in SEEDS:
        rivalry = Rivalry(seed)
        try:
            rivalry.run()
        except Violation as violation:
            pytest.fail(f"seed {seed}: {rivalry.story()}\n{violation}")
        gave_way += any("GivesWay" in text for _, text in rivalry.clock.story)
    assert gave_way >= 2


def test_room_that_nobody_releases_is_a_deadlock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "_may_release", lambda ctx, mine: False)
    assert any(fails(seed) for seed in ENOUGH[::2])


def test_it_is_noticed_when_the_first_in_line_gives_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        Competitor,
        "queue_position",
        property(lambda competitor: (competitor.priority, competitor.trained, -competitor.created, "")),
    )
    assert any(fails(seed) for seed in ENOUGH)


@pytest.mark.parametrize(
    ("check", "says"),
    [
        ("_excluded", lambda alive: False),
        ("_could_hold", lambda least, alive, nodes: True),
        ("hindrance", lambda least, pods, nodes, quota, real=room.hindrance: real(least, pods, nodes, None)),
    ],
    ids=["excluded", "too large", "a quota"],
)
def test_it_is_noticed_when_others_wait_for_what_can_never_start(
    monkeypatch: pytest.MonkeyPatch, check: str, says: Any
) -> None:
    monkeypatch.setattr(room, check, says)
    assert any(fails(seed) for seed in IMPOSSIBLE)
