"""Counted optimizer steps of a script that does not report: progress, and evidence that it is alive."""

import math

import concertina_protocol as p
from builders.agent import UID, Driver, assignment
from concertina_agent.core import events as e
from concertina_agent.core.round.watchdog import TIMES, UNSEEN, limit
from concertina_protocol import worker_channel as w
from concertina_protocol.heartbeat import WorkerPhase


def ticked(driver: Driver, *counts: e.StepCount) -> list[e.Effect]:
    driver.now += 0.25
    return driver.tell(e.Tick(counts=counts))


def count(steps: int, rank: int = 0, still: float = 0.1) -> e.StepCount:
    return e.StepCount(rank, steps, first_at=7.0, seconds=0.5, optimizer="AdamW", still=still)


def coordinator(hang_seconds: float | None = None) -> Driver:
    driver = Driver()
    driver.prepared(1)
    message = assignment("a", "b")
    driver.ask(p.Assign(**{**vars(message), "limits": p.Limits(hang_seconds=hang_seconds)}))
    driver.ask(p.Join(UID, 1, "claim-1", "b", "b-1"))
    return driver


def test_counted_steps_are_progress_that_names_the_optimizer():
    driver = coordinator()
    ticked(driver, count(3))
    progress = driver.report.progress
    assert (progress.step, progress.optimizer, progress.step_seconds, progress.first_step_at) == (3, "AdamW", 0.5, 7.0)
    assert (progress.steps, progress.restored_step, progress.tokens) == (None, None, None), "nothing else is known"
    assert math.isnan(progress.loss)
    assert ticked(driver, count(3)) == [], "no step, no news"
    ticked(driver, count(4))
    assert driver.report.progress.step == 4


def test_only_rank_0_says_how_far_the_round_is():
    driver = coordinator()
    ticked(driver, count(9, rank=1))
    assert driver.report.progress is None


def test_a_script_that_reports_its_steps_is_not_counted():
    driver = coordinator()
    ticked(driver, count(3))
    own = p.Progress(50, 100, 1.0, 1.0, 0.1, 50, "training", 1.0)
    driver.say(own)
    ticked(driver, count(5))
    assert driver.report.progress == own
    assert driver.core.member_state().heartbeats[0].phase == "training"


def test_a_script_that_keeps_its_state_is_not_counted():
    driver = coordinator()
    driver.say(w.KeepsState(0))
    ticked(driver, count(3))
    assert driver.report.progress is None


def test_a_round_whose_counts_stand_still_hangs():
    driver = coordinator(hang_seconds=10.0)
    ticked(driver, count(5, still=9.0))
    driver.member_says("b", "running", heartbeats=(p.Heartbeat(1, 4, WorkerPhase.BETWEEN_STEPS, 9.0, stack=("x",)),))
    assert not driver.core.beat().hung
    driver.now += 2.0
    effects = ticked(driver, count(5, still=11.25))
    assert [type(effect).__name__ for effect in effects] == ["CollectStacks"]
    driver.tell(e.StacksCollected(1, {0: ("here",)}))
    driver.now += 4.0
    ticked(driver, count(5, still=15.5))
    hang = driver.report.hang
    assert (hang.replica, hang.rank, hang.step, hang.phase) == ("b", 1, 4, WorkerPhase.BETWEEN_STEPS)


def test_what_a_script_does_between_two_steps_may_take_long():
    phase = WorkerPhase.BETWEEN_STEPS
    assert limit(p.Limits(), [0.1], phase) == UNSEEN, "it may evaluate"
    assert limit(p.Limits(), [1000.0], phase) == TIMES * 1000.0
    assert limit(p.Limits(hang_seconds=300.0), [0.1], phase) == 300.0
