"""The rules of `concertina_agent.core.machine` about preparing and assigning a round, on the class itself."""

import pytest

import concertina_protocol as p
from builders.agent import NAMES, UID, Driver, assignment, kinds, member, prepare
from concertina_agent.core import events as e
from concertina_protocol import worker_channel as w


def test_prepare_persists_first_and_answers_last():
    driver = Driver()
    message = prepare(3)
    assert kinds(driver.ask(message))[:4] == ["PersistSeen", "KillWorkers", "BindStore", "PingPeers"]
    assert driver.report.state == "prepared"
    assert driver.tell(e.Reached(message, NAMES)) == []
    assert driver.tell(e.StoreBound(3, "claim-3", "here:9")) == []
    assert driver.tell(e.WorkersGone(2)) == []
    (reply,) = driver.tell(e.WorkersGone(3))
    assert reply == e.Reply(1, p.Prepared("a", "a-1", 3, "claim-3", 1, "here:9", NAMES, ready=False))


def test_the_answer_says_whether_workers_can_start_at_once():
    driver = Driver()
    assert not driver.prepared(3).ready, "it still imports"
    driver.tell(e.Warm())
    assert driver.prepared(4).ready
    driver.tell(e.Learning(under_way=True))
    assert not driver.prepared(5).ready, "it imports what another replica has told it"


def test_agents_of_the_version_before_count_as_ready():
    line = p.encode(p.Prepared("a", "a-1", 3, "claim-3", 1, "here:9", NAMES, ready=False))
    assert p.decode(line).ready is False
    assert p.decode(line.replace(b',"ready":false', b"")).ready is True


def test_why_workers_are_replaced_is_in_the_answer_once_each():
    driver, message = Driver(), prepare(3)
    driver.ask(message)
    driver.tell(e.Reached(message, NAMES))
    driver.tell(e.StoreBound(3, "claim-3", "here:9"))
    late, stopped = p.Replaced.LATE, p.Replaced.STOPPED
    (reply,) = driver.tell(e.WorkersGone(3, replaced=(late, stopped, late)))
    assert reply.message.replaced == (late, stopped)


def test_the_same_prepare_again_waits_with_the_first_and_then_has_the_same_answer():
    driver, message = Driver(), prepare(3)
    driver.ask(message)
    assert driver.ask(message) == []
    driver.tell(e.WorkersGone(3))
    driver.tell(e.StoreBound(3, "claim-3", "here:9"))
    first, second = driver.tell(e.Reached(message, NAMES))
    assert (first.request, second.request, first.message) == (1, 2, second.message)
    assert driver.ask(message) == [e.Reply(3, first.message)]
    driver.ask(assignment("a", round=3))
    assert driver.ask(message) == [e.Reply(5, first.message)], "late duplicates must not kill the round"
    assert driver.report.state == "running"


def test_other_candidates_under_the_same_claim_are_reached_out_to_and_nothing_is_killed():
    driver = Driver()
    driver.prepared(3)
    again = prepare(3, names=("a", "b"))
    assert driver.ask(again) == [e.PingPeers(again, again.candidates)]
    (reply,) = driver.tell(e.Reached(again, ("a",)))
    assert reply.message.reachable == ("a",)


def test_a_higher_prepare_refuses_who_still_waits_for_the_lower():
    driver = Driver()
    driver.ask(prepare(3))
    refused = driver.ask(prepare(4))[0]
    assert (refused.request, type(refused.message), refused.message.round) == (1, p.Refused, 4)


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (prepare(4), "not the highest"),
        (prepare(5, "another"), "not the highest"),
        (assignment("a", round=4), "not the highest"),
        (assignment("a", round=5), "has not prepared round"),
        (assignment("a", round=6), "not the highest"),
        (p.Drain(UID, 5, "claim-5", "", False, 1), "does not coordinate"),
        (p.Drain(UID, 4, "claim-4", "", False, 1), "not the highest"),
        (p.Join(UID, 5, "claim-5", "b", "b-1"), "does not coordinate"),
        (p.Prepare("other", 6, "c", ()), "belongs to job u"),
        (p.Ping("other"), "belongs to job u"),
    ],
)
def test_refusals_after_a_restart_that_had_seen_round_5(message, reason):
    answer = Driver(seen=(5, "claim-5")).answer(message)
    assert isinstance(answer, p.Refused)
    assert reason in answer.reason
    assert (answer.round, answer.claim) == (5, "claim-5")


def test_a_restarted_agent_may_be_prepared_again_for_the_round_it_had_seen():
    driver = Driver(seen=(5, "claim-5"))
    assert "KillWorkers" in kinds(driver.ask(prepare(5)))


def test_assign_starts_once_and_only_this_instance():
    driver = Driver("b")
    driver.prepared()
    stranger = p.Assign(
        UID, 1, "claim-1", (member("a", 0), p.Member("b", "b-0", "b:1", 1, 1)), "a:9", p.Restore("Fresh")
    )
    assert "not a member" in driver.answer(stranger).reason
    message = assignment("a", "b", "c")
    effects = driver.ask(message)
    assert kinds(effects) == ["Reply", "StartRound", "CopyFrom", "ReportChanged"]
    assert effects[1:3] == [e.StartRound(message, 1), e.CopyFrom(1, message.members[0], (0,))]
    assert driver.ask(message) == [e.Reply(4, p.Accepted(1, "claim-1"))]
    assert "with other contents" in driver.answer(assignment("a", "b")).reason


def test_assign_before_the_old_workers_are_gone_is_refused():
    driver = Driver()
    driver.ask(prepare())
    driver.tell(e.StoreBound(1, "claim-1", "here:9"))
    assert "not prepared" in driver.answer(assignment("a")).reason


def test_what_an_older_rounds_worker_does_is_ignored():
    driver = Driver()
    driver.begun("a")
    driver.begun("a", round=2)
    assert driver.ended(1, round=1) == []
    assert driver.say(w.Beat(0, 3, "training"), round=1) == []
    assert not driver.report.failures
