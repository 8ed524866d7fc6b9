"""Rules of `core.machine` between coordinator and members: which failure is the cause, and which member is lost."""

import math

import pytest

import concertina_protocol as p
from builders.agent import UID, Driver, join, kinds, snapshot
from concertina_agent.core import events as e
from concertina_protocol import worker_channel as w

LOST = "RuntimeError: [gloo] Connection closed by peer [127.0.0.1]:9"


def failed(name: str, reason: str, *lines: str, code: int = 1) -> dict:
    return {"failure": p.Failure(name, reason, "", lines, exit_code=code)}


def test_the_cause_is_the_first_that_does_not_look_like_a_lost_peer():
    driver = Driver()
    driver.begun("a", "b", "c")
    driver.ended(1, LOST)
    assert (driver.report.failures, driver.report.state) == ((), "running"), "who is to blame is not known yet"
    driver.member_says("c", "failed", **failed("c", "WorkerFailed", "ValueError"))
    driver.member_says("b", "failed", **failed("b", "WorkerFailed", LOST))
    assert [(f.replica, f.secondary) for f in driver.report.failures] == [("a", True), ("c", False), ("b", True)]


def test_where_all_lost_a_peer_the_first_is_the_cause_after_a_moment():
    driver = Driver()
    driver.begun("a", "b")
    driver.ended(1, LOST)
    driver.now += 0.1
    assert driver.tell(e.Tick()) == []
    driver.now += 0.2
    assert kinds(driver.tell(e.Tick())) == ["ReportChanged"]
    assert [(f.replica, f.secondary) for f in driver.report.failures] == [("a", False)]
    assert driver.report.state == "failed"


def test_so_it_is_told_where_a_member_that_says_nothing_new_is_heard_before_the_next_tick():
    driver = Driver()
    driver.begun("a", "b")
    driver.member_says("b", "failed", **failed("b", "WorkerFailed", LOST))
    driver.now += 0.3
    told = driver.member_says("b", "failed", **failed("b", "WorkerFailed", LOST))
    assert kinds(told) == ["ReportChanged"]
    assert [(f.replica, f.secondary) for f in driver.report.failures] == [("b", False)]


def test_a_killed_worker_is_the_cause_of_a_survivors_words_that_nobody_knows():
    driver = Driver()
    driver.begun("a", "b")
    driver.ended(1, "a sentence of a library to come")
    driver.member_says("b", "failed", **failed("b", "WorkerSignaled", code=-9))
    assert [(f.replica, f.secondary) for f in driver.report.failures] == [("a", True), ("b", False)]


def test_two_that_were_killed_are_both_causes():
    driver = Driver()
    driver.begun("a", "b", "c")
    driver.member_says("b", "failed", **failed("b", "WorkerSignaled", code=-9))
    driver.tell(e.MemberGone(1, "claim-1", "c"))
    driver.ended(-6, rank=0)
    assert [(f.reason, f.secondary) for f in driver.report.failures] == [
        ("WorkerSignaled", False),
        ("MemberLost", False),
        ("WorkerSignaled", True),
    ]


def test_join_is_for_members_of_the_round_alone():
    driver = Driver()
    driver.begun("a", "b")
    assert driver.answer(join("b")) == p.Accepted(1, "claim-1")
    assert "is not a member" in driver.answer(join("b", instance="b-0")).reason
    assert "is not a member" in driver.answer(join("c")).reason
    assert "does not coordinate" in driver.answer(join("b", round=2)).reason


def told_at_join(effects: list[e.Effect]) -> list[p.Message]:
    return [effect.message for effect in effects if isinstance(effect, e.Broadcast) and effect.only == "b"]


@pytest.mark.parametrize("missed", ["nothing", "drain", "stop", "publication"])
def test_a_member_that_joins_again_is_a_member_as_before_and_hears_what_it_missed(missed):
    driver = Driver(storage=p.Storage("Ready"), bundled=missed != "stop")
    driver.begun("a", "b")
    assert told_at_join(driver.ask(join("b"))) == []
    driver.member_says("b", "running", step=3)
    expected: list[p.Message] = []
    if missed in ("drain", "stop"):
        expected = [p.Drain(UID, 1, "claim-1", "grow", False, 30.0)]
        driver.ask(expected[0])
    if missed == "stop":
        driver.core.round.stopping.stop_at(7)
        expected.append(p.StopAt(7))
    if missed == "publication":
        durable = p.Durable(UID, 1, 6, "uri")
        driver.tell(e.PublishDone(snapshot(1, 6, 2), durable))
        expected = [p.DurableMoved(durable)]

    assert told_at_join(driver.ask(join("b"))) == expected
    assert not driver.report.failures
    assert driver.core.round.coordinator.members["b"].step == 3
    assert driver.wait(2.9) == []
    assert [failure.replica for failure in (driver.wait(0.2), driver.report.failures)[1]] == ["b"], (
        "as any that is silent"
    )


