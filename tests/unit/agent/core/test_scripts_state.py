"""Script that uses `trainingjob.State`: from its first report on, its snapshots are those of the bundled trainer."""

import dataclasses

import pytest

import concertina_protocol as p
from builders.agent import Driver, assignment, join, member, snapshot
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
    """The snapshot is of a step before the last reported one, because the last commit took no snapshot."""
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


def through(driver: Driver, *steps: int, rank: int = 0) -> list[e.Effect]:
    """Let the worker commit the snapshots of these steps and exit. Return the effects of the exit."""
    driver.say(w.KeepsState(rank), rank=rank)
    driver.tell(e.StorageSeen(p.Storage(p.StorageHealth.READY)))
    for step in steps:
        driver.say(w.Committed(snapshot(1, step, 2), rank, f"/v/slot-{step}"), rank=rank)
    return driver.ended(0, rank=rank)


def shipped(effects: list[e.Effect]) -> list[int]:
    return [effect.id.step for effect in effects if isinstance(effect, e.Ship)]


def test_where_ranks_have_different_last_snapshots_the_newest_that_all_have_is_the_last():
    driver = script("a", "b", storage_named=True)
    whole = snapshot(1, 8, 2)
    assert shipped(through(driver, 8, 10)) == [10]
    driver.member_says("b", "succeeded", saved=(6, 8), durable_parts=(p.Part(whole, 1),))
    assert shipped(driver.tell(e.Tick())) == [], "b may tell of another commit"
    effects = [effect for _ in range(13) for effect in beats(driver, "b", saved=(6, 8), parts=(p.Part(whole, 1),))]
    assert [effect for effect in effects if isinstance(effect, e.Ship)] == [e.Ship(whole, 0, "/v/slot-8", is_slot=True)]
    assert driver.core.beat().ends_at == 8
    driver.tell(e.PartShipped(p.Part(snapshot(1, 10, 2), 0)))
    assert e.Publish(whole, False) in driver.tell(e.PartShipped(p.Part(whole, 0)))
    assert driver.report.state == p.State.RUNNING
    driver.tell(e.PublishDone(whole, p.Durable("u", 1, 8, "uri"), ""))
    assert driver.report.state == p.State.SUCCEEDED
    assert driver.core.uploads.all_shipped, "nothing keeps its pod"


def beats(driver: Driver, name: str, saved: tuple[int, ...], parts: tuple[p.Part, ...] = ()) -> list[e.Effect]:
    """Let a member that has finished send heartbeats for 0.25 s, and return the effects."""
    driver.member_says(name, "succeeded", saved=saved, durable_parts=parts)
    return driver.wait(0.25)


def test_a_checkpoint_that_made_room_for_a_later_one_is_shipped_again_if_it_is_the_last():
    driver = script("a", "b", storage_named=True)
    driver.say(w.KeepsState(0))
    driver.tell(e.StorageSeen(p.Storage(p.StorageHealth.READY)))
    driver.say(w.WantDurable(snapshot(1, 8, 2), 0, "/v/shipping-8"))
    assert shipped(through(driver, 8, 10)) == [10]
    assert 8 in [step for _ in range(13) for step in shipped(beats(driver, "b", saved=(8,)))]


def test_a_last_commit_that_is_told_after_the_exit_counts_too():
    driver = script("a", "b", storage_named=True)
    through(driver, 8)
    assert beats(driver, "b", saved=(8, 10)) == []
    last = snapshot(1, 10, 2)
    assert shipped(driver.say(w.Committed(last, 0, "/v/slot-10"))) == [10]
    effects = [effect for _ in range(13) for effect in beats(driver, "b", saved=(8, 10))]
    assert shipped(effects) == []
    assert driver.core.beat().ends_at == 10


def test_a_member_ships_what_the_coordinator_says():
    driver = Driver("b", bundled=False, storage_named=True)
    driver.begun("a", "b")
    assert shipped(through(driver, 8, 10, rank=1)) == [10]
    assert driver.core.member_state().saved == (8, 10)
    state = p.MemberState("a", "a-1", 1, "claim-1", state=p.State.RUNNING, ends_at=8)
    assert shipped(driver.tell(e.CoordinatorMessage(1, "claim-1", state))) == [8]
    assert shipped(driver.tell(e.CoordinatorMessage(1, "claim-1", state))) == []
    late = driver.say(w.WantDurable(snapshot(1, 10, 2), 1, "/v/shipping-10"), rank=1)
    assert shipped(late) == [], "what all have would make room for it"


def test_workers_of_one_replica_may_differ_as_well():
    driver = Driver("a", bundled=False, storage_named=True)
    driver.prepared()
    alone = dataclasses.replace(assignment("a"), members=(member("a", 0, workers=2),))
    driver.ask(alone)
    through(driver, 8, 10)
    assert driver.core.member_state().saved is None
    through(driver, 8, rank=1)
    effects = [effect for _ in range(13) for effect in driver.wait(0.25)]
    assert [effect for effect in effects if isinstance(effect, e.Ship)] == [
        e.Ship(snapshot(1, 8, 2), 0, "/v/slot-8", is_slot=True)
    ]


@pytest.mark.parametrize(("mine", "others", "who"), [((10,), (), "b"), ((), (10,), "a"), ((8,), (10,), "a")])
def test_a_round_fails_whose_script_has_ended_before_all_ranks_had_one_snapshot(mine, others, who):
    driver = script("a", "b", storage_named=True)
    through(driver, *mine)
    for _ in range(13):
        assert driver.report.failures == ()
        assert driver.report.state == p.State.RUNNING
        beats(driver, "b", saved=others)
    beats(driver, "b", saved=others)
    (failure,) = driver.report.failures
    assert (failure.replica, failure.reason) == (who, p.FailureReason.WORKER_EXITED_EARLY)
    why = "ended before its snapshot of step 10 was complete: call commit(step, durable=True) after the last step."
    assert failure.message == f"{who} {why}"


def test_a_round_of_whose_end_no_storage_hears_may_end_so():
    driver = script("a", "b")
    driver.say(w.Committed(snapshot(1, 7, 2), 0, PATH))
    driver.ended(0)
    driver.member_says("b", "succeeded", saved=())
    driver.wait(p.SILENCE_SECONDS + 1.0)
    assert driver.report.failures == ()
    assert driver.report.state == p.State.SUCCEEDED


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
