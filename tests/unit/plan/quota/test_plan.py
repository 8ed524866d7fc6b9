"""plan() of a job with a queue: no pods before admission, the status meanwhile, and drains for quota."""

from __future__ import annotations

from dataclasses import replace
from decimal import Decimal
from typing import Any

import concertina_protocol as protocol
from builders.jobs import T0, job, observed, pod, running, sends, spec
from concertina.api.status import JobStatus
from concertina.plan.actions import CreatePod, CreateWorkload, DeletePod, EditWorkload, ReleaseWorkload, ShrinkWorkload
from concertina.plan.kueue import (
    Assignment,
    ConditionName,
    FlavorView,
    PodSet,
    QuotaView,
    WorkloadCondition,
    WorkloadView,
)
from concertina.plan.observed import JobObservation
from concertina.plan.plan import plan
from concertina.plan.quota import workloads

GPU = "nvidia.com/gpu"
FLAVORS = {"spot": FlavorView("spot", {"kind": "spot"}, ({"key": "spot", "operator": "Exists"},))}
ADMITTED = {
    ConditionName.QUOTA_RESERVED: WorkloadCondition(true=True),
    ConditionName.ADMITTED: WorkloadCondition(true=True),
}
PREEMPTED = "Preempted to accommodate a workload (UID: other, JobUID: x) due to prioritization in the ClusterQueue; "
PREEMPTED += "preemptor path: /secret/queue; preemptee path: /q"


def workload(count: int | None, asked: int = 3, **fields: Any) -> WorkloadView:
    """Return a Workload of the job that is admitted with that many pods, or pending."""
    assignment = Assignment(count or 0, {GPU: "spot"}, {GPU: Decimal(count or 0)})
    values: dict[str, Any] = {
        "name": "w", "uid": "w-1", "namespace": "default", "version": "1", "generation": 1, "created": T0,
        "job_uid": "uid-1", "queue": "team", "number": 1, "counts": {PodSet.TRAINER: asked}, "request_hash": "h",
        "admission": {PodSet.TRAINER: assignment} if count else None, "conditions": ADMITTED if count else {}, **fields,
    }  # fmt: skip
    return WorkloadView(**values)


def evicted(count: int, reason: str = "Preempted", **fields: Any) -> WorkloadView:
    conditions = {**ADMITTED, ConditionName.EVICTED: WorkloadCondition(True, reason, PREEMPTED, "2027-01-15T08:00:00Z")}
    return workload(count, conditions=conditions, preemptor_uid="other", **fields)


def preemptor(lacking: int, **fields: Any) -> WorkloadView:
    shortfalls = {(GPU, "spot"): Decimal(lacking)}
    return workload(None, uid="other", job_uid="", shortfalls=shortfalls, victims=1, **fields)


def queue(*workloads: WorkloadView, **fields: Any) -> QuotaView:
    return QuotaView("team", workloads, FLAVORS, request_hash="h", **fields)


def queued(*workloads: WorkloadView, pods: int = 0, **fields: Any) -> JobObservation:
    return observed(job(spec()), tuple(pod(index) for index in range(pods)), quota=queue(*workloads), **fields)


def ready(status: JobStatus) -> tuple[str, str]:
    condition = status.condition("Ready")
    assert condition is not None
    return condition.reason, condition.message


def test_without_a_queue_pods_are_created_at_once() -> None:
    made = plan(observed(job(spec())), T0 + 1)
    creates = [action for action in made.actions if isinstance(action, CreatePod)]
    assert [create.quota for create in creates] == [None, None, None]
    assert made.status.queue is None


def test_a_job_with_a_queue_asks_for_quota_and_creates_no_pod() -> None:
    made = plan(queued(), T0 + 1)
    assert [type(action) for action in made.actions] == [CreateWorkload]
    assert ready(made.status)[0] == "Queued"
    assert made.status.is_true("Suspended")  # type: ignore[arg-type]
    assert made.status.is_true("Ready")  # type: ignore[arg-type]
    assert not made.status.is_true("Reconciling")  # type: ignore[arg-type]


def test_a_pending_job_says_in_kueues_words_why_it_waits() -> None:
    refused = WorkloadCondition(False, "Pending", "insufficient unused quota for cpu in flavor spot, 2 more needed")
    made = plan(queued(workload(None, conditions={ConditionName.QUOTA_RESERVED: refused})), T0 + 1)
    assert "2 more needed" in ready(made.status)[1]
    assert made.status.queue is not None
    assert "2 more needed" in made.status.queue.message


def test_an_admitted_job_creates_as_many_pods_as_were_admitted() -> None:
    made = plan(queued(workload(2, asked=2)), T0 + 1)
    creates = [action for action in made.actions if isinstance(action, CreatePod)]
    assert len(creates) == 2
    quota = creates[0].quota
    assert quota is not None
    assert quota.lender == ("w", 2)
    assert quota.changes.node_selector == {"kind": "spot"}
    assert quota.changes.labels["kueue.x-k8s.io/podset"] == "trainer"


def test_a_pod_that_ends_slowly_keeps_its_quota() -> None:
    seen = queued(workload(3), pods=3)
    deleting = tuple(replace(view, deleting=view.index == 2) for view in seen.pods)
    made = plan(replace(seen, pods=deleting), T0 + 1)
    assert not [action for action in made.actions if isinstance(action, CreatePod)]


def test_nothing_is_created_or_written_while_a_write_is_under_way() -> None:
    made = plan(observed(job(spec()), quota=queue(workload(3), writing=True)), T0 + 1)
    assert not made.actions