def silent(driver):
    return {name for name, state in driver.report.members.items() if state.silent}


def test_a_member_is_silent_half_way_to_being_lost_until_its_next_line():
    driver = Driver()
    driver.begun("a", "b", "c")
    for name in ("b", "c"):
        driver.ask(join(name))
    driver.wait(1.4)
    driver.member_says("c", "running")
    assert silent(driver) == set()
    assert kinds(driver.wait(0.15)) == ["ReportChanged"]
    assert silent(driver) == {"b"}
    assert driver.wait(0.2) == [], "once is enough"
    assert kinds(driver.member_says("b", "running", silent=True)) == ["ReportChanged"]
    assert silent(driver) == set(), "whatever it says of itself"
    driver.wait(1.55)
    assert silent(driver) == {"b", "c"}
    assert not driver.report.failures
    driver.wait(1.5)
    assert [(failure.replica, failure.reason) for failure in driver.report.failures] == [
        ("c", "MemberLost"),
        ("b", "MemberLost"),
    ]


@pytest.mark.parametrize("state", ["succeeded", "drained"])
def test_a_member_whose_part_is_over_may_be_silent(state):
    driver = Driver()
    driver.begun("a", "b")
    driver.ask(join("b"))
    driver.member_says("b", state)
    driver.wait(2.0)
    assert silent(driver) == set()


def test_a_pause_of_the_coordinator_makes_no_member_silent():
    driver = Driver()
    driver.begun("a", "b")
    driver.ask(join("b"))
    driver.now += 1.6
    driver.tell(e.Tick())
    assert silent(driver) == set()
    driver.wait(1.55)
    assert silent(driver) == {"b"}


def test_the_next_tick_is_due_when_a_member_or_the_coordinator_falls_silent():
    driver = Driver()
    assert driver.core.next_deadline(driver.now) == math.inf
    driver.begun("a", "b")
    driver.ask(join("b"))
    begun = driver.now
    assert driver.core.next_deadline(begun) == begun + 1.5
    assert driver.core.next_deadline(begun + 1.5) == begun + 3.0
    assert driver.core.next_deadline(begun + 3.0) == math.inf
    driver.now += 0.5
    driver.member_says("b", "running")
    assert driver.core.next_deadline(driver.now) == begun + 2.0

    member = Driver("b")
    member.begun("a", "b")
    member.tell(e.CoordinatorJoined(1, "claim-1"))
    assert member.core.next_deadline(member.now) == member.now + 3.0
    assert member.core.next_deadline(member.now + 3.0) == math.inf


def test_a_member_that_is_lost_does_not_join_again():
    driver = Driver()
    driver.begun("a", "b")
    driver.ask(join("b"))
    driver.tell(e.MemberGone(1, "claim-1", "b"))
    assert "b is already lost to round 1" in driver.answer(join("b")).reason


def test_a_member_that_joins_its_coordinator_again_goes_on():
    driver = Driver("b")
    driver.begun("a", "b")
    driver.tell(e.CoordinatorJoined(1, "claim-1"))
    driver.wait(2.0)
    driver.tell(e.CoordinatorJoined(1, "claim-1"))
    driver.wait(2.9)
    assert not driver.report.failures


def test_silence_is_a_loss_for_the_coordinator():
    driver = Driver()
    driver.begun("a", "b", "c")
    driver.ask(join("b"))
    driver.wait(2.9)
    driver.member_says("b", "running")
    assert driver.wait(2.9) == []
    assert kinds(driver.wait(0.2)) == ["ReportChanged"]
    assert [(f.replica, f.reason, f.message) for f in driver.report.failures] == [
        ("b", "MemberLost", "b has not answered for 3 s.")
    ]
    driver.wait(10)
    assert driver.report.failures[1].message == "c did not join within 10 s."
    driver.member_says("b", "running")
    assert driver.report.members["b"].state == "failed", "a lost member stays lost"


def test_silence_is_a_loss_for_members():
    driver = Driver("b")
    driver.begun("a", "b")
    driver.tell(e.CoordinatorJoined(1, "claim-1"))
    driver.wait(2.9)
    driver.tell(e.CoordinatorMessage(1, "claim-1", p.MemberState("a", "a-1", 1, "claim-1", "running")))
    assert driver.wait(2.9) == []
    driver.wait(0.2)
    assert [(f.replica, f.reason) for f in driver.report.failures] == [("b", "CoordinatorLost")]
    assert driver.core.member_state().state == "failed"


