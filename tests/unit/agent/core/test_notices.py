"""Reaction of an agent to a SIGTERM, and of a coordinator to the notices of its members."""

import pytest

import concertina_protocol as p
from builders.agent import Driver, assignment, exits, kinds, snapshot
from concertina_agent.core import events as e
from concertina_agent.core.machine import EXIT_NOTICED
from concertina_protocol import worker_channel as w


def drain(durable: bool = False, grace: float = 30) -> p.Drain:
    return p.Drain("u", 1, "claim-1", "", durable, grace)


def leaving(*names: str) -> e.CoordinatorMessage:
    """Return the coordinator's heartbeat with leaving members."""
    return e.CoordinatorMessage(1, "claim-1", p.MemberState("a", "a-1", 1, "claim-1", "draining", leaving=names))


def test_a_notice_without_workers_is_followed_at_once():
    assert exits(Driver().tell(e.TerminationNotice(30))) == [EXIT_NOTICED]


def test_a_noticed_member_says_so_and_stays_until_its_snapshot_is_on_its_peer():
    driver = Driver("b")
    driver.begun("a", "b")
    assert exits(driver.tell(e.TerminationNotice(30))) == []
    assert driver.core.member_state().state == "draining"
    driver.say(w.Committed(snapshot(1, 6, 2), 1, "slot-0"), rank=1)
    driver.tell(e.CoordinatorMessage(1, "claim-1", drain()))
    driver.say(w.Done("drained", 6), rank=1)
    driver.ended(0, rank=1)
    assert exits(driver.tell(e.PeerCopied(snapshot(1, 6, 2), 1))) == [], "the coordinator has not said who else leaves"
    assert exits(driver.tell(leaving("b"))) == [EXIT_NOTICED]


@pytest.mark.parametrize("whole", [False, True])
def test_a_noticed_member_that_is_through_says_success_only_where_its_coordinator_did(whole):
    """Exit code 0 tells the operator that the job is complete, although its last checkpoint may still be on its way."""
    driver = Driver("b")
    driver.begun("a", "b")
    driver.say(w.Done("complete", 6), rank=1)
    driver.ended(0, rank=1)
    if whole:
        driver.tell(e.CoordinatorMessage(1, "claim-1", p.MemberState("a", "a-1", 1, "claim-1", "succeeded")))
    driver.tell(e.TerminationNotice(30))
    driver.now += 30
    assert exits(driver.tell(e.Tick())) == [0 if whole else EXIT_NOTICED]


@pytest.mark.parametrize(
    ("others", "durable", "leaves"),
    [
        (("b",), False, True),
        (("b", "d"), False, True),
        (("a", "b"), False, False),
        (("b", "c"), False, False),
        (("b", "c"), True, False),
        (("a", "b", "c", "d"), False, True),
        (("a", "b", "c", "d"), True, False),
    ],
)
def test_who_leaves_beside_another_stays_for_what_only_they_hold(others, durable, leaves):
    """The members a, b, c and d copy their snapshots to the next one. If all leave, the operator decides."""
    driver = Driver("b")
    driver.begun("a", "b", "c", "d")
    driver.tell(e.TerminationNotice(30))
    driver.tell(e.CoordinatorMessage(1, "claim-1", drain(durable)))
    driver.say(w.Done("drained", 6), rank=1)
    driver.ended(0, rank=1)
    assert exits(driver.tell(leaving(*others))) == ([EXIT_NOTICED] if leaves else [])
    driver.now += 30
    assert exits(driver.tell(e.Tick())) == [EXIT_NOTICED]


def test_a_coordinator_that_has_gone_says_no_more():
    driver = Driver("b")
    driver.begun("a", "b", "c", "d")
    driver.tell(e.TerminationNotice(30))
    driver.tell(e.CoordinatorMessage(1, "claim-1", drain()))
    driver.say(w.Done("drained", 6), rank=1)
    assert exits(driver.ended(0, rank=1)) == []
    assert exits(driver.tell(e.CoordinatorGone(1, "claim-1"))) == [EXIT_NOTICED]