def test_an_unknown_flavor_creates_no_pod() -> None:
    made = plan(observed(job(spec()), quota=replace(queue(workload(3)), flavors={})), T0 + 1)
    assert not [action for action in made.actions if isinstance(action, CreatePod)]


def trains(*workloads: WorkloadView, **fields: Any) -> JobObservation:
    """Return a job of three replicas that trains, with those Workloads."""
    return replace(running(spec(elastic={"minReplicas": 1})), quota=queue(*workloads, **fields))


def test_a_preempted_job_drains_by_a_planned_change_and_gives_back_only_what_is_needed() -> None:
    seen = trains(evicted(3), preemptor=preemptor(2))
    made = plan(seen, T0 + 20)
    drain = sends(made, protocol.Drain)
    assert list(drain) == ["demo-0-0"]
    assert not [action for action in made.actions if isinstance(action, DeletePod | ShrinkWorkload)]
    assert made.status.queue is not None
    assert made.status.queue.replicas == 1
    assert "secret" not in made.status.queue.message
    assert "other" not in made.status.queue.message.split("another")[0]


def test_quota_is_given_back_only_after_the_pods_are_gone() -> None:
    seen = trains(evicted(3), preemptor=preemptor(2))
    assert not [action for action in plan(seen, T0 + 20).actions if isinstance(action, ShrinkWorkload)]
    fewer = replace(seen, pods=seen.pods[:1])
    shrinks = [action for action in plan(fewer, T0 + 20).actions if isinstance(action, ShrinkWorkload)]
    assert [(shrink.request, shrink.eviction) for shrink in shrinks] == [
        (((PodSet.TRAINER, 1),), "2027-01-15T08:00:00Z")
    ]


def test_a_shrunk_workload_is_replaced_by_a_slice_of_its_size() -> None:
    shrunk = evicted(3, asked=1, shrunk_for="2027-01-15T08:00:00Z", shrunk_at=T0 + 20)
    seen = trains(shrunk, preemptor=preemptor(2))
    made = plan(replace(seen, pods=seen.pods[:1]), T0 + 21)
    creates = [action for action in made.actions if isinstance(action, CreateWorkload)]
    assert [(create.request, create.replaces, create.priority) for create in creates] == [
        (((PodSet.TRAINER, 1),), "w", 0)
    ]
    assert not [action for action in made.actions if isinstance(action, CreatePod)]


def test_a_replacement_that_is_not_admitted_in_time_means_to_give_more() -> None:
    shrunk = evicted(3, asked=2, shrunk_for="2027-01-15T08:00:00Z", shrunk_at=T0 + 20)
    slice_of_two = workload(None, asked=2, name="slice", uid="slice", number=2, replaces="w", created=T0 + 21)
    seen = replace(trains(shrunk, preemptor=preemptor(1)), quota=queue(shrunk, slice_of_two))
    assert _replicas(plan(seen, T0 + 22).status) == 2
    assert _replicas(plan(seen, T0 + 27).status) == 1
    least = replace(shrunk, counts={PodSet.TRAINER: 1})
    assert _replicas(plan(replace(seen, quota=queue(least, slice_of_two)), T0 + 27).status) == 0


def test_the_time_for_a_replacement_begins_when_it_is_created() -> None:
    """The operator was stopped after it had lowered the counts."""
    shrunk = evicted(3, asked=1, shrunk_for="2027-01-15T08:00:00Z", shrunk_at=T0 + 20)
    made = plan(trains(shrunk, preemptor=preemptor(2)), T0 + 500)
    assert _replicas(made.status) == 1


def test_a_suspended_job_keeps_its_workload_active_while_a_pod_is_left() -> None:
    """Kueue lends the quota of an inactive Workload at once."""
    seen = replace(trains(workload(3)), job=job(spec(suspend=True)))
    deactivated = EditWorkload(workloads.key(workload(3)), active=False)
    assert deactivated not in plan(seen, T0 + 20).actions
    assert deactivated in plan(replace(seen, pods=()), T0 + 20).actions


def _replicas(status: JobStatus) -> int:
    assert status.queue is not None
    return status.queue.replicas


def test_an_earlier_shrink_does_not_count_for_a_new_eviction() -> None:
    shrunk = evicted(3, shrunk_for="2026-12-31T00:00:00Z", shrunk_at=T0 - 1000)
    assert _replicas(plan(trains(shrunk, preemptor=preemptor(1)), T0 + 20).status) == 2


def test_a_preemptor_that_lacks_too_much_suspends_the_job() -> None:
    made = plan(trains(evicted(3), preemptor=preemptor(3)), T0 + 20)
    assert _replicas(made.status) == 0
    assert ready(made.status)[0] == "Suspending"


def test_a_preemptor_that_nobody_sees_is_given_one_size_at_a_time() -> None:
    assert _replicas(plan(trains(evicted(3)), T0 + 20).status) == 2


def test_another_eviction_takes_everything() -> None:
    seen = trains(evicted(3, "ClusterQueueStopped"))
    made = plan(seen, T0 + 20)
    assert _replicas(made.status) == 0
    assert not [action for action in made.actions if isinstance(action, ReleaseWorkload)]
    gone = plan(replace(seen, pods=()), T0 + 20)
    assert [action for action in gone.actions if isinstance(action, ReleaseWorkload)]
    assert ready(gone.status)[0] == "Queued"
