"""The rules of `concertina_agent.rounds`, one by one, on the class itself."""

import pytest

from builders.agent import NAMES, UID, Driver, assignment, exits, join, kinds, member, prepare, snapshot
from concertina_agent import events as e
from concertina_agent import protocol as p
from concertina_agent import worker_channel as w
from concertina_agent.rounds import LINGER_SECONDS

# --- prepare and assign ---------------------------------------------------------------------------------------------


def test_prepare_persists_first_and_answers_last():
    driver = Driver()
    message = prepare(3)
    assert kinds(driver.ask(message))[:4] == ["PersistSeen", "KillWorkers", "BindStore", "ReachOut"]
    assert driver.report.state == "prepared"
    assert driver.tell(e.Reached(message, NAMES)) == []
    assert driver.tell(e.StoreBound(3, "claim-3", "here:9")) == []
    assert driver.tell(e.WorkersGone(2)) == []
    (reply,) = driver.tell(e.WorkersGone(3))
    assert reply == e.Reply(1, p.Prepared("a", "a-1", 3, "claim-3", 1, "here:9", NAMES))


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
    assert driver.ask(again) == [e.ReachOut(again)]
    (reply,) = driver.tell(e.Reached(again, ("a",)))
    assert reply.message.reachable == ("a",)


def test_a_higher_prepare_refuses_who_still_waits_for_the_lower():
    driver = Driver()
    driver.ask(prepare(3))
    refused = driver.ask(prepare(4))[0]
    assert (refused.request, type(refused.message), refused.message.round) == (1, p.Refused, 4)


def test_who_has_not_heard_of_the_last_round_looks_at_storage_when_it_is_prepared():
    look = e.LookAtStorage()
    driver = Driver(storage=p.Storage("Unknown"))
    assert look not in driver.ask(prepare(2)), "the first look is still to come"
    driver.tell(e.StorageSeen(p.Storage("Ready")))
    assert driver.report.storage.round == 2
    assert look not in driver.ask(prepare(3))
    assert look in driver.ask(prepare(4)), "round 3 may have been without it"
    driver.tell(e.StorageSeen(p.Storage("Error", None, "no answer")))
    assert driver.report.storage.round == 2, "trouble is no look"
    assert look in driver.ask(prepare(5))
    driver.tell(e.StorageSeen(p.Storage("Ready")))
    driver.prepared(6)
    driver.ask(assignment("a", round=6))
    assert driver.report.storage.round == 6, "its lead tells it from now on"
    assert look not in driver.ask(prepare(7))


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (prepare(4), "not the highest"),
        (prepare(5, "another"), "not the highest"),
        (assignment("a", round=4), "not the highest"),
        (assignment("a", round=5), "not prepared by this instance"),
        (assignment("a", round=6), "not the highest"),
        (p.Drain(UID, 5, "claim-5", "", False, 1), "does not lead"),
        (p.Drain(UID, 4, "claim-4", "", False, 1), "not the highest"),
        (p.Join(UID, 5, "claim-5", "b", "b-1"), "does not lead"),
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
    assert "in another way" in driver.answer(assignment("a", "b")).reason


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


# --- snapshots ------------------------------------------------------------------------------------------------------


def test_snapshots_beyond_the_base_are_void_and_older_rounds_go_when_this_one_is_safe():
    held = (p.Held(snapshot(1, 8), (0,)), p.Held(snapshot(1, 7), (0, 2)))
    driver = Driver(held=held)
    driver.prepared(2, held)
    effects = driver.ask(assignment("a", "b", "c", round=2, restore=p.Restore("Memory", 7, snapshot(1, 7))))
    assert e.DropSnapshots((snapshot(1, 8),)) in effects
    assert driver.core.held == held[1:]

    driver.say(w.Committed(snapshot(2, 8), 0, "slot-0"), round=2)
    driver.tell(e.CopyHeld(snapshot(2, 8), 2))
    assert driver.core.held == (p.Held(snapshot(2, 8), (0, 2)), held[1])
    progress = p.Progress(8, 0, 0, 0, 0, 0, "training", 0)
    assert e.DropSnapshots((snapshot(1, 7),)) not in driver.say(progress, round=2)
    safe = p.Progress(9, 0, 0, 0, 0, 0, "training", 0, snapshot_step=8)
    assert e.DropSnapshots((snapshot(1, 7),)) in driver.say(safe, round=2)


