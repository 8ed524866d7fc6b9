"""Full disruption: this operator itself is suspected if most jobs, of most namespaces, fall silent together."""

from __future__ import annotations

from dataclasses import replace

from concertina.agents.hearing import AgentConnectivityMonitor
from concertina.plan.observed import AgentView, ConnectionRefusal

HEARD = AgentView(connected=True, wanted_at=1.0)
LOST = AgentView(wanted_at=1.0, lost_at=2.0)
GONE = replace(LOST, wanted_at=None)


def add(
    hearing: AgentConnectivityMonitor, namespace: str, jobs: int, view: AgentView, agents: int = 1, trained: bool = True
) -> None:
    """Add jobs whose agents were connected, and are as in `view` now."""
    for job in range(jobs):
        uid = f"{namespace}-{view is LOST}-{job}"
        if trained:
            hearing.has_trained(uid, namespace)
        for index in range(agents):
            hearing.update(uid, f"a-{index}-0", HEARD)
            hearing.update(uid, f"a-{index}-0", view)


def suspected(*namespaces: tuple[int, int]) -> bool:
    """Return the verdict on namespaces with these numbers of connected and of silent jobs."""
    hearing = AgentConnectivityMonitor()
    for number, (heard, silent) in enumerate(namespaces):
        add(hearing, f"team-{number}", heard, HEARD)
        add(hearing, f"team-{number}", silent, LOST)
    return hearing.operator_isolated


def test_it_is_the_own_side_where_at_least_half_of_the_jobs_are_silent_three_or_more() -> None:
    assert suspected((3, 3))
    assert suspected((0, 3))
    assert not suspected((4, 3))
    assert not suspected((0, 2)), "a node that dies may have two coordinators on it"


def test_jobs_of_a_minority_of_namespaces_are_never_enough() -> None:
    assert not suspected((60, 0), (0, 100))
    assert not suspected((1, 0), (1, 0), (1, 0), (0, 50), (0, 50), (0, 50))
    assert suspected((1, 0), (1, 0), (0, 50), (0, 50), (0, 50))
    assert suspected((0, 1), (0, 1), (0, 1))


def test_three_jobs_of_one_tenant_that_never_trained_do_not_switch_it_on() -> None:
    hearing = AgentConnectivityMonitor()
    add(hearing, "team", 60, HEARD)
    add(hearing, "mute", 3, LOST, agents=20, trained=False)
    assert not hearing.operator_isolated
    for job in range(3):
        hearing.has_trained(f"mute-True-{job}", "mute")
    assert not hearing.operator_isolated, "nor do they once they have trained"


def test_a_job_is_heard_as_long_as_one_of_its_agents_is() -> None:
    hearing = AgentConnectivityMonitor()
    add(hearing, "team", 3, LOST, agents=5)
    assert hearing.operator_isolated
    hearing.update("team-True-0", "a-4-0", HEARD)
    assert not hearing.operator_isolated


def test_it_heals_as_jobs_are_not_watched_any_more_or_gone() -> None:
    for gone in (True, False):
        hearing = AgentConnectivityMonitor()
        add(hearing, "team", 3, LOST)
        if gone:
            hearing.forget("team-True-0")
        hearing.update("team-True-0", "a-0-0", GONE)
        assert not hearing.operator_isolated
        assert ("team-True-0" in hearing._jobs) is not gone, "nothing is remembered of a job that is gone"


def test_who_was_never_heard_or_knows_another_key_is_not_lost() -> None:
    hearing = AgentConnectivityMonitor()
    for job in range(10):
        for uid, view in [
            (f"new-{job}", AgentView(wanted_at=1.0)),
            (f"key-{job}", replace(LOST, refusal=ConnectionRefusal.OTHER_KEY)),
        ]:
            hearing.has_trained(uid, "team")
            hearing.update(uid, "a-0-0", view)
    assert not hearing.operator_isolated
