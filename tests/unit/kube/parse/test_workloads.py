"""Views of Kueue's objects: the fields that plan() reads, all of them bounded."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

from builders import manifests
from concertina.kube.manifests import workload as manifest
from concertina.kube.parse.views import job_view
from concertina.kube.parse.workloads import SENTENCE, flavor_view, workload_view
from concertina.plan.actions import CreateWorkload
from concertina.plan.kueue import ConditionName, PodChanges, PodSet
from concertina.plan.quota.messages import public

SHORT = "couldn't assign flavors to pod set trainer: insufficient unused quota for nvidia.com/gpu in flavor spot, "
PREEMPTED = (
    "Preempted to accommodate a workload (UID: 0f1e-2d3c, JobUID: 77) due to reclamation within the cohort; "
    "preemptor path: /company/team-b/gpu; preemptee path: /company/team-a/gpu"
)


def workload(status: dict[str, Any] | None = None, **metadata: Any) -> dict[str, Any]:
    owner: dict[str, Any] = {
        "apiVersion": "concertina.dev/v1beta1",
        "kind": "TrainingJob",
        "name": "j",
        "uid": "job",
        "controller": True,
    }
    container = {"name": "trainer", "resources": {"limits": {"nvidia.com/gpu": "8"}}}
    return {
        "metadata": {
            "name": "w", "namespace": "n", "uid": "u", "resourceVersion": "7", "generation": 2,
            "creationTimestamp": "2026-01-01T00:00:00Z", "ownerReferences": [owner],
            "finalizers": [manifest.FINALIZER], **metadata,
        },
        "spec": {
            "queueName": "team", "priority": 5,
            "podSets": [{"name": "trainer", "count": 4, "template": {"spec": {"containers": [container]}}}],
        },
        "status": status or {},
    }  # fmt: skip


def condition(kind: str, status: str, message: str = "", reason: str = "Pending") -> dict[str, Any]:
    since = "2026-01-01T00:00:01Z"
    return {
        "type": kind, "status": status, "reason": reason, "message": message, "lastTransitionTime": since,
        "observedGeneration": 2,
    }  # fmt: skip


def test_a_workload_is_read() -> None:
    admission = {
        "clusterQueue": "gpu",
        "podSetAssignments": [
            {
                "name": "trainer",
                "count": 4,
                "flavors": {"nvidia.com/gpu": "spot"},
                "resourceUsage": {"nvidia.com/gpu": 32},
            }
        ],
    }
    conditions = [condition("QuotaReserved", "True"), condition("Admitted", "True")]
    view = workload_view(workload({"admission": admission, "conditions": conditions}))
    assert (view.job_uid, view.queue, view.priority, view.has_finalizer) == ("job", "team", 5, True)
    assert view.admitted
    assert view.granted == {PodSet.TRAINER: 4}
    assert view.admission is not None
    assert view.admission["trainer"].per_pod("nvidia.com/gpu") == Decimal(8)
    assert view.requests == {"nvidia.com/gpu": Decimal(32)}


def test_a_lower_count_lowers_what_is_granted() -> None:
    raw = workload({"admission": {"podSetAssignments": [{"name": "trainer", "count": 4}]}})
    raw["spec"]["podSets"][0]["count"] = 1
    assert workload_view(raw).granted == {PodSet.TRAINER: 1}


def test_what_a_preemptor_lacks_is_read_from_its_message() -> None:
    message = SHORT + "3 more needed. Pending the preemption of 1 workload(s)"
    view = workload_view(workload({"conditions": [condition("QuotaReserved", "False", message)]}))
    assert view.shortfalls == {("nvidia.com/gpu", "spot"): Decimal(3)}
    assert view.victims == 1


def test_a_preemptor_is_named_by_its_uid() -> None:
    conditions = [condition("Evicted", "True", PREEMPTED, "Preempted")]
    view = workload_view(workload({"conditions": conditions, "admission": {"podSetAssignments": []}}))
    assert view.preemptor_uid == "0f1e-2d3c"
    assert view.evicted


def test_messages_name_no_other_tenant() -> None:
    shown = public(PREEMPTED)
    assert shown == "preempted for another workload (reclamation within the cohort)"
    other = public("Evicted to accommodate a workload (UID: 1-2-3) due to migration; preemptor path: /company/b")
    assert "1-2-3" not in other
    assert "/company" not in other


def test_a_workload_of_another_kind_has_no_job() -> None:
    owner = {"apiVersion": "example.com/v1", "kind": "TrainingJob", "name": "j", "uid": "job", "controller": True}
    assert workload_view(workload(ownerReferences=[owner])).job_uid == ""
    assert workload_view(workload(ownerReferences=[])).job_uid == ""


def test_a_slice_of_another_namespace_replaces_nothing() -> None:
    annotations = {manifest.REPLACEMENT_FOR: "other/first"}
    assert workload_view(workload(annotations=annotations)).replaces == ""
    assert workload_view(workload(annotations={manifest.REPLACEMENT_FOR: "n/first"})).replaces == "first"


def test_strange_values_are_bounded() -> None:
    strange = workload(
        {
            "conditions": [condition("QuotaReserved", "False", "x" * 100_000), {"no": "type"}, 5],
            "admission": {"podSetAssignments": [{"name": "trainer", "count": "many", "resourceUsage": {"cpu": "?"}}]},
            "admissionChecks": [{"podSetUpdates": 5}, "check"],
        },
        annotations={manifest.NUMBER: "9" * 30, manifest.SHRUNK_AT: "yesterday"},
    )
    strange["spec"]["priority"] = "high"
    strange["spec"]["podSets"] = [{"name": "trainer", "count": 10**30}, "set"]
    view = workload_view(strange)
    assert len(view.condition(ConditionName.QUOTA_RESERVED).message) == SENTENCE
    assert (view.number, view.shrunk_at, view.priority, view.counts) == (0, None, 0, {"trainer": 0})


def test_a_flavor_is_read() -> None:
    toleration = {"key": "spot", "operator": "Exists"}
    raw = {"metadata": {"name": "spot"}, "spec": {"nodeLabels": {"kind": "spot"}, "tolerations": [toleration]}}
    flavor = flavor_view(raw)
    assert (flavor.name, flavor.node_labels, flavor.tolerations) == ("spot", {"kind": "spot"}, (toleration,))


# --- manifests


def spec(**fields: Any) -> dict[str, Any]:
    container = {
        "name": "trainer", "image": "x", "command": ["x"], "env": [{"name": "A", "value": "1"}],
        "resources": {"limits": {"nvidia.com/gpu": "8"}},
    }  # fmt: skip
    return {"replicas": 4, "template": {"spec": {"containers": [container]}}, **fields}


def test_a_workload_asks_for_what_the_pods_use() -> None:
    job = job_view(manifests.job(spec()))
    assert job.spec is not None
    create = CreateWorkload(1, ((PodSet.TRAINER, 4),), 7, elastic=True)
    made = manifest.workload_manifest(job, job.spec, create, "team", None)
    assert made["spec"]["podSets"] == [
        {
            "name": "trainer",
            "count": 4,
            "template": {
                "spec": {"containers": [{"name": "trainer", "resources": {"limits": {"nvidia.com/gpu": "8"}}}]}
            },
        }
    ]
    assert made["metadata"]["annotations"][manifest.ELASTIC] == "true"
    assert len(made["metadata"]["name"]) <= 63
    assert made["metadata"]["finalizers"] == [manifest.FINALIZER]


def test_only_resources_and_placement_make_another_request() -> None:
    first = job_view(manifests.job(spec()))
    other_image = spec()
    other_image["template"]["spec"]["containers"][0]["image"] = "y"
    more = spec()
    more["template"]["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] = "4"
    assert first.request_hash == job_view(manifests.job(other_image)).request_hash
    assert first.request_hash != job_view(manifests.job(more)).request_hash
    assert first.request_hash != job_view(manifests.job(spec(elastic={"standbyReplicas": 1}))).request_hash


def test_an_admission_is_put_on_pods() -> None:
    toleration = {"key": "spot", "operator": "Exists"}
    changes = PodChanges({"a": "1"}, {"b": "2"}, {"kind": "spot"}, (toleration,), ("gate",))
    pod = {"metadata": {"labels": {"x": "y"}}, "spec": {"tolerations": [toleration], "nodeSelector": {"zone": "z"}}}
    made = manifest.admitted(pod, changes)
    assert made["metadata"] == {"labels": {"x": "y", "a": "1"}, "annotations": {"b": "2"}}
    assert made["spec"] == {
        "tolerations": [toleration],
        "nodeSelector": {"zone": "z", "kind": "spot"},
        "schedulingGates": [{"name": "gate"}],
    }


def test_an_admission_that_contradicts_the_template_is_named() -> None:
    fields = spec()
    fields["template"]["spec"]["nodeSelector"] = {"kind": "reserved"}
    job = job_view(manifests.job(fields))
    assert job.spec is not None
    changes = {PodSet.TRAINER: PodChanges(node_selector={"kind": "spot"})}
    assert "nodeSelector kind to spot" in manifest.conflict(job.spec, changes)
    assert manifest.conflict(job.spec, {PodSet.TRAINER: PodChanges(node_selector={"kind": "reserved"})}) == ""
