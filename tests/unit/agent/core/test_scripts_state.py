"""A script that keeps its state (`trainingjob.State`): from when it says so, the agent treats its snapshots as it
treats the bundled trainer's."""

import pytest

import concertina_protocol as p
from builders.agent import Driver, assignment, join, snapshot
from concertina_agent.core import events as e
from concertina_protocol import worker_channel as w

PATH = "/v/slot-0"


def script(*names: str, **known) -> Driver:
    driver = Driver("a", bundled=False, **known)
    driver.begun(*names)
    for name in names[1:]:
        driver.ask(join(name))
    driver.say(w.Hello(0, 1))
    return driver


def test_its_neighbour_is_copied_from_then_on_once():
    driver = script("a", "b")
    before = assignment("a", "b").members[1]
    assert not driver.core.report().keeps_state
    effects = driver.say(w.KeepsState(0))
    assert e.CopyFrom(1, before, (1,)) in effects
    assert driver.core.report().keeps_state
    assert e.CopyFrom(1, before, (1,)) not in driver.say(w.KeepsState(0))


def test_alone_it_needs_no_copy_and_its_snapshots_count_as_safe():
    driver = script("a")
    assert not [effect for effect in driver.say(w.KeepsState(0)) if isinstance(effect, e.CopyFrom)]
    effects = driver.say(w.Committed(snapshot(1, 4, 1), 0, PATH))
    assert e.SendToWorker(0, w.CopiedUpTo(4)) in effects


@pytest.mark.parametrize("named", [True, False])
def test_storage_that_the_job_names_is_used_once_there_is_something_to_save(named):
    driver = script("a", storage_named=named)
    assert driver.core.report().storage is None
    used = e.UseStorage() in driver.say(w.KeepsState(0))
    storage = driver.core.report().storage
    assert (used, storage is not None) == (named, named)
    assert e.UseStorage() not in driver.say(w.KeepsState(0))


def saved(driver: Driver, step: int) -> None:
    driver.say(w.KeepsState(0))
    driver.tell(e.StorageSeen(p.Storage(p.StorageHealth.READY)))
    driver.say(w.Committed(snapshot(1, step, 1), 0, PATH))


def test_the_last_snapshot_of_a_script_that_is_through_is_shipped_and_waited_for():
    driver = script("a", storage_named=True)
    saved(driver, 7)
    effects = driver.tell(e.WorkerExited(1, 0, 0, (), "", False))
    assert e.Ship(snapshot(1, 7, 1), 0, PATH, is_slot=True) in effects
    assert driver.core.report().state == p.State.RUNNING
    driver.tell(e.PartShipped(p.Part(snapshot(1, 7, 1), 0)))
    assert driver.core.report().state == p.State.RUNNING, "the manifest is not written yet"
    driver.tell(e.PublishDone(snapshot(1, 7, 1), p.Durable("u", 1, 7, "uri"), ""))
    assert driver.core.report().state == p.State.SUCCEEDED


def test_a_last_commit_that_is_told_after_the_exit_is_shipped_too():
    driver = script("a", storage_named=True)
    saved(driver, 6)
    driver.ended(0)
    last = snapshot(1, 7, 1)
    assert e.Ship(last, 0, PATH, is_slot=True) in driver.say(w.Committed(last, 0, PATH))
    wanted = driver.say(w.WantDurable(last, 0, "/v/shipping-7"))
    assert not [x for x in wanted if isinstance(x, e.Ship)], "it would give up the file of that name"
    driver.tell(e.PartShipped(p.Part(last, 0)))
    driver.tell(e.PublishDone(last, p.Durable("u", 1, 7, "uri"), ""))
    assert driver.core.report().state == p.State.SUCCEEDED


@pytest.mark.parametrize("step", [7, 10])
def test_a_member_that_has_shipped_its_part_of_the_last_snapshot_may_go(step):
    """Of a script that lies before the last step that was told, where the last commit was none."""
    driver = script("a", "b", storage_named=True)
    last = snapshot(1, 7, 2)
    driver.say(w.KeepsState(0))
    driver.tell(e.StorageSeen(p.Storage(p.StorageHealth.READY)))
    driver.say(w.Committed(last, 0, PATH))
    driver.say(w.Beat(0, step, "training"))
    driver.ended(0)
    driver.member_says("b", "succeeded", durable_parts=(p.Part(last, 1),))
    driver.wait(p.SILENCE_SECONDS)
    assert driver.report.failures == ()
    assert e.Publish(last, False) in driver.tell(e.PartShipped(p.Part(last, 0)))
    driver.tell(e.PublishDone(last, p.Durable("u", 1, 7, "uri"), ""))
    assert driver.report.state == p.State.SUCCEEDED


def test_a_member_that_went_without_its_part_of_the_last_snapshot_is_lost():
    driver = script("a", "b", storage_named=True)
    driver.say(w.KeepsState(0))
    driver.tell(e.StorageSeen(p.Storage(p.StorageHealth.READY)))
    driver.say(w.Committed(snapshot(1, 7, 2), 0, PATH))
    driver.ended(0)
    driver.member_says("b", "succeeded", durable_parts=(p.Part(snapshot(1, 6, 2), 1),))
    driver.wait(p.SILENCE_SECONDS)
    assert [failure.replica for failure in driver.report.failures] == ["b"]


def test_without_storage_a_script_that_is_through_has_succeeded_at_once():
    driver = script("a")
    driver.say(w.KeepsState(0))
    driver.say(w.Committed(snapshot(1, 7, 1), 0, PATH))
    driver.tell(e.WorkerExited(1, 0, 0, (), "", False))
    assert driver.core.report().state == p.State.SUCCEEDED


def test_a_script_that_keeps_no_state_ships_nothing_and_leaves_at_once():
    driver = script("a", storage_named=True)
    assert not [x for x in driver.tell(e.WorkerExited(1, 0, 0, (), "", False)) if isinstance(x, e.Ship)]
    assert driver.core.report().state == p.State.SUCCEEDED


def test_a_checkpoint_that_a_person_wants_is_asked_of_rank_0():
    driver = script("a")
    save = p.Save("u", 1, "claim-1", "one")
    assert e.SendToWorker(0, w.SaveNow()) not in driver.ask(save)
    driver.say(w.KeepsState(0))
    assert e.SendToWorker(0, w.SaveNow()) in driver.ask(save)


def test_a_member_whose_neighbour_leaves_too_stays_for_what_it_holds():
    driver = script("a", "b", "c")
    driver.say(w.KeepsState(0))
    driver.say(w.Committed(snapshot(1, 7), 0, PATH))
    driver.tell(e.TerminationNotice(30.0))
    state = p.MemberState("b", "b-1", 1, "claim-1", state=p.State.DRAINING, notice=30.0)
    driver.tell(e.MemberMessage(state))
    driver.tell(e.WorkerExited(1, 0, 143, (), "", False))
    assert not driver.core.at_rest()
