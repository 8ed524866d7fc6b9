"""Job that is being deleted, with and without a finalizer that holds it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import concertina_protocol as protocol
from builders import jobs
from builders.jobs import T0
from concertina.api.status import ConditionType
from concertina.plan.actions import CreatePod, CreateSecret, DeleteJob, DeletePod, Plan
from concertina.plan.observed import JobObservation, PodPhase
from concertina.plan.plan import plan

HOLDER = "example.com/archive"
CHECKPOINT = {"uri": "s3://bucket/run"}


def deleted(seen: JobObservation, *finalizers: str) -> JobObservation:
    return replace(seen, job=replace(seen.job, deleting=True, finalizers=finalizers))


def trains(**fields: Any) -> JobObservation:
    seen = jobs.running(jobs.spec())
    return replace(seen, job=replace(seen.job, spec=jobs.spec(**fields)))


def creates(made: Plan) -> list[Any]:
    return [action for action in made.actions if isinstance(action, CreatePod | CreateSecret)]


@pytest.mark.parametrize("finalizers", [(), ("foregroundDeletion",), ("orphan",), (HOLDER, "orphan")])
def test_without_a_finalizer_of_another_tool_the_garbage_collector_does_it_all(finalizers: tuple[str, ...]) -> None:
    seen = deleted(trains(), *finalizers)
    assert plan(seen, T0 + 60) == Plan(seen.job.status)


def test_a_deleted_job_that_is_held_says_so_drains_with_a_checkpoint_and_gives_its_pods_back() -> None:
    seen = deleted(trains(checkpoint=CHECKPOINT), "foregroundDeletion", HOLDER)
    made = plan(seen, T0 + 60)
    (drain,) = jobs.sends(made, protocol.Drain).values()
    assert drain.durable
    assert made.status.phase == "Deleting"
    assert made.status.is_true(ConditionType.RUNNING), "the workers have not stopped yet"
    assert not made.status.is_true(ConditionType.READY)
    assert [event.reason for event in made.events] == ["Deleting"]
    ready = made.status.condition(ConditionType.READY)
    assert ready is not None
    assert ready.message.startswith(
        f"the job is being deleted, and it still has the finalizer {HOLDER}: all ranks stop"
    )

    saved = protocol.Storage(protocol.StorageHealth.READY, protocol.Durable(jobs.UID, 1, 40, "s3://bucket/run/40"))
    coordinator = replace(seen.agents["demo-0-0"], report=jobs.coordinator_report(state="drained", storage=saved))
    stopped = jobs.then(seen, made, agents={**seen.agents, "demo-0-0": coordinator})
    made = plan(stopped, T0 + 62)
    assert [type(action) for action in made.actions] == [DeletePod] * 3
    assert not made.status.is_true(ConditionType.RUNNING)

    empty = jobs.then(stopped, made, pods=(), agents={})
    made = plan(empty, T0 + 70)
    assert (made.actions, made.status.replicas, made.status.phase) == ((), 0, "Deleting")
    ready = made.status.condition(ConditionType.READY)
    assert ready is not None
    assert ready.message.endswith(f"it still has the finalizer {HOLDER}: it has no pods anymore")
    assert plan(jobs.then(empty, made), T0 + 71).status == made.status


def test_no_pod_is_made_after_the_deletion_and_none_is_announced() -> None:
    seen = trains()
    gone = deleted(replace(seen, pods=seen.pods[:2]), HOLDER)
    made = plan(gone, T0 + 60)
    assert not creates(made)
    assert not [event for event in made.events if event.reason == "ReplicaReplaced"]
    assert jobs.sends(made, protocol.Prepare), "those that are left make a round, to save what they hold"
    ready = made.status.condition(ConditionType.READY)
    assert ready is not None
    assert ready.message.endswith("; the job is being deleted, and it still has a finalizer")
    assert creates(plan(replace(gone, job=replace(gone.job, deleting=False)), T0 + 60)), "unlike one that lives"
    new = deleted(jobs.observed(jobs.job(jobs.spec())), HOLDER)
    assert plan(new, T0).actions == ()


def test_a_job_that_has_ended_stays_so_and_runs_nothing_any_more() -> None:
    seen = trains(cleanPodPolicy="None", ttlSecondsAfterFinished=5)
    pods = (replace(seen.pods[0], phase=PodPhase.SUCCEEDED, exit_code=0), *seen.pods[1:])
    seen = replace(seen, pods=pods)
    complete = jobs.then(seen, plan(seen, T0 + 60))
    assert complete.job.status.is_true(ConditionType.COMPLETE)
    made = plan(deleted(complete, HOLDER), T0 + 120)
    assert made.status.is_true(ConditionType.COMPLETE)
    assert sorted(action.name for action in made.actions if isinstance(action, DeletePod)) == ["demo-1-0", "demo-2-0"]
    assert not [action for action in made.actions if isinstance(action, DeleteJob)]
    again = plan(jobs.then(deleted(complete, HOLDER), made), T0 + 121)
    assert again.status.conditions == made.status.conditions, "the sentence does not grow"
