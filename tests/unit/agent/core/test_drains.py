"""End of a round by a drain or by completion: copies, checkpoints, and members that have gone."""

import dataclasses

import pytest

import concertina_protocol as p
from builders.agent import UID, Driver, assignment, join, kinds, snapshot
from concertina_agent.core import events as e
from concertina_agent.core.round.coordinator import Coordinator
from concertina_protocol import worker_channel as w


def drain(durable: bool = False, round: int = 1) -> p.Drain:
    return p.Drain(UID, round, f"claim-{round}", "scale", durable, 5.0)


def test_a_bundled_drain_goes_to_rank_0_and_to_members_who_join_later():
    driver = Driver()
    driver.begun("a", "b")
    effects = driver.ask(drain())
    assert effects[:3] == [
        e.Reply(3, p.Accepted(1, "claim-1")),
        e.Broadcast(drain()),
        e.SendToWorker(0, w.DrainRequest(False)),
    ]
    assert driver.report.state == "draining"
    assert kinds(driver.ask(drain())) == ["Reply"]
    assert e.Broadcast(drain(), only="b") in driver.ask(join("b"))
    assert e.SendToWorker(0, w.DrainRequest(True)) in driver.ask(drain(durable=True)), "durable is asked for later"


def test_a_requested_checkpoint_goes_to_rank_0_of_the_coordinator():
    driver = Driver()
    driver.begun("a", "b")
    effects = driver.ask(p.Save(UID, 1, "claim-1", "r1"))
    assert effects == [e.Reply(effects[0].request, p.Accepted(1, "claim-1")), e.SendToWorker(0, w.SaveNow())]
    assert kinds(driver.ask(p.Save(UID, 1, "claim-0", "r1"))) == ["Reply"]
    member = Driver("b")
    member.begun("a", "b")
    assert "does not coordinate round 1" in member.ask(p.Save(UID, 1, "claim-1", "r1"))[0].message.reason


@pytest.mark.parametrize(
    ("wish", "why"),
    [
        ((0, 5, 2, "../x"), "hexadecimal"),
        ((0, 5, 0, "ab"), "1 to 100 steps"),
        ((0, 5, 101, "ab"), "1 to 100 steps"),
        ((1, 5, 2, "ab"), "rank 1 is not a worker of a now"),
        ((0, 5, 2, "ab"), "rank 0 can't be traced: it is a trainer of an earlier version, or a script"),
    ],
)
def test_a_trace_that_can_not_be_is_refused(wish, why):
    driver = Driver()
    driver.begun("a", "b")
    (reply,) = driver.ask(p.Trace(UID, *wish))
    assert why in reply.message.reason


def test_a_trace_goes_to_the_worker_that_is_asked_for_on_any_member():
    member = Driver("b")
    member.begun("a", "b")
    member.say(w.Hello(1, 7, traces=True), rank=1)
    member.say(w.Hello(1, 7), rank=1)  # The agent of a user's own command reports this.
    reply, sent = member.ask(p.Trace(UID, 1, 7, 2, "ab"))
    assert isinstance(reply.message, p.Accepted)
    assert sent == e.SendToWorker(1, w.TraceSteps(7, 2, "ab"))


def test_drained_waits_for_the_peers_copy_or_the_end_of_the_grace():
    for late in (False, True):
        driver = Driver("b")
        driver.begun("a", "b")
        driver.say(w.Committed(snapshot(1, 6, 2), 1, "slot-0"), rank=1)
        driver.tell(e.CoordinatorMessage(1, "claim-1", drain()))
        driver.say(w.Done("drained", 6), rank=1)
        driver.ended(0, rank=1)
        assert driver.core.member_state().state == "draining"
        if late:
            driver.now += 2.5
            driver.tell(e.CoordinatorMessage(1, "claim-1", p.MemberState("a", "a-1", 1, "claim-1", "draining")))
            driver.now += 2.5
            driver.tell(e.Tick())
        else:
            driver.tell(e.PeerCopied(snapshot(1, 6, 2), 1))
        assert driver.core.member_state().state == "drained"


def test_a_command_gets_sigterm_then_sigkill_and_may_end_as_it_likes():
    driver = Driver(bundled=False)
    driver.begun("a")
    assert e.SignalWorkers(15) in driver.ask(drain())
    driver.now += 5
    assert e.SignalWorkers(9) in driver.tell(e.Tick())
    assert driver.tell(e.Tick()) == []
    driver.ended(-9)
    assert (driver.report.state, driver.report.failures) == ("drained", ())


def test_a_script_whose_state_only_memory_has_is_waited_for_at_its_first_step_to_save_it():
    for durable, restore in ((True, memory(6)), (False, memory(6)), (True, p.Restore("Fresh"))):
        driver = Driver(bundled=False)
        driver.begun("a", restore=restore)
        signalled = e.SignalWorkers(15) in driver.ask(drain(durable=durable))
        assert signalled != (durable and restore.step > 0), "nothing has been trained that could be lost"
        if not signalled:
            assert driver.say(w.Register(0))[0] == e.SendToWorker(0, w.StopAtCall(1))


def test_a_script_that_lives_on_after_sigterm_is_not_kept_waiting():
    driver = Driver(bundled=False)
    driver.begun("a")
    driver.ask(drain())
    assert driver.say(w.Register(0))[0] == e.SendToWorker(0, w.Registered())


def memory(step: int) -> p.Restore:
    return p.Restore("Memory", step, snapshot(0, step, 1))


