"""Hangs and stopped workers: which ranks are behind, and when that is reported."""

import concertina_protocol as p
from builders.agent import UID, Driver, assignment, kinds
from concertina_agent.core import events as e
from concertina_protocol import worker_channel as w


def ticked(
    driver: Driver, seconds: float, *heartbeats: p.Heartbeat, stopped: tuple[tuple[int, int], ...] = ()
) -> list[e.Effect]:
    driver.now += seconds
    return driver.tell(e.Tick(heartbeats, stopped))


def hanging() -> Driver:
    """Return the coordinator of a and b, both of which have made no progress for 10 s."""
    driver = Driver()
    driver.prepared(1)
    message = assignment("a", "b")
    driver.ask(p.Assign(**{**vars(message), "limits": p.Limits(hang_seconds=10.0)}))
    driver.say(progress(5))
    driver.ask(p.Join(UID, 1, "claim-1", "b", "b-1"))
    return driver


def progress(step: int) -> p.Progress:
    return p.Progress(step, 100, 1.0, 1.0, 0.1, step, "training", 0.0)


def test_the_coordinator_has_stacks_collected_everywhere_and_then_names_who_is_behind():
    driver = hanging()
    waiting, loading = p.Heartbeat(0, 5, "computing", 9.0), p.Heartbeat(1, 5, "loading data", 9.0)
    driver.member_says("b", "running", step=5, heartbeats=(loading,))
    assert driver.report.members["b"].heartbeats == (), "the operator has no use for them"
    assert kinds(ticked(driver, 0.0, waiting)) == []
    assert not driver.core.beat().hung
    assert kinds(ticked(driver, 2.0, p.Heartbeat(0, 5, "computing", 11.0))) == ["CollectStacks"]
    assert driver.core.beat().hung, "members hear of it"
    assert kinds(ticked(driver, 0.25, p.Heartbeat(0, 5, "computing", 11.25))) == [], "once"
    driver.tell(e.StacksCollected(1, {0: ("here",)}))
    driver.member_says("b", "running", step=5, heartbeats=(p.Heartbeat(1, 5, "loading data", 11.0, stack=("there",)),))
    assert kinds(ticked(driver, 0.25, p.Heartbeat(0, 5, "computing", 11.5))) == ["ReportChanged"]
    hang = driver.report.hang
    assert (hang.replica, hang.rank, hang.stack) == ("b", 1, ("there",))
    assert driver.report.failures == ()
    assert driver.report.state == "running"


def test_a_member_collects_stacks_when_the_coordinator_says_so_and_forgets_them_when_it_is_over():
    driver = Driver("b")
    driver.begun("a", "b")
    beat = p.MemberState("a", "a-1", 1, "claim-1", "running")
    driver.say(w.Hello(1, 9), rank=1)
    driver.say(w.Beat(1, 5, "training"), rank=1)
    hung = p.MemberState(**{**vars(beat), "hung": True})
    assert kinds(driver.tell(e.CoordinatorMessage(1, "claim-1", hung))) == ["CollectStacks"]
    assert kinds(driver.tell(e.CoordinatorMessage(1, "claim-1", hung))) == []
    ticked(driver, 1.0)
    assert driver.core.member_state().heartbeats == (p.Heartbeat(1, 5, "training", 1.0),)
    driver.tell(e.StacksCollected(1, {1: ("there",)}))
    assert driver.core.member_state().heartbeats[0].stack == ("there",)
    driver.tell(e.CoordinatorMessage(1, "claim-1", beat))
    ticked(driver, 1.0)
    assert driver.core.member_state().heartbeats == (p.Heartbeat(1, 5, "training", 2.0),)
    assert kinds(driver.tell(e.CoordinatorMessage(1, "claim-1", hung))) == ["CollectStacks"]


def test_a_stopped_worker_is_a_failure_at_the_second_look():
    driver = Driver()
    driver.begun("a")
    ticked(driver, 0.25, stopped=((0, 50),))
    assert driver.report.state == "running"
    ticked(driver, 0.25, stopped=((0, 50),))
    (failure,) = driver.report.failures
    assert (failure.reason, failure.rank, failure.secondary) == ("WorkerStopped", 0, False)


def test_a_round_that_has_failed_does_not_hang():
    driver = hanging()
    driver.member_says("b", "failed", failure=p.Failure("b", "WorkerSignaled", "dead", exit_code=-9))
    ticked(driver, 60.0, p.Heartbeat(0, 5, "computing", 70.0))
    assert driver.report.hang is None
    assert not driver.core.beat().hung


def test_who_has_left_after_a_drain_does_not_hang():
    driver = hanging()
    driver.member_says("b", "drained", heartbeats=(p.Heartbeat(1, 5, "computing", 9.0),))
    driver.say(w.Done("drained", 5))
    driver.ended(0)
    ticked(driver, 60.0)
    assert not driver.core.beat().hung