def test_the_grace_ends_a_notice_that_nobody_answers():
    driver = Driver("b")
    driver.begun("a", "b")
    driver.tell(e.TerminationNotice(30))
    driver.now += 30
    assert exits(driver.tell(e.Tick())) == [EXIT_NOTICED]


def test_an_agent_that_has_succeeded_leaves_with_0():
    driver = Driver()
    driver.begun("a")
    driver.say(w.Done("complete", 6))
    driver.ended(0)
    assert exits(driver.tell(e.TerminationNotice(30))) == [0]


# --- the coordinator, by itself


def asked(effects: list[e.Effect]) -> list[bool]:
    """Return, for each request to the members to drain, whether it is durable."""
    return [x.message.durable for x in effects if isinstance(x, e.Broadcast) and isinstance(x.message, p.Drain)]


STORAGE = p.Storage("Ready")


def test_a_coordinator_drains_the_round_when_a_member_has_to_go():
    driver = Driver()
    driver.begun("a", "b", "c")
    effects = driver.member_says("b", "draining", notice=10.0)
    assert asked(effects) == [False]
    assert e.SendToWorker(0, w.DrainRequest(False)) in effects
    (message,) = (x.message for x in effects if isinstance(x, e.Broadcast))
    assert message.grace_seconds == 10
    assert asked(driver.member_says("c", "draining", notice=10.0)) == [], "one drain"
    assert driver.report.members["b"].notice == 10.0


def test_a_coordinator_that_has_to_go_itself_drains_too():
    driver = Driver()
    driver.begun("a", "b")
    assert asked(driver.tell(e.TerminationNotice(30))) == [False]
    assert driver.report.state == "draining"


@pytest.mark.parametrize(("storage", "durable"), [(STORAGE, [True]), (None, [])])
def test_where_all_have_to_go_what_they_hold_is_saved(storage, durable):
    driver = Driver(storage=storage)
    driver.begun("a", "b")
    assert asked(driver.tell(e.TerminationNotice(30))) == [False]
    assert asked(driver.member_says("b", "draining", notice=5.0)) == durable


def test_workers_that_had_stopped_before_all_had_to_go_are_shipped_by_their_agents():
    driver = Driver(storage=STORAGE)
    driver.begun("a", "b")
    driver.tell(e.TerminationNotice(30))
    last = snapshot(1, 6, 2)
    driver.say(w.Committed(last, 0, "slot-0"))
    driver.say(w.Done("drained", 6))
    assert "Ship" not in kinds(driver.ended(0))
    driver.tell(e.PeerCopied(last, 0))
    effects = driver.member_says("b", "drained", step=6, notice=30.0)
    assert e.Ship(last, 0, "slot-0", is_slot=True) in effects
    assert driver.report.state == "draining", "until it is in storage"
    driver.tell(e.PartShipped(p.Part(last, 0)))
    effects = driver.member_says("b", "drained", step=6, notice=30.0, durable_parts=(p.Part(last, 1),))
    assert e.Publish(last, False) in effects
    done = driver.tell(e.PublishDone(last, p.Durable("u", 1, 6, "s3://x")))
    assert exits(done) == [EXIT_NOTICED]
    assert driver.report.state == "drained"


def test_a_worker_that_was_asked_in_time_ships_its_snapshot_once():
    driver = Driver("b", storage=STORAGE)
    driver.begun("a", "b")
    driver.tell(e.CoordinatorMessage(1, "claim-1", drain(durable=True)))
    last = snapshot(1, 6, 2)
    driver.say(w.Committed(last, 1, "slot-0"), rank=1)
    assert kinds(driver.say(w.WantDurable(last, 1, "link", False), rank=1)).count("Ship") == 1
    driver.say(w.Done("drained", 6), rank=1)
    assert "Ship" not in kinds(driver.ended(0, rank=1))


def test_a_replica_that_is_prepared_stays_for_what_it_holds():
    held = (p.HeldSnapshot(snapshot(0, 6, 2), (0, 1)),)
    driver = Driver("b")
    driver.prepared(1, held)
    assert exits(driver.tell(e.TerminationNotice(20))) == []
    driver.now += 20
    assert exits(driver.tell(e.Tick())) == [EXIT_NOTICED]