def test_a_coordinator_that_stood_still_itself_does_not_accuse_its_members():
    driver = Driver()
    driver.begun("a", "b", "c")
    driver.ask(join("b"))
    driver.wait(2.0)
    driver.now += 60
    assert driver.tell(e.Tick()) == [], "nor who did not join meanwhile"
    driver.wait(0.9)
    assert not driver.report.failures
    assert kinds(driver.wait(0.1)) == ["ReportChanged"]
    assert [failure.message for failure in driver.report.failures] == ["b has not answered for 3 s."], (
        "by its own ticks"
    )


def test_a_member_that_stood_still_itself_does_not_accuse_its_coordinator():
    driver = Driver("b")
    driver.begun("a", "b")
    driver.tell(e.CoordinatorJoined(1, "claim-1"))
    driver.wait(2.0)
    driver.now += 60
    driver.tell(e.Tick())
    driver.wait(0.9)
    assert driver.core.member_state().state != "failed"
    driver.wait(0.1)
    assert [failure.reason for failure in driver.report.failures] == ["CoordinatorLost"]


@pytest.mark.parametrize("end", ["complete", "drained"])
def test_who_is_through_does_not_miss_the_coordinator(end):
    driver = Driver("b")
    driver.begun("a", "b")
    driver.say(w.Done(end, 3), rank=1)
    driver.ended(0, rank=1)
    driver.tell(e.CoordinatorGone(1, "claim-1"))
    assert not driver.report.failures


ROLLBACK = p.Rollback(9, tuple((10**10 + i, 10**10 + i + 1) for i in range(32)))


@pytest.mark.parametrize(
    ("members", "text"),
    [(512, "x" * 90), (24, "x" * 2000), (12, "\u8bad" * 2000), (1000, "\0" * 2000)],
    ids=["many", "long lines", "another alphabet", "the worst"],
)
def test_however_many_fail_with_whatever_output_the_report_fits_on_a_line(members, text):
    names = [f"m{number:04d}" for number in range(members)]
    driver = Driver(names[0])
    driver.begun(*names)
    for name in names[1:]:
        known = {"step": 7, "exit_code": 1, "rank": 3, "at": 1000.0, "rollback": ROLLBACK if members > 512 else None}
        reason = p.FailureReason.WORKER_FAILED if name != names[-2] else p.FailureReason.INVALID_INPUT
        failure = p.Failure(name, reason, text, (text,) * 50, permanent=name == names[-2], **known)
        driver.member_says(name, "failed", failure=failure)
    driver.wait(0.3)
    report = p.decode(p.encode(driver.report))
    assert [failure.replica for failure in report.failures] == names[1:]
    assert {name for name, member in report.members.items() if member.failure} == set(names[1:])
    told = {failure.replica: failure for failure in report.failures}
    assert [name for name in told if told[name].last_lines] == [names[-2]]
    assert told[names[-2]].last_lines == (text[:400],) * 20
    assert told[names[-2]].message == text[:1000], "which the operator keeps"
    assert all(failure.message and failure.rollback == known["rollback"] for failure in report.failures)


def test_what_no_new_round_can_mend_keeps_its_output_beside_that_of_the_cause():
    driver = Driver()
    driver.begun("a", "b", "c")
    driver.member_says("b", "failed", **failed("b", "WorkerSignaled", "the cause", code=-9))
    driver.member_says("c", "failed", failure=p.Failure("c", "InvalidInput", "", ("for good",), permanent=True))
    driver.ended(1, LOST)
    assert [(f.replica, f.last_lines) for f in driver.report.failures] == [
        ("b", ("the cause",)),
        ("c", ("for good",)),
        ("a", ()),
    ]
    assert [f.provoked for f in driver.report.failures] == [False, False, True], "by its output, which is not told"


def test_a_member_whose_worker_says_more_than_a_line_holds_can_still_tell_its_coordinator():
    driver = Driver("b")
    driver.begun("a", "b")
    driver.say(w.Fault(p.FailureReason.INVALID_INPUT, "x" * p.MAX_LINE), rank=1)
    driver.ended(78, rank=1)
    received = p.decode(p.encode(driver.core.member_state())).failure
    assert (received.reason, received.permanent) == ("InvalidInput", True)
    assert received.message.startswith("Rank 1 (exit code 78): xxx")