def test_a_member_learns_from_the_leads_beats_that_older_rounds_may_go():
    driver = Driver("b", held=(p.Held(snapshot(1, 7), (1,)),))
    driver.begun("a", "b", round=2, restore=p.Restore("Memory", 7, snapshot(1, 7)))
    beat = p.MemberState("a", "a-1", 2, "claim-2", "running", snapshot_step=9)
    assert e.DropSnapshots((snapshot(1, 7),)) in driver.tell(e.LeadSaid(2, "claim-2", beat))


UNDONE = p.Undone(1, 50)
BEYOND = p.Durable(UID, 1, 55, "s3://b/u/round-1/step-55")


def test_a_lead_undoes_a_rollback_in_storage_when_its_worker_says_so_and_does_not_count_on_it():
    driver = Driver(storage=p.Storage("Ready", BEYOND))
    driver.begun("a", "b")
    assert driver.core.latest == BEYOND
    assert e.Undo(UNDONE) in driver.say(w.Fault("LossSpike", "The loss is 9.", p.Rollback(50)))
    assert driver.core.latest is None
    assert driver.report.storage.latest == BEYOND, "as it was seen"
    member = Driver("b", storage=p.Storage("Ready", BEYOND))
    member.begun("a", "b")
    assert "Undo" not in kinds(member.say(w.Fault("LossSpike", "", p.Rollback(50)), rank=1))


@pytest.mark.parametrize(("name", "storage", "undoes"), [("a", True, True), ("b", True, False), ("a", False, False)])
def test_the_lead_of_a_round_after_a_rollback_undoes_it_in_storage_before_its_workers_start(name, storage, undoes):
    driver = Driver(name, storage=p.Storage("Ready", BEYOND) if storage else None)
    effects = driver.begun("a", "b", round=2, restore=p.Restore("Memory", 50, snapshot(1, 50), undone=UNDONE))
    assert (e.Undo(UNDONE) in effects) == undoes
    if undoes:
        assert kinds(effects).index("Undo") < kinds(effects).index("StartRound")
    assert driver.core.latest is None


def test_all_that_was_undone_is_told_to_storage_the_last_at_the_end():
    driver, last = Driver(storage=p.Storage("Ready", BEYOND)), p.Undone(3, 70)
    effects = driver.begun("a", round=4, restore=p.Restore("Fresh", undone=last, undone_before=(UNDONE,)))
    assert [effect for effect in effects if isinstance(effect, e.Undo)] == [e.Undo(UNDONE), e.Undo(last)]
    assert driver.core.latest is None, "of the earlier one"


def test_a_durable_drain_is_not_content_with_a_checkpoint_that_was_undone():
    driver = Driver(storage=p.Storage("Ready", BEYOND))
    driver.begun("a", round=2, restore=p.Restore("Memory", 50, snapshot(1, 50, 1), undone=UNDONE))
    driver.say(w.Hello(0, 1), round=2)
    driver.ask(p.Drain(UID, 2, "claim-2", "suspend", durable=True, grace_seconds=20))
    driver.say(w.Done("drained", 52), round=2)
    driver.ended(0, round=2)
    assert driver.report.state == "draining"
    driver.tell(e.StorageSeen(p.Storage("Ready", p.Durable(UID, 2, 52, "s3://b/u/round-2/step-52"))))
    assert driver.report.state == "drained"


def test_only_slots_that_a_worker_leaves_alone_count_as_held():
    driver = Driver()
    driver.begun("a", "b")
    for step in range(1, 6):
        driver.say(w.Committed(snapshot(1, step), 0, "slot"))
        driver.tell(e.CopyHeld(snapshot(1, step), 1))
    assert [(h.id.step, h.shards) for h in driver.core.held] == [(5, (0, 1)), (4, (0, 1)), (3, (0,))]
    disk = (p.Held(snapshot(1, 5), (0,)),)
    assert driver.prepared(2, disk).snapshots == disk


def test_copied_is_said_at_once_without_a_peer_and_once_with():
    alone, pair = Driver(), Driver()
    alone.begun("a")
    pair.begun("a", "b")
    commit = w.Committed(snapshot(1, 4), 0, "slot-0")
    assert e.ToWorker(0, w.CopiedUpTo(4)) in alone.say(commit)
    assert e.ToWorker(0, w.CopiedUpTo(4)) not in pair.say(commit)
    assert pair.tell(e.PeerCopied(snapshot(1, 4), 0)) == [e.ToWorker(0, w.CopiedUpTo(4))]
    assert pair.tell(e.PeerCopied(snapshot(1, 4), 0)) == []


