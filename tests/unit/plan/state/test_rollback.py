"""Training that was undone: no round continues from undone states, and skipped samples stay skipped."""

from dataclasses import replace

import concertina_protocol as protocol
from builders import jobs
from concertina.api.internal import Internal, UndoneStates
from concertina.api.status import CheckpointMark, JobStatus, RollbackMark, SampleRange, rfc3339
from concertina.plan.plan import plan
from concertina.plan.state import restore
from concertina_protocol import Durable, HeldSnapshot, Prepared, SnapshotId, Storage, Undone

WITH_STORAGE = jobs.spec(checkpoint={"uri": "s3://bucket/run"})
NOW = jobs.T0 + 20
BACK = RollbackMark(round=3, step=50, reason="LossSpike", at=rfc3339(NOW))
SKIPPED = (SampleRange(begin=8, end=16),)


def holding(round, step):
    return {"a": Prepared("", "i", 9, "c", 1, "s", (), (HeldSnapshot(SnapshotId(round, step, "layout", 1), (0,)),))}


def latest(round, step):
    return Storage("Ready", Durable(jobs.UID, round, step, f"s3://bucket/run/{jobs.UID}/round-{round}/step-{step}"))


def chosen(held, storage, status):
    choice = restore.choose(held, [storage], status, jobs.UID, WITH_STORAGE)
    return choice.source, choice.step, choice.undone, choice.skipped


def test_a_state_that_was_undone_is_never_gone_on_from():
    status = JobStatus(rollback=BACK, skipped=SKIPPED)
    always = (Undone(3, 50), ((8, 16),))
    assert chosen(holding(3, 60), latest(3, 55), status) == ("Storage", 50, *always)
    assert chosen(holding(3, 50), latest(3, 55), status) == ("Memory", 50, *always)
    assert chosen(holding(4, 52), latest(3, 55), status) == ("Memory", 52, *always), "trained since"
    assert chosen({}, latest(2, 40), status) == ("Storage", 40, *always)
    assert chosen({}, latest(4, 53), status) == ("Storage", 53, *always)


def test_what_an_earlier_rollback_undid_stays_undone_though_the_last_one_went_back_to_a_later_step():
    status = JobStatus(
        rollback=BACK.model_copy(update={"round": 5, "step": 80}),
        internal=Internal(invalidated_checkpoints=(UndoneStates(round=3, step=50),)),
    )
    choice = restore.choose(holding(3, 60), [latest(3, 55)], status, jobs.UID, WITH_STORAGE)
    assert (choice.source, choice.step) == ("Storage", 80), "or before: the trainer looks for one that was not undone"
    assert (choice.undone, choice.undone_before) == (Undone(5, 80), (Undone(3, 50),))
    assert choice.voids(choice.durable)
    assert chosen(holding(4, 60), latest(3, 55), status)[:2] == ("Memory", 60)


def test_the_status_remembers_what_each_rollback_undid():
    first = told("LossSpike").status
    assert first.internal.invalidated_checkpoints == (UndoneStates(round=1, step=25),)
    earlier = {
        "rollback": BACK.model_copy(update={"round": 0, "step": 9}),
        "internal": Internal(invalidated_checkpoints=(UndoneStates(round=0, step=9),)),
    }
    both = (UndoneStates(round=0, step=9), UndoneStates(round=1, step=25))
    assert told("LossSpike", earlier).status.internal.invalidated_checkpoints == both
    assert told("LossSpike", {"rollback": earlier["rollback"]}).status.internal.invalidated_checkpoints == both, (
        "internal.invalidated_checkpoints was lost"
    )


def told(reason, status=None):
    seen = jobs.running(jobs.spec())
    rollback = protocol.Rollback(25, ((100, 108),))
    failure = protocol.Failure("demo-1-0", reason, "Rank 1: the loss is 9.", rank=1, rollback=rollback)
    coordinator = seen.agents["demo-0-0"]
    report = replace(coordinator.report, state="failed", failures=(failure,), storage=latest(1, 30))
    agents = {**seen.agents, "demo-0-0": replace(coordinator, report=report)}
    job = replace(seen.job, status=seen.job.status.model_copy(update=status or {}))
    return plan(replace(seen, agents=agents, job=job), NOW)


def test_a_rollback_and_its_samples_stand_in_the_status_with_the_claim_that_answers_it():
    made = told("LossSpike")
    back = made.status.rollback
    assert (back.round, back.step, back.reason) == (1, 25, "LossSpike")
    assert made.status.skipped == (SampleRange(begin=100, end=108),)
    assert made.status.world.claim.round == 2
    (entry,) = made.status.restarts.recent
    assert (entry.reason, entry.replica, entry.node, entry.counted) == ("LossSpike", "", "", True)
    events_by_reason = {event.reason: event.message for event in made.events}
    assert (
        events_by_reason["RolledBack"] == "round 1 is rolled back to step 25 or an earlier one: Rank 1: the loss is 9."
    )
    assert events_by_reason["SamplesSkipped"] == "samples 100 to 107 are skipped"
    again = told("LossSpike", {"rollback": back, "skipped": made.status.skipped})
    assert not {"RolledBack", "SamplesSkipped"} & {event.reason for event in again.events}


def test_a_corruption_blames_its_replica_which_is_replaced_on_another_node():
    status = told("SilentCorruption").status
    (entry,) = status.restarts.recent
    assert (entry.replica, entry.node, entry.action) == ("demo-1-0", "node-1", "RecreatePod")
    assert [avoided.node for avoided in status.avoided_nodes] == ["node-1"], "once is enough: memory does not mend"
    assert not told("LossSpike").status.avoided_nodes


def test_samples_left_out_in_a_running_round_are_joined_with_those_known():
    seen = jobs.running(jobs.spec())
    coordinator = seen.agents["demo-0-0"]
    progress = replace(coordinator.report.progress, step=41, at=NOW, skipped=((16, 20), (40, 44)))
    agents = {**seen.agents, "demo-0-0": replace(coordinator, report=replace(coordinator.report, progress=progress))}
    job = replace(seen.job, status=seen.job.status.model_copy(update={"skipped": SKIPPED}))
    made = plan(replace(seen, agents=agents, job=job), NOW)
    assert made.status.skipped == (SampleRange(begin=8, end=20), SampleRange(begin=40, end=44))


def test_the_status_names_no_checkpoint_that_was_undone():
    seen = jobs.running(jobs.spec())
    coordinator = seen.agents["demo-0-0"]
    for storage, step in ((latest(3, 55), None), (latest(3, 45), 45), (latest(4, 52), 52)):
        agents = {**seen.agents, "demo-0-0": replace(coordinator, report=replace(coordinator.report, storage=storage))}
        mark = CheckpointMark(step=55, round=3, uri="s3://x", at=rfc3339(NOW))
        status = seen.job.status.model_copy(update={"rollback": BACK, "last_checkpoint": mark})
        made = plan(replace(seen, agents=agents, job=replace(seen.job, status=status)), NOW)
        assert (made.status.last_checkpoint and made.status.last_checkpoint.step) == step
