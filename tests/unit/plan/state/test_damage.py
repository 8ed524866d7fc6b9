"""Damaged newest checkpoint with `checkpoint.onDamage: UsePrevious`: what the operator records and chooses."""

from __future__ import annotations

from dataclasses import replace

import concertina_protocol as protocol
from builders import jobs
from concertina.api.status import DamagedCheckpoint, JobStatus, rfc3339
from concertina.plan.plan import Plan, plan
from concertina.plan.state import restore
from concertina_protocol import Durable, Storage

WITH_STORAGE = jobs.spec(checkpoint={"uri": "s3://bucket/run", "onDamage": "UsePrevious"})
NOW = jobs.T0 + 20


def durable(step: int, uid: str = jobs.UID) -> Durable:
    return Durable(uid, 1, step, f"s3://bucket/run/{uid}/round-1/step-{step}")


def found_damaged(bad: Durable, *steps: int, known: JobStatus | None = None) -> Plan:
    """Make a pass over the report that a checkpoint is damaged, with a rank for each step to go back to in `steps`."""
    seen = jobs.running(jobs.spec())
    failures = tuple(
        protocol.Failure(
            f"demo-{rank}-0", "Damaged", "Rank: shard-1-of-2 is damaged.", rank=rank, exit_code=1,
            rollback=protocol.Rollback(step, (), bad),
        )
        for rank, step in enumerate(steps)
    )  # fmt: skip
    coordinator = seen.agents["demo-0-0"]
    report = replace(coordinator.report, state="failed", failures=failures, storage=Storage("Ready", bad))
    agents = {**seen.agents, "demo-0-0": replace(coordinator, report=report)}
    job = seen.job if known is None else replace(seen.job, status=known)
    return plan(replace(seen, agents=agents, job=job), NOW)


def chosen(latest: Durable, status: JobStatus) -> protocol.Restore:
    choice = restore.choose({}, [Storage("Ready", latest)], status, jobs.UID, WITH_STORAGE)
    assert isinstance(choice, protocol.Restore)
    return choice


def test_the_status_names_the_damaged_checkpoint_and_the_step_that_training_goes_on_from() -> None:
    made = found_damaged(durable(40), 30, 20)
    (bad,) = made.status.damaged_checkpoints or ()
    assert (bad.uri, bad.step, bad.previous_step) == (durable(40).uri, 40, 20)
    events_by_reason = {event.reason: event for event in made.events}
    assert events_by_reason["CheckpointDamaged"].type == "Warning"
    assert events_by_reason["CheckpointDamaged"].message == (
        f"{bad.uri} (step 40) is damaged: training continues from the checkpoint of step 20 or an earlier one"
    )
    assert "RolledBack" not in events_by_reason
    assert made.status.world.claim is not None
    assert made.status.world.claim.round == 2
    again = found_damaged(durable(40), 30, 20, known=made.status)
    assert again.status.damaged_checkpoints == (bad,)
    assert "CheckpointDamaged" not in {event.reason for event in again.events}


def test_no_replica_or_node_is_blamed_for_a_damaged_checkpoint() -> None:
    status = found_damaged(durable(40), 20).status
    (entry,) = status.restarts.recent
    assert (entry.reason, entry.replica, entry.node, entry.counted) == ("Damaged", "", "", True)
    assert not status.avoided_nodes


def test_a_damaged_checkpoint_is_not_chosen_again_and_its_steps_are_void() -> None:
    status = found_damaged(durable(40), 20).status
    again = found_damaged(durable(40), 20, known=status).status
    assert again.last_checkpoint is None, "though LATEST may still name it"
    start = chosen(durable(40), status)
    assert (start.source, start.step, start.damaged) == ("Storage", 20, (durable(40).uri,))
    assert start.bars(durable(40), jobs.UID)
    assert not start.bars(durable(20), jobs.UID)
    assert chosen(durable(20), status).step == 20


def test_another_job_s_damaged_checkpoint_voids_none_of_this_job_s_states() -> None:
    other = durable(40, "other")
    status = found_damaged(other, 20).status
    assert (status.rollback, status.internal.invalidated_checkpoints) == (None, ())
    start = chosen(other, status)
    assert (start.step, start.damaged, start.undone) == (20, (other.uri,), None)
    assert start.bars(other, jobs.UID)


def test_as_many_damaged_checkpoints_are_remembered_as_the_crd_has_room_for() -> None:
    bad = tuple(
        DamagedCheckpoint(uri=durable(step).uri, step=step, previous_step=step - 1, at=rfc3339(NOW))
        for step in range(60, 44, -1)
    )
    status = jobs.running(jobs.spec()).job.status.model_copy(update={"damaged_checkpoints": bad})
    damaged = found_damaged(durable(40), 20, known=status).status.damaged_checkpoints
    assert [each.step for each in damaged or ()] == [*range(59, 44, -1), 40]
