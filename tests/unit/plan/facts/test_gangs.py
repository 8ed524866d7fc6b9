"""Gang mechanism of a job, its status, and the writes and deletions of its pod group."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from builders import jobs
from builders.jobs import T0
from concertina.api.status import GangMark, JobStatus
from concertina.plan.actions import ApplyPodGroup, CreatePod, DeletePod, DeletePodGroup, Plan
from concertina.plan.lifecycle.line import waiting
from concertina.plan.observed import GangApi, JobObservation, PodGroup
from concertina.plan.plan import plan

EVERYTHING = frozenset(GangApi)
CONTAINER = {"name": "trainer", "image": "python", "command": ["python3", "train.py"]}


def spec(gang: str, scheduler: str | None = None, **fields: Any) -> Any:
    named = {"schedulerName": scheduler} if scheduler else {}
    scheduling = {"gang": gang, **fields.pop("scheduling", {})}
    template = {"spec": {"containers": [CONTAINER], **named}}
    return jobs.spec(trainer=None, template=template, scheduling=scheduling, **fields)


def seen(job_spec: Any, *served: GangApi, status: JobStatus | None = None, **fields: Any) -> JobObservation:
    return jobs.observed(jobs.job(job_spec, status), gang_apis=frozenset(served), **fields)


def actions(made: Plan, kind: type[Any]) -> list[Any]:
    return [action for action in made.actions if isinstance(action, kind)]


def test_a_job_that_asks_for_no_gang_has_none() -> None:
    made = plan(jobs.observed(jobs.job(jobs.command_spec()), gang_apis=EVERYTHING), T0)
    assert made.status.gang is None
    assert not actions(made, ApplyPodGroup)
    assert {create.pod_group for create in actions(made, CreatePod)} == {None}


@pytest.mark.parametrize(
    ("gang", "scheduler", "served", "mechanism", "api"),
    [
        ("PodGroup", None, EVERYTHING, "PodGroup", GangApi.POD_GROUP),
        ("PodGroup", None, {GangApi.POD_GROUP_ALPHA}, "PodGroup", GangApi.POD_GROUP_ALPHA),
        ("Volcano", None, EVERYTHING, "Volcano", GangApi.VOLCANO),
        ("Coscheduling", "scheduler-plugins", EVERYTHING, "Coscheduling", GangApi.COSCHEDULING),
        ("KAI", None, EVERYTHING, "KAI", ""),
        ("Auto", None, EVERYTHING, "PodGroup", GangApi.POD_GROUP),
        ("Auto", None, {GangApi.POD_GROUP_ALPHA, GangApi.VOLCANO, GangApi.KAI, GangApi.KARTA}, "", ""),
        ("Auto", "volcano", EVERYTHING, "Volcano", GangApi.VOLCANO),
        ("Auto", "kai-scheduler", EVERYTHING, "KAI", ""),
        ("Auto", "kai-scheduler", {GangApi.KAI}, "", ""),
        ("Auto", "scheduler-plugins", EVERYTHING, "", ""),
    ],
)
def test_which_mechanism_is_used(gang: str, scheduler: str | None, served: Any, mechanism: str, api: str) -> None:
    made = plan(seen(spec(gang, scheduler), *served), T0)
    assert made.status.gang is not None
    assert (made.status.gang.mechanism, made.status.gang.api_version) == (mechanism, api)
    assert bool(made.status.gang.message) == (gang == "Auto"), "a choice of the operator has a reason"
    groups = {create.pod_group for create in actions(made, CreatePod)}
    assert len(groups) == 1
    assert (groups == {None}) == (not mechanism)
    assert [applied.group for applied in actions(made, ApplyPodGroup)] == ([*groups] if api else [])


@pytest.mark.parametrize(
    ("gang", "served", "says"),
    [
        ("PodGroup", {GangApi.VOLCANO}, "scheduling.k8s.io/v1beta1 or scheduling.k8s.io/v1alpha2: enable"),
        ("Volcano", {GangApi.POD_GROUP}, "does not serve scheduling.volcano.sh/v1beta1: install Volcano"),
        ("KAI", {GangApi.KAI}, "scheduling.run.ai/v2alpha2 with run.ai/v1alpha1: install KAI"),
    ],
)
def test_a_mechanism_that_is_not_served_is_refused_by_name_until_it_is(gang: str, served: Any, says: str) -> None:
    made = plan(seen(spec(gang), *served), T0)
    trouble = made.status.trouble
    assert trouble is not None
    assert (trouble.type, trouble.reason) == ("Stalled", "GangNotServed")
    assert says in trouble.message
    assert not actions(made, CreatePod)
    later = plan(replace(jobs.then(seen(spec(gang)), made), gang_apis=EVERYTHING), T0 + 60)
    assert later.status.trouble is None
    assert actions(later, CreatePod)


def test_nothing_is_created_before_it_is_known_what_is_served() -> None:
    unknown = replace(seen(spec("Auto")), gang_apis=None)
    made = plan(unknown, T0)
    assert "does not know yet" in made.status.conditions[0].message
    assert not actions(made, CreatePod)
    assert actions(plan(replace(unknown, job=jobs.job(jobs.command_spec())), T0), CreatePod), (
        "others do not wait for it"
    )


def running(job_spec: Any, mark: GangMark, **fields: Any) -> JobObservation:
    pods = tuple(jobs.pod(index, scheduling_group=mark.pod_group) for index in range(3))
    return seen(job_spec, GangApi.POD_GROUP, status=JobStatus(gang=mark), pods=pods, **fields)


BETA = GangMark(mechanism="PodGroup", api_version=GangApi.POD_GROUP, pod_group="demo-uid-1", min_count=2)
ALPHA = GangMark(mechanism="PodGroup", api_version=GangApi.POD_GROUP_ALPHA, pod_group="demo-uid-1-2", min_count=2)


def test_a_job_with_pods_keeps_its_mechanism_whatever_is_served_then() -> None:
    made = plan(replace(running(spec("PodGroup"), BETA), gang_apis=frozenset()), T0)
    assert made.status.gang == BETA
    assert made.status.trouble is None


def test_a_new_minimum_is_written_to_the_group() -> None:
    grown = spec("PodGroup", elastic={"minReplicas": 3})
    was = PodGroup(GangApi.POD_GROUP, "demo-uid-1", 2)
    made = plan(running(grown, BETA, pod_group=was), T0)
    (applied,) = actions(made, ApplyPodGroup)
    assert applied.group == replace(was, min_count=3)
    assert made.status.gang is not None
    assert made.status.gang.min_count == 3
    written = replace(jobs.then(running(grown, BETA), made), pod_group=applied.group)
    assert not actions(plan(written, T0), ApplyPodGroup), "once"


def test_a_group_whose_minimum_is_immutable_stays_while_a_pod_of_it_has_a_node() -> None:
    made = plan(running(spec("PodGroup", elastic={"minReplicas": 3}), ALPHA), T0)
    assert made.status.gang == ALPHA
    assert not actions(made, DeletePod)


def test_pending_pods_of_such_a_group_join_a_new_one() -> None:
    wanted = spec("PodGroup", elastic={"minReplicas": 1})
    before = running(wanted, ALPHA)
    pending = tuple(replace(pod, phase=jobs.PodPhase.PENDING, node="", ip="") for pod in before.pods)
    made = plan(replace(before, pods=pending), T0)
    assert made.status.phase == "Waiting"
    assert len(actions(made, DeletePod)) == 3
    gone = replace(jobs.then(before, made), pods=(), gang_apis=frozenset({GangApi.POD_GROUP_ALPHA}))
    again = plan(gone, T0 + 1)
    assert {create.pod_group.name for create in actions(again, CreatePod)} == {"demo-uid-1-1"}
    assert actions(again, DeletePodGroup) == [DeletePodGroup(GangApi.POD_GROUP_ALPHA, "demo-uid-1-2")]


def test_a_suspended_job_has_no_group() -> None:
    suspended = spec("PodGroup", suspend=True)
    left = seen(suspended, GangApi.POD_GROUP, status=JobStatus(gang=BETA))
    assert actions(plan(left, T0), DeletePodGroup) == [DeletePodGroup(GangApi.POD_GROUP, "demo-uid-1")]
    assert not actions(plan(replace(left, pod_group_deleted=True), T0), DeletePodGroup)
    with_pods = running(suspended, BETA)
    assert not actions(plan(with_pods, T0), DeletePodGroup), "not before its pods are gone"


def test_pods_whose_group_the_api_server_dropped_are_reported_and_stand_in_line() -> None:
    dropped = running(spec("PodGroup"), BETA)
    dropped = replace(dropped, pods=tuple(replace(pod, scheduling_group="") for pod in dropped.pods))
    made = plan(dropped, T0)
    trouble = made.status.trouble
    assert trouble is not None
    assert trouble.reason == "GangIgnored"
    assert "GenericWorkload" in trouble.message
    waits = [replace(pod, node="", phase=jobs.PodPhase.PENDING, waiting="Unschedulable") for pod in dropped.pods]
    view = replace(dropped.job, status=made.status)
    assert waiting(view, waits, refused=False) is not None
    grouped = [replace(pod, scheduling_group="demo-uid-1") for pod in waits]
    assert waiting(view, grouped, refused=False) is None, "the scheduler decides about a gang"


def test_a_pod_that_waits_for_its_group_says_so() -> None:
    pods = (jobs.pod(0, phase="Pending", node="", ip="", awaited_scheduler="default-scheduler", scheduling_group="g"),)
    mark = BETA.model_copy(update={"pod_group": "g"})
    waits = seen(spec("PodGroup"), GangApi.POD_GROUP, status=JobStatus(gang=mark), pods=pods)
    made = plan(replace(waits, seen_for={pods[0].uid: 9.0}), T0 + 9)
    says = "demo-0-0: its pod group g is scheduled once it has 2 pods, and it has 1"
    assert says in made.status.conditions[0].message