def test_a_replica_leaves_once_it_is_released():
    held = (p.HeldSnapshot(snapshot(0, 6, 2), (0, 1)),)
    driver = Driver("b")
    driver.prepared(1, held)
    assert exits(driver.tell(e.TerminationNotice(20))) == []
    assert exits(driver.ask(assignment("a", "c"))) == [], "the members may still fetch what it holds"
    for round, claim in ((0, "claim-0"), (1, "claim-other"), (2, "claim-2")):
        effects = driver.ask(p.Release("u", round, claim))
        assert isinstance(effects[0].message, p.Refused)
        assert exits(effects) == []
    effects = driver.ask(p.Release("u", 1, "claim-1"))
    assert isinstance(effects[0].message, p.Accepted)
    assert exits(effects) == [EXIT_NOTICED]


def test_a_member_is_not_released():
    driver = Driver("b")
    driver.begun("a", "b")
    (reply,) = (x for x in driver.ask(p.Release("u", 1, "claim-1")) if isinstance(x, e.Reply))
    assert isinstance(reply.message, p.Refused)
    assert "is a member of round 1" in reply.message.reason
    assert driver.core.round is not None


def test_without_storage_who_holds_the_state_stays_for_successors():
    driver = Driver("b")
    driver.begun("a", "b")
    driver.tell(e.TerminationNotice(20))
    driver.tell(e.CoordinatorMessage(1, "claim-1", drain(durable=True, grace=19)))
    driver.say(w.Committed(snapshot(1, 6, 2), 1, "slot-0"), rank=1)
    driver.say(w.Done("drained", 6), rank=1)
    assert "Ship" not in kinds(driver.ended(0, rank=1)), "there is no storage"
    assert exits(driver.tell(e.PeerCopied(snapshot(1, 6, 2), 1))) == []
    assert driver.core.member_state().state == "drained"
    driver.now += 20
    assert exits(driver.tell(e.Tick())) == [EXIT_NOTICED]


# --- commands of one's own


def signals(effects: list[e.Effect]) -> list[int]:
    return [effect.signal for effect in effects if isinstance(effect, e.SignalWorkers)]


def test_a_command_is_stopped_by_the_coordinator_with_all_others():
    driver = Driver("b", bundled=False)
    driver.begun("a", "b")
    assert signals(driver.tell(e.TerminationNotice(30))) == []
    assert signals(driver.tell(e.CoordinatorMessage(1, "claim-1", drain()))) == []
    assert driver.core.member_state().next_call == 0, "nobody asks where to stop"
    assert signals(driver.tell(e.CoordinatorMessage(1, "claim-1", p.StopAt(0)))) == [15]
    assert exits(driver.ended(1, rank=1)) == [EXIT_NOTICED]


@pytest.mark.parametrize("code", [0, 1, 143, -15])
def test_however_a_command_ends_after_a_notice_it_is_no_failure(code):
    driver = Driver(bundled=False)
    driver.begun("a")
    assert signals(driver.tell(e.TerminationNotice(30))) == [15]
    driver.ended(code)
    assert driver.report.failures == ()
    assert driver.report.state == "drained"


def test_a_command_whose_coordinator_is_silent_is_stopped_all_the_same_and_killed_when_the_grace_is_over():
    driver = Driver("b", bundled=False)
    driver.begun("a", "b")
    driver.tell(e.CoordinatorJoined(1, "claim-1"))
    driver.tell(e.TerminationNotice(2.0))
    driver.now += 0.5
    assert signals(driver.tell(e.Tick())) == [15]
    driver.now += 1.5
    assert signals(driver.tell(e.Tick())) == [9]


def test_a_command_that_lost_its_peer_to_a_drain_has_not_failed():
    driver = Driver(bundled=False)
    driver.begun("a", "b")
    driver.tell(e.TerminationNotice(30))
    failure = p.Failure("b", "WorkerFailed", "Rank 1 exited with code 1.", ("Connection reset by peer",), 1, 1)
    driver.member_says("b", "failed", failure=failure)
    driver.ended(143)
    assert driver.report.failures == ()
    assert driver.report.state == "drained"
