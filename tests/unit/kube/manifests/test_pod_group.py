"""Pod groups of each gang scheduler by its CRD's schema, the pods that join them, and the domain of a job's pods."""

from __future__ import annotations

from typing import Any

import pytest

from builders.gang_crds import problems
from builders.manifests import SECOND, UID, job, made
from concertina.kube.manifests.pod import rendezvous_manifest
from concertina.kube.manifests.pod_group import minimum_patch, pod_group_manifest, resource
from concertina.kube.parse.views import job_view
from concertina.plan.actions import CreatePod, CreateRendezvous
from concertina.plan.observed import GangApi, PodGroup

CRDS = {GangApi.VOLCANO: "volcano", GangApi.COSCHEDULING: "coscheduling"}
CONTAINER = {"name": "trainer", "image": "i", "command": ["python"]}
RACK = "example.com/rack"


def manifest(**template: Any) -> dict[str, Any]:
    return job({"replicas": 4, "template": {"spec": {"containers": [CONTAINER], **template}}})


def group(api: GangApi, **fields: Any) -> PodGroup:
    return PodGroup(api, "" if api is GangApi.KAI else "j-0f1e2d3c", 3, **fields)


def written(pod_group: PodGroup, **template: Any) -> dict[str, Any]:
    view = job_view(manifest(**template))
    assert view.spec is not None
    return pod_group_manifest(view, view.spec, pod_group)


def joined(api: GangApi, queue: str = "", **template: Any) -> dict[str, Any]:
    return made(manifest(**template), CreatePod(1, 2, pod_group=group(api, queue=queue)))


@pytest.mark.parametrize("api", CRDS)
def test_a_pod_group_has_the_form_that_its_scheduler_s_crd_asks_for(api: GangApi) -> None:
    made_group = written(group(api))
    assert problems(made_group, CRDS[api]) == []
    assert made_group["spec"]["minMember"] == 3
    assert problems({**made_group, **minimum_patch(group(api))}, CRDS[api]) == []
    assert resource(api).path("n", "g") == f"/apis/{api}/namespaces/n/podgroups/g"


def test_the_check_of_a_form_finds_what_is_wrong() -> None:
    wrong = {**written(group(GangApi.COSCHEDULING)), "spec": {"minMember": 0, "queue": "q"}}
    assert problems(wrong, "coscheduling") == ["spec.queue is unknown", "spec.minMember is below 1"]


def test_volcano_s_group_has_the_queue_and_the_priority_class() -> None:
    made_group = written(group(GangApi.VOLCANO, queue="team-a"), priorityClassName="high")
    assert made_group["spec"] == {"minMember": 3, "queue": "team-a", "priorityClassName": "high"}
    assert problems(made_group, "volcano") == []


@pytest.mark.parametrize("api", [GangApi.POD_GROUP, GangApi.POD_GROUP_ALPHA])
def test_kubernetes_group_has_the_minimum_and_the_required_domain(api: GangApi) -> None:
    assert written(group(api))["spec"] == {"schedulingPolicy": {"gang": {"minCount": 3}}}
    topology = written(group(api, topology=RACK))["spec"]["schedulingConstraints"]["topology"]
    assert topology == [{"key": RACK}]


def test_a_group_goes_with_its_job() -> None:
    metadata = written(group(GangApi.POD_GROUP))["metadata"]
    assert metadata["labels"]["concertina.dev/job-uid"] == UID
    (owner,) = metadata["ownerReferences"]
    assert (owner["kind"], owner["uid"]) == ("TrainingJob", UID)


def test_how_pods_join() -> None:
    plain = made(manifest())
    of_kubernetes = joined(GangApi.POD_GROUP)
    assert of_kubernetes["spec"].pop("schedulingGroup") == {"podGroupName": "j-0f1e2d3c"}
    assert of_kubernetes == plain, "nothing else"
    volcano = joined(GangApi.VOLCANO, queue="team-a")
    assert volcano["spec"]["schedulerName"] == "volcano"
    assert volcano["metadata"]["annotations"]["scheduling.k8s.io/group-name"] == "j-0f1e2d3c"
    assert volcano["metadata"]["annotations"]["scheduling.volcano.sh/queue-name"] == "team-a"
    coscheduling = joined(GangApi.COSCHEDULING)
    assert coscheduling["metadata"]["labels"]["scheduling.x-k8s.io/pod-group"] == "j-0f1e2d3c"
    assert "schedulerName" not in coscheduling["spec"]
    kai = joined(GangApi.KAI, queue="team-a")
    assert kai["spec"]["schedulerName"] == "kai-scheduler"
    assert kai["metadata"]["labels"]["kai.scheduler/queue"] == "team-a"


def test_a_scheduler_that_the_template_names_stays() -> None:
    assert joined(GangApi.VOLCANO, schedulerName="volcano-2")["spec"]["schedulerName"] == "volcano-2"


def test_torchrun_s_store_is_in_no_group() -> None:
    whole = manifest(schedulerName="kai-scheduler")
    whole["spec"] |= {"launcher": "Torchrun", "scheduling": {"gang": "Auto"}}
    view = job_view(whole)
    assert view.spec is not None
    store = rendezvous_manifest(view, view.spec, CreateRendezvous(1))
    assert not {"schedulerName", "schedulingGroup"} & store["spec"].keys()


def affinity(mode: str) -> dict[str, Any]:
    whole = manifest()
    whole["spec"]["scheduling"] = {"topology": {"key": RACK, "mode": mode}}
    terms: dict[str, Any] = made(whole, SECOND)["spec"]["affinity"]["podAffinity"]
    return terms


def test_a_required_domain_is_a_rule_and_a_preferred_one_a_wish() -> None:
    (rule,) = affinity("Required")["requiredDuringSchedulingIgnoredDuringExecution"]
    assert rule["topologyKey"] == RACK
    assert rule["labelSelector"]["matchLabels"] == {"concertina.dev/job-uid": UID}
    (wish,) = affinity("Preferred")["preferredDuringSchedulingIgnoredDuringExecution"]
    assert (wish["weight"], wish["podAffinityTerm"]) == (100, rule)
