"""The breaker over all jobs: it is this operator that is suspected where most agents are lost at once."""

from __future__ import annotations

from dataclasses import replace

from concertina.agents.hearing import Hearing
from concertina.plan.observed import AgentView, ConnectionRefusal

HEARD = AgentView(connected=True, wanted_at=1.0)
LOST = AgentView(wanted_at=1.0, lost_at=2.0)


def hearing(heard: int, lost: int, each: int = 1) -> Hearing:
    """So many jobs of which all leads are heard, and so many of which `each` agents are lost."""
    found = Hearing()
    for job in range(heard):
        found.update(f"heard-{job}", "a-0-0", HEARD)
    for job in range(lost):
        for index in range(each):
            found.update(f"lost-{job}", f"a-{index}-0", HEARD)
            found.update(f"lost-{job}", f"a-{index}-0", LOST)
    return found


def test_it_is_the_own_side_when_as_many_are_lost_as_are_heard_and_of_several_jobs() -> None:
    assert hearing(3, 3).own_side_suspected
    assert hearing(0, 3).own_side_suspected
    assert not hearing(4, 3).own_side_suspected
    assert not hearing(0, 2, each=50).own_side_suspected
    assert not hearing(1000, 100).own_side_suspected


def test_it_heals_as_agents_are_heard_again_or_not_watched_any_more() -> None:
    again = hearing(2, 3)
    assert again.silent == 3
    again.update("lost-0", "a-0-0", HEARD)
    assert again.silent == 2
    assert not again.own_side_suspected
    gone = hearing(0, 3)
    gone.update("lost-0", "a-0-0", replace(LOST, wanted_at=None))
    assert not gone.own_side_suspected


def test_who_was_never_heard_or_knows_another_key_is_not_lost() -> None:
    found = Hearing()
    for job in range(10):
        found.update(f"new-{job}", "a-0-0", AgentView(wanted_at=1.0))
        found.update(f"key-{job}", "a-0-0", replace(LOST, refusal=ConnectionRefusal.OTHER_KEY))
    assert not found.own_side_suspected


def test_the_same_said_twice_counts_once() -> None:
    found = Hearing()
    for _ in range(2):
        for job in range(3):
            found.update(f"lost-{job}", "a-0-0", LOST)
            found.update(f"heard-{job}", "a-0-0", HEARD)
    found.update("heard-3", "a-0-0", HEARD)
    assert not found.own_side_suspected
