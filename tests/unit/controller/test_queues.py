"""Queue of a job, and the operator's knowledge of its Workloads, priority and preemptor."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from builders.queueing import GPU, NAMESPACE, Site, virtual_time
from concertina.controller.cache.cluster_cache import ClusterCache
from concertina.controller.cache.queues import Service
from concertina.controller.workload_writes import drop_orphan
from concertina.kube.manifests.workload import PREBUILT_WORKLOAD, PRIORITY_CLASS, QUEUE_NAME
from concertina.kube.parse.workloads import PriorityClassView, workload_view
from concertina.kube.resources import PODS, WORKLOADS, Raw
from concertina.plan.kueue import QuotaView
from concertina.plan.observed import QueuePlace

UID = "uid-job"


def job(labels: dict[str, str] | None = None, status: Raw | None = None, version: int = 1, **pod: Any) -> Raw:
    container = {"name": "trainer", "command": ["x"], "resources": {"limits": {GPU: "1"}}}
    metadata = {
        "name": "job", "namespace": NAMESPACE, "uid": UID, "generation": 1, "resourceVersion": str(version),
        "creationTimestamp": "2026-01-01T00:00:00Z", "labels": labels or {},
    }  # fmt: skip
    spec = {"replicas": 2, "template": {"spec": {"containers": [container], **pod}}}
    return {"metadata": metadata, "spec": spec, "status": status or {}}


def workload(**spec: Any) -> Raw:
    owner = {"apiVersion": "concertina.dev/v1beta1", "kind": "TrainingJob", "name": "job", "uid": UID}
    metadata = {
        "name": "w", "namespace": NAMESPACE, "uid": "w-1", "generation": 1, "resourceVersion": "1",
        "creationTimestamp": "2026-01-01T00:00:00Z", "ownerReferences": [{**owner, "controller": True}],
    }  # fmt: skip
    return {"metadata": metadata, "spec": {"queueName": "team", **spec}, "status": {}}


def cache(service: Service = Service.READY) -> ClusterCache:
    made = ClusterCache(lambda uid: None, lambda uid: {})
    made.queues.set_service(service)
    return made


def quota_of(made: ClusterCache) -> QuotaView | None:
    observed = made.observe(UID)
    assert observed is not None
    return observed.quota


def queue_of(made: ClusterCache) -> str:
    quota = quota_of(made)
    return quota.queue if quota else ""


def test_the_label_names_the_queue_where_kueue_is_served() -> None:
    made = cache()
    made.on_job(job({QUEUE_NAME: "team"}))
    assert queue_of(made) == "team"
    absent = cache(Service.ABSENT)
    absent.on_job(job({QUEUE_NAME: "team"}))
    assert queue_of(absent) == ""


def test_a_job_keeps_its_queue_without_the_label() -> None:
    made = cache()
    made.on_job(job({QUEUE_NAME: "team"}))
    made.queues.on_workload(None, workload_view(workload()))
    made.on_job(job(version=2))
    assert queue_of(made) == "team"


def test_the_priority_is_that_of_the_class() -> None:
    made = cache()
    made.on_job(job({QUEUE_NAME: "team", PRIORITY_CLASS: "high"}))
    quota = quota_of(made)
    assert quota is not None
    assert "high" in quota.trouble
    made.queues.on_workload_class(None, PriorityClassView("high", 100))
    quota = quota_of(made)
    assert quota is not None
    assert (quota.priority, quota.trouble) == (100, "")


@pytest.mark.parametrize(("named", "expected"), [({"priorityClassName": "batch"}, 7), ({}, 3)])
def test_without_a_label_the_priority_class_of_the_pods_counts(named: dict[str, str], expected: int) -> None:
    made = cache()
    made.on_job(job({QUEUE_NAME: "team"}, **named))
    made.queues.on_pod_class(None, PriorityClassView("batch", 7))
    made.queues.on_pod_class(None, PriorityClassView("usual", 3, is_default=True))
    quota = quota_of(made)
    assert quota is not None
    assert quota.priority == expected


def test_a_write_that_was_refused_is_tried_again_later_and_later() -> None:
    """While Kueue restarts, its webhook refuses every write at once."""
    timers: list[tuple[float, Callable[[], None]]] = []
    made = ClusterCache(lambda uid: None, lambda uid: {}, later=lambda seconds, act: timers.append((seconds, act)))
    made.queues.set_service(Service.READY)
    made.on_job(job({QUEUE_NAME: "team"}))
    cached = made.job(UID)
    assert cached is not None
    timers.clear()  # of the turns for room

    def may_write() -> bool:
        quota = quota_of(made)
        return quota is not None and not quota.writing

    for _ in range(3):
        made.queues.refused(cached, "connection refused")
        assert not may_write()
        timers[-1][1]()
        assert may_write()
    first, second, third = (seconds for seconds, _ in timers)
    assert 0 < first < second < third
    made.queues.accepted(cached)
    made.queues.refused(cached, "connection refused")
    assert timers[-1][0] < second


def test_a_prebuilt_workload_is_refused() -> None:
    made = cache()
    made.on_job(job({QUEUE_NAME: "team", PREBUILT_WORKLOAD: "w"}))
    quota = quota_of(made)
    assert quota is not None
    assert PREBUILT_WORKLOAD in quota.trouble


def test_an_operator_that_may_not_read_workloads_says_so() -> None:
    made = cache(Service.UNREADABLE)
    made.on_job(job({QUEUE_NAME: "team"}))
    quota = quota_of(made)
    assert quota is not None
    assert "may not read Workloads" in quota.trouble


def test_a_job_with_a_queue_has_no_turns_for_room() -> None:
    made = cache()
    made.on_job(job({QUEUE_NAME: "team"}, {"internal": {"requeueState": {"count": 1}}}))
    observed = made.observe(UID)
    assert observed is not None
    assert observed.place == QueuePlace()


def test_news_of_a_preemptor_concern_the_job_that_gives_way() -> None:
    changed: list[str] = []
    made = ClusterCache(changed.append, lambda uid: {})
    made.queues.set_service(Service.READY)
    made.on_job(job({QUEUE_NAME: "team"}))
    own, other = workload(), workload()
    other["metadata"] |= {"name": "other", "uid": "other-1", "ownerReferences": []}
    other["status"] = {"conditions": [], "admission": None}
    eviction = {"type": "Evicted", "status": "True", "reason": "Preempted"}
    eviction["message"] = "Preempted to accommodate a workload (UID: other-1, JobUID: UNKNOWN) due to prioritization"
    own["status"] = {"conditions": [eviction], "admission": {"podSetAssignments": []}}
    victim, preemptor = workload_view(own), workload_view(other)
    made.queues.on_workload(None, victim)
    changed.clear()
    made.queues.on_workload(None, preemptor)
    assert changed == [UID]
    quota = quota_of(made)
    assert quota is not None
    assert quota.preemptor == preemptor
    made.queues.on_workload(victim, None)
    changed.clear()
    made.queues.on_workload(preemptor, None)
    assert changed == []


def test_objects_of_an_api_that_went_are_forgotten() -> None:
    made = cache()
    made.on_job(job())
    made.queues.on_workload(None, workload_view(workload()))
    made.queues.set_service(Service.ABSENT)
    made.queues.set_service(Service.READY)
    assert queue_of(made) == ""


def test_a_workload_of_a_job_that_is_gone_is_dropped_after_its_pods() -> None:
    async def story(site: Site) -> None:
        uid = site.add_job("job", replicas=2)
        await site.turns(100)
        name = next(iter(site.api.objects[WORKLOADS.plural]))
        site.api.mark_deleted(WORKLOADS.plural, name)
        view = workload_view(site.api.objects[WORKLOADS.plural][name])
        site.jobs.clear()
        assert not await drop_orphan(site.api, view)  # type: ignore[arg-type]
        for pod in site.pods_of(uid):
            site.api.remove(PODS.plural, pod["metadata"]["name"])
        assert await drop_orphan(site.api, view)  # type: ignore[arg-type]
        assert site.api.objects[WORKLOADS.plural] == {}

    async def main() -> None:
        site = Site(1, quota=4, slow=1)
        with virtual_time(site):
            await story(site)

    asyncio.run(main())
