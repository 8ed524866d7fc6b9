"""Reports that workers train in worlds of their own: by whom, and from when on."""

from __future__ import annotations

from builders.agent import Driver, kinds
from concertina_agent.core import events as e

CLAUSE = "processes with WORLD_SIZE=1 were started by torchrun in a round of 2 workers"


def test_the_coordinator_tells_of_it_once_every_member_has_it() -> None:
    driver = Driver(bundled=False)
    driver.begun("a", "b")
    assert kinds(driver.tell(e.WorldsSeen(1, CLAUSE))) == ["ReportChanged"]
    assert driver.report.world_mismatch == ""
    driver.member_says("b", "running", world_mismatch=True)
    assert driver.report.world_mismatch == CLAUSE
    assert not any(member.world_mismatch for member in driver.report.members.values())
    driver.member_says("b", "running", world_mismatch=False)
    assert driver.report.world_mismatch == ""


def test_what_was_seen_of_an_older_round_is_no_news() -> None:
    driver = Driver(bundled=False)
    driver.begun("a")
    assert driver.tell(e.WorldsSeen(0, CLAUSE)) == []
    driver.tell(e.WorldsSeen(1, CLAUSE))
    assert driver.report.world_mismatch == CLAUSE
    assert driver.tell(e.WorldsSeen(1, CLAUSE)) == []


def test_a_member_tells_its_coordinator_alone() -> None:
    driver = Driver("b", bundled=False)
    driver.begun("a", "b")
    driver.tell(e.WorldsSeen(1, CLAUSE))
    assert driver.core.member_state().world_mismatch
    assert driver.report.world_mismatch == ""
