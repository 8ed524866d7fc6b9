"""Rules of `concertina_agent.core.machine` about ends: how workers end, and when a round has succeeded."""

import pytest

import concertina_protocol as p
from builders.agent import Driver, exits, prepare
from concertina_agent.core import events as e
from concertina_agent.core.machine import LINGER_SECONDS
from concertina_protocol import worker_channel as w

DONE = w.Done("complete", 9)


@pytest.mark.parametrize(
    ("bundled", "said", "code", "reason", "message", "permanent"),
    [
        (True, (), 0, "WorkerExitedEarly", "Rank 0 exited with code 0 before the run was complete.", False),
        (True, (), 3, "WorkerFailed", "Rank 0 exited with code 3: boom", False),
        (True, (DONE,), 3, "WorkerFailed", "Rank 0 exited with code 3: boom", False),
        (True, (), -9, "WorkerSignaled", "Rank 0 was killed by SIGKILL.", False),
        (
            True,
            (w.Fault("InvalidInput", "a.bin is bad"),),
            78,
            "InvalidInput",
            "Rank 0 (exit code 78): a.bin is bad",
            True,
        ),
        (True, (w.Fault("Damaged", "a.bin is bad"),), 78, "Damaged", "Rank 0 (exit code 78): a.bin is bad", True),
        (
            True,
            (w.Fault("InvalidInput", "a.bin is bad"),),
            1,
            "InvalidInput",
            "Rank 0 (exit code 1): a.bin is bad",
            False,
        ),
        (True, (w.Fault("RestoreFailed", "gone"),), 1, "RestoreFailed", "Rank 0 (exit code 1): gone", False),
        (False, (), 78, "WorkerFailed", "Rank 0 exited with code 78: boom", False),
        (False, (), -15, "WorkerSignaled", "Rank 0 was killed by SIGTERM.", False),
    ],
)
def test_failures(bundled, said, code, reason, message, permanent):
    driver = Driver(bundled=bundled)
    driver.begun("a")
    for one in said:
        driver.say(one)
    driver.ended(code, "first", "boom", "")
    (failure,) = driver.report.failures
    assert (failure.reason, failure.message, failure.permanent) == (reason, message, permanent)
    assert (failure.last_lines, failure.rank, failure.exit_code) == (("first", "boom"), 0, code)
    assert driver.report.state == "failed"


@pytest.mark.parametrize("prefix", ["", "[rank0]: "])
def test_a_failure_is_named_by_its_exception_whatever_is_printed_after_it(prefix):
    traceback = ("Traceback (most recent call last):", '  File "a.py", line 1', "    f()", "my.Error: boom", "and why")
    driver = Driver(bundled=False)
    driver.begun("a")
    driver.ended(1, "step 5", *(prefix + line for line in traceback), "Warning: destroy_process_group was not called")
    (failure,) = driver.report.failures
    assert failure.message == "Rank 0 exited with code 1: my.Error: boom"


@pytest.mark.parametrize("bundled", [True, False])
def test_succeeded_is_when_all_are(bundled):
    driver = Driver(bundled=bundled)
    driver.begun("a", "b")
    driver.say(DONE if bundled else w.Hello(0, 1))
    driver.ended(0)
    assert driver.report.state == "running"
    assert driver.report.members["a"].state == "succeeded"
    driver.member_says("b", "succeeded")
    assert driver.report.state == "succeeded"


def through_quietly(driver: Driver, rank: int = 0) -> None:
    driver.say(w.Hello(rank, 1), rank=rank)
    driver.ended(0, rank=rank)


def coordinator_beats(state: str) -> e.CoordinatorMessage:
    return e.CoordinatorMessage(1, "claim-1", p.MemberState("a", "a-1", 1, "claim-1", state))


def test_a_coordinator_leaves_with_0_once_the_whole_round_has_succeeded_and_was_told():
    driver = Driver("a", bundled=False)
    driver.begun("a", "b")
    through_quietly(driver)
    driver.member_says("b", "running")
    assert driver.core.beat().state == "running"
    driver.member_says("b", "succeeded")
    assert driver.core.beat().state == "succeeded"
    driver.now += LINGER_SECONDS - 0.1
    driver.member_says("b", "succeeded")
    assert exits(driver.tell(e.Tick())) == []
    driver.now += 0.2
    assert exits(driver.tell(e.Tick())) == [0]


def test_a_member_leaves_with_0_only_after_the_coordinator_has_spoken_for_the_whole_round():
    driver = Driver("b", bundled=False)
    driver.begun("a", "b")
    through_quietly(driver, rank=1)
    driver.now += 10 * LINGER_SECONDS
    assert exits(driver.tell(coordinator_beats("running"))) == []
    driver.tell(coordinator_beats("succeeded"))
    driver.now += LINGER_SECONDS
    assert exits(driver.tell(e.Tick())) == [0]


def test_a_round_that_follows_a_success_keeps_the_agent():
    driver = Driver("b", bundled=False)
    driver.begun("a", "b")
    through_quietly(driver, rank=1)
    driver.tell(coordinator_beats("succeeded"))
    driver.ask(prepare(2))
    driver.now += 2 * LINGER_SECONDS
    assert exits(driver.tell(e.Tick())) == []


def test_starting_then_running():
    driver = Driver()
    driver.begun("a")
    assert (driver.report.state, driver.report.members["a"].state) == ("running", "starting")
    driver.say(w.Hello(0, 1))
    assert driver.report.members["a"].state == "running"