# --- how workers end ------------------------------------------------------------------------------------------------

DONE = w.Done("complete", 9)


@pytest.mark.parametrize(
    ("bundled", "said", "code", "reason", "message", "permanent"),
    [
        (True, (), 0, "WorkerExitedEarly", "Rank 0 exited with code 0 before the run was complete.", False),
        (True, (), 3, "WorkerFailed", "Rank 0 exited with code 3: boom", False),
        (True, (DONE,), 3, "WorkerFailed", "Rank 0 exited with code 3: boom", False),
        (True, (), -9, "WorkerSignaled", "Rank 0 was killed by SIGKILL.", False),
        (True, (w.Fault("BadInput", "a.bin is bad"),), 78, "BadInput", "Rank 0 (exit code 78): a.bin is bad", True),
        (True, (w.Fault("BadInput", "a.bin is bad"),), 1, "BadInput", "Rank 0 (exit code 1): a.bin is bad", False),
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
    assert (failure.last_lines, failure.rank, failure.exit_code) == (("first", "boom", ""), 0, code)
    assert driver.report.state == "failed"


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


def lead_beats(state: str) -> e.LeadSaid:
    return e.LeadSaid(1, "claim-1", p.MemberState("a", "a-1", 1, "claim-1", state))


def test_a_lead_leaves_with_0_once_the_whole_round_has_succeeded_and_was_told():
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


def test_a_member_leaves_with_0_only_after_the_lead_has_spoken_for_the_whole_round():
    driver = Driver("b", bundled=False)
    driver.begun("a", "b")
    through_quietly(driver, rank=1)
    driver.now += 10 * LINGER_SECONDS
    assert exits(driver.tell(lead_beats("running"))) == []
    driver.tell(lead_beats("succeeded"))
    driver.now += LINGER_SECONDS
    assert exits(driver.tell(e.Tick())) == [0]


def test_a_round_that_follows_a_success_keeps_the_agent():
    driver = Driver("b", bundled=False)
    driver.begun("a", "b")
    through_quietly(driver, rank=1)
    driver.tell(lead_beats("succeeded"))
    driver.ask(prepare(2))
    driver.now += 2 * LINGER_SECONDS
    assert exits(driver.tell(e.Tick())) == []


def test_starting_then_running():
    driver = Driver()
    driver.begun("a")
    assert (driver.report.state, driver.report.members["a"].state) == ("running", "starting")
    driver.say(w.Hello(0, 1))
    assert driver.report.members["a"].state == "running"


# --- lead and members -----------------------------------------------------------------------------------------------

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
    assert "no member" in driver.answer(join("b", instance="b-0")).reason
    assert "no member" in driver.answer(join("c")).reason
    assert "does not lead" in driver.answer(join("b", round=2)).reason


def test_silence_is_a_loss_for_the_lead():
    driver = Driver()
    driver.begun("a", "b", "c")
    driver.ask(join("b"))
    driver.now += 2.9
    driver.member_says("b", "running")
    driver.now += 2.9
    assert driver.tell(e.Tick()) == []
    driver.now += 0.2
    assert kinds(driver.tell(e.Tick())) == ["ReportChanged"]
    assert [(f.replica, f.reason, f.message) for f in driver.report.failures] == [
        ("b", "MemberLost", "b has been silent for 3 s.")
    ]
    driver.now += 10
    driver.tell(e.Tick())
    assert driver.report.failures[1].message == "c did not join within 10 s."
    driver.member_says("b", "running")
    assert driver.report.members["b"].state == "failed", "a lost member stays lost"


def test_silence_is_a_loss_for_members():
    driver = Driver("b")
    driver.begun("a", "b")
    driver.tell(e.LeadJoined(1, "claim-1"))
    driver.now += 2.9
    driver.tell(e.LeadSaid(1, "claim-1", p.MemberState("a", "a-1", 1, "claim-1", "running")))
    driver.now += 2.9
    assert driver.tell(e.Tick()) == []
    driver.now += 0.2
    driver.tell(e.Tick())
    assert [(f.replica, f.reason) for f in driver.report.failures] == [("b", "LeadLost")]
    assert driver.core.state().state == "failed"


@pytest.mark.parametrize("end", ["complete", "drained"])
def test_who_is_through_does_not_miss_the_lead(end):
    driver = Driver("b")
    driver.begun("a", "b")
    driver.say(w.Done(end, 3), rank=1)
    driver.ended(0, rank=1)
    driver.tell(e.LeadGone(1, "claim-1"))
    assert not driver.report.failures