def through(driver: Driver, outcome: str, step: int, **want) -> list[e.Effect]:
    id = snapshot(1, step, 2)
    driver.say(w.Committed(id, 0, "slot-0"))
    driver.tell(e.PeerCopied(id, 0))
    effects = driver.say(w.WantDurable(id, 0, "shipping", **want))
    driver.say(w.Done(outcome, step))
    driver.ended(0)
    return effects


@pytest.mark.parametrize(
    ("outcome", "complete", "state"), [("drained", False, "drained"), ("complete", True, "succeeded")]
)
def test_the_end_is_said_when_the_checkpoint_is_published(outcome, complete, state):
    driver = Driver(storage=p.Storage("Ready"))
    driver.begun("a", "b")
    if not complete:
        driver.ask(drain(durable=True))
    id = snapshot(1, 6, 2)
    assert e.Ship(id, 0, "shipping") in through(driver, outcome, 6, complete=complete)
    driver.member_says("b", state, step=6, durable_parts=(p.Part(id, 1, complete),))
    assert driver.report.state in ("running", "draining")
    effects = driver.tell(e.PartShipped(p.Part(id, 0)))
    assert e.Publish(id, complete) in effects
    assert driver.report.state in ("running", "draining")
    durable = p.Durable(UID, 1, 6, "uri", complete)
    effects = driver.tell(e.PublishDone(id, durable))
    assert effects[0] == e.Broadcast(p.DurableMoved(durable))
    assert (driver.report.state, driver.report.storage) == (state, p.Storage("Ready", durable, round=1))
    assert driver.core.member_state().durable_parts == ()
    assert not any(isinstance(effect, e.Publish) for effect in driver.member_says("b", state, step=6))


def test_a_refused_publication_is_trouble_with_storage_and_not_the_end():
    latest = p.Durable(UID, 9, 3, "uri")
    driver = Driver(storage=p.Storage("Ready", latest))
    driver.begun("a", "b")
    through(driver, "complete", 6, complete=True)
    driver.member_says("b", "succeeded", step=6)
    driver.tell(e.PublishDone(snapshot(1, 6, 2), None, "round 9 has written here"))
    assert driver.report.storage == p.Storage("Error", latest, "round 9 has written here")
    assert driver.report.state == "running"


def test_a_durable_drain_ships_a_last_commit_that_is_told_after_the_exit():
    driver = Driver(storage=p.Storage("Ready"))
    driver.begun("a")
    driver.ask(drain(durable=True))
    driver.say(w.Done("drained", 6))
    driver.ended(0)
    last = snapshot(1, 6, 1)
    assert e.Ship(last, 0, "slot-0", is_slot=True) in driver.say(w.Committed(last, 0, "slot-0"))


def gone_before_its_part_was_shipped(outcome: str, state: str, complete: bool) -> Driver:
    """Return a coordinator whose own part of the last checkpoint is in storage.

    Its member ended well, then fell silent.
    """
    driver = Driver(storage=p.Storage("Ready"))
    driver.begun("a", "b")
    driver.ask(join("b"))
    if not complete:
        driver.ask(drain(durable=True))
    through(driver, outcome, 6, complete=complete)
    driver.tell(e.PartShipped(p.Part(snapshot(1, 6, 2), 0)))
    driver.member_says("b", state, step=6)
    assert driver.report.state in ("running", "draining")
    driver.wait(p.SILENCE_SECONDS)
    return driver


def test_a_drain_does_not_wait_for_a_part_that_went_with_its_member():
    driver = gone_before_its_part_was_shipped("drained", "drained", complete=False)
    assert (driver.report.state, driver.report.failures) == ("drained", ())


def test_a_run_whose_last_checkpoint_lost_a_part_is_not_through():
    driver = gone_before_its_part_was_shipped("complete", "succeeded", complete=True)
    (failure,) = driver.report.failures
    assert (failure.replica, failure.reason) == ("b", "MemberLost")
    assert "before its part of the last checkpoint was in storage" in failure.message
    assert driver.report.state == "running"


def test_a_member_that_comes_back_in_time_is_waited_for():
    driver = Driver(storage=p.Storage("Ready"))
    driver.begun("a", "b")
    driver.ask(join("b"))
    through(driver, "complete", 6, complete=True)
    driver.member_says("b", "succeeded", step=6)
    driver.tell(e.MemberGone(1, "claim-1", "b", "closed its connection"))
    driver.wait(p.SILENCE_SECONDS / 2)
    driver.ask(join("b"))
    driver.wait(p.SILENCE_SECONDS / 2)
    assert driver.report.failures == ()


@pytest.mark.parametrize(("told", "lacking"), [((), ["b"]), ((1,), ["b"]), ((1, 2), [])])
def test_who_has_gone_has_shipped_when_the_parts_of_all_its_workers_are_there(told, lacking):
    """In seed 1013061 of the simulation, the coordinator had heard of one of two workers' parts, and waited forever."""
    message = assignment("a", "b")
    a, b = message.members
    coordinator = Coordinator(dataclasses.replace(message, members=(a, dataclasses.replace(b, workers=2))), 0.0)
    assert coordinator.join(join("b"), 0.0) is None
    parts = tuple(p.Part(snapshot(1, 6, 3), shard) for shard in told)
    earlier = p.Part(snapshot(1, 4, 3), 2)
    state = p.MemberState("b", "b-1", 1, "claim-1", p.State.SUCCEEDED, step=6, durable_parts=(earlier, *parts))
    coordinator.on_member_state(state, 0.0)
    coordinator.overdue(p.SILENCE_SECONDS)
    assert coordinator.gone_unshipped(6) == lacking
