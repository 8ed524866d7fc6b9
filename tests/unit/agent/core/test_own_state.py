"""The rules of `core.machine` about state: snapshots that count, and the coordinator's work in storage."""

import pytest

import concertina_protocol as p
from builders.agent import UID, Driver, assignment, kinds, prepare, snapshot
from concertina_agent.core import events as e
from concertina_protocol import worker_channel as w


def drops(effects: list[e.Effect]) -> list[e.DropSnapshots]:
    return [effect for effect in effects if isinstance(effect, e.DropSnapshots)]


@pytest.mark.parametrize("first", ["heartbeat", "snapshot"])
def test_what_a_round_goes_on_from_stays_until_it_is_safe_and_the_one_before_until_all_have_restored(first: str):
    held = tuple(p.HeldSnapshot(snapshot(1, step), (0, 2)) for step in (8, 7, 6, 5))
    driver = Driver(held=held)
    driver.prepared(2, held)
    effects = driver.ask(assignment("a", "b", "c", round=2, restore=p.Restore("Memory", 7, snapshot(1, 7))))
    assert e.DropSnapshots((snapshot(1, 8), snapshot(1, 5))) in effects
    assert driver.core.held == held[1:3]

    for step, phase in ((7, "restoring"), (7, "computing")):
        assert drops(driver.tell(e.Tick(heartbeats=(p.Heartbeat(0, step, phase, 0.0),)))) == []
    if first == "heartbeat":
        effects = driver.tell(e.Tick(heartbeats=(p.Heartbeat(0, 8, "checkpointing", 0.0),)))
    else:
        effects = driver.say(w.Committed(snapshot(2, 8), 0, "slot-0"), round=2)
    assert drops(effects) == [e.DropSnapshots((snapshot(1, 6),))]
    assert drops(driver.say(w.Committed(snapshot(2, 8), 0, "slot-0"), round=2)) == [], "once"
    driver.tell(e.CopyHeld(snapshot(2, 8), 2))
    assert driver.core.held == (p.HeldSnapshot(snapshot(2, 8), (0, 2)), held[1])
    assert drops(driver.say(p.Progress(8, 0, 0, 0, 0, 0, "training", 0), round=2)) == []
    safe = p.Progress(9, 0, 0, 0, 0, 0, "training", 0, snapshot_step=8)
    assert e.DropSnapshots((snapshot(1, 7),)) in driver.say(safe, round=2)


@pytest.mark.parametrize("late", [w.Committed, w.WantDurable])
def test_a_snapshot_of_an_old_round_is_no_snapshot_of_this_one(late):
    """A process may outlive its round, and say what it has finished of it after it has entered the next one."""
    held = (p.HeldSnapshot(snapshot(1, 7), (0, 2)),)
    driver = Driver(held=held)
    driver.prepared(2, held)
    driver.ask(assignment("a", "b", "c", round=2, restore=p.Restore("Memory", 7, snapshot(1, 7))))
    assert driver.say(late(snapshot(1, 8), 0, "slot-1"), round=2) == []
    assert driver.core.held == held
    assert driver.core.round.saved == {}


def test_a_member_learns_from_the_coordinators_beats_that_older_rounds_may_go():
    driver = Driver("b", held=(p.HeldSnapshot(snapshot(1, 7), (1,)),))
    driver.begun("a", "b", round=2, restore=p.Restore("Memory", 7, snapshot(1, 7)))
    beat = p.MemberState("a", "a-1", 2, "claim-2", "running", snapshot_step=9)
    assert e.DropSnapshots((snapshot(1, 7),)) in driver.tell(e.CoordinatorMessage(2, "claim-2", beat))


def test_only_slots_that_a_worker_leaves_alone_count_as_held():
    driver = Driver()
    driver.begun("a", "b")
    for step in range(1, 6):
        driver.say(w.Committed(snapshot(1, step), 0, "slot"))
        driver.tell(e.CopyHeld(snapshot(1, step), 1))
    assert [(h.id.step, h.shards) for h in driver.core.held] == [(5, (0, 1)), (4, (0, 1)), (3, (0,))]
    disk = (p.HeldSnapshot(snapshot(1, 5), (0,)),)
    assert driver.prepared(2, disk).snapshots == disk


def test_copied_is_said_at_once_without_a_peer_and_once_with():
    alone, pair = Driver(), Driver()
    alone.begun("a")
    pair.begun("a", "b")
    commit = w.Committed(snapshot(1, 4), 0, "slot-0")
    assert e.SendToWorker(0, w.CopiedUpTo(4)) in alone.say(commit)
    assert e.SendToWorker(0, w.CopiedUpTo(4)) not in pair.say(commit)
    assert pair.tell(e.PeerCopied(snapshot(1, 4), 0)) == [e.SendToWorker(0, w.CopiedUpTo(4))]
    assert pair.tell(e.PeerCopied(snapshot(1, 4), 0)) == []


# --- storage


def test_who_has_not_heard_of_the_last_round_looks_at_storage_when_it_is_prepared():
    look = e.ProbeStorage()
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
    assert driver.report.storage.round == 6, "its coordinator tells it from now on"
    assert look not in driver.ask(prepare(7))


def test_a_publication_that_outlasts_its_round_is_looked_for_in_storage():
    """LATEST may have moved, and nobody else has heard of it."""
    driver = Driver(storage=p.Storage("Ready"))
    driver.begun("a")
    driver.prepared(2)
    assert driver.tell(e.PublishDone(snapshot(1, 10, 1), None, "a later round has written here")) == []
    assert driver.tell(e.PublishDone(snapshot(1, 10, 1), p.Durable(UID, 1, 10, "uri"), "")) == [e.ProbeStorage()]


UNDONE = p.Undone(1, 50)
BEYOND = p.Durable(UID, 1, 55, "s3://b/u/round-1/step-55")


def test_a_coordinator_undoes_a_rollback_in_storage_when_its_worker_says_so_and_does_not_count_on_it():
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
def test_the_coordinator_of_a_round_after_a_rollback_undoes_it_in_storage_before_its_workers_start(
    name, storage, undoes
):
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


def test_a_publication_that_is_refused_since_it_was_undone_is_no_trouble_with_storage():
    driver = Driver(storage=p.Storage("Ready", BEYOND))
    driver.begun("a", "b")
    driver.say(w.Fault("LossSpike", "The loss is 9.", p.Rollback(50)))
    driver.tell(e.PublishDone(snapshot(1, 60), None, "step 60 of round 1 was undone"))
    assert driver.report.storage.state == "Ready"
    driver.tell(e.PublishDone(snapshot(1, 50), None, "LATEST belongs to another job"))
    assert driver.report.storage.state == "Error"


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
