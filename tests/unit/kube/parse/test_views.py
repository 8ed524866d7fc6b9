"""Conversion of raw objects to the views that plan() reads."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import pytest

from concertina.api.status import unix_seconds
from concertina.kube.manifests.pod import END_POD
from concertina.kube.parse import views
from concertina.kube.parse.notice_taints import NOTICE_TAINTS
from concertina.kube.parse.views import job_view, node_view, pod_view
from concertina.plan.observed import PodPhase

JOB: dict[str, Any] = {
    "metadata": {
        "name": "j", "namespace": "n", "uid": "u", "generation": 1, "creationTimestamp": "2026-01-01T00:00:00Z",
    },
    "spec": {"template": {"spec": {"containers": [{"name": "trainer", "image": "i", "command": ["x"]}]}}},
}  # fmt: skip


OWNER = {"kind": "TrainingJob", "name": "j", "uid": "u", "controller": True}


def pod(status: dict[str, Any], **metadata: Any) -> dict[str, Any]:
    return {
        "metadata": {
            "name": "j-1-2",
            "namespace": "n",
            "uid": "p",
            "creationTimestamp": "2026-01-01T00:00:00Z",
            "labels": {
                "concertina.dev/job-uid": "u",
                "concertina.dev/replica-index": "1",
                "concertina.dev/attempt": "2",
            },
            "ownerReferences": [OWNER],
            **metadata,
        },
        "spec": {"nodeName": "node-1"},
        "status": status,
    }


def test_the_image_that_the_node_has_run() -> None:
    image = "docker.io/me/trainer@sha256:" + "a" * 64
    statuses = [{"name": "sidecar", "imageID": "other"}, {"name": "trainer", "imageID": image}]
    assert pod_view(pod({"phase": "Running", "containerStatuses": statuses})).view.image == image
    assert pod_view(pod({"phase": "Pending", "containerStatuses": [{"name": "trainer"}]})).view.image == ""
    long = [{"name": "trainer", "imageID": "i" * 9999}]
    assert len(pod_view(pod({"phase": "Running", "containerStatuses": long})).view.image) == 512


def test_a_running_pod() -> None:
    owned = pod_view(pod({"phase": "Running", "podIP": "127.1.2.3"}))
    view = owned.view
    assert owned.job_uid == "u"
    assert (view.index, view.attempt, view.node, view.ip, view.phase) == (1, 2, "node-1", "127.1.2.3", "Running")
    assert view.created == 1767225600.0
    assert not view.deleting
    assert view.exit_code is None


@pytest.mark.parametrize(("phase", "seen"), [("Sleeping", PodPhase.UNKNOWN), (None, PodPhase.PENDING)])
def test_a_phase_that_kubernetes_does_not_have_is_unknown(phase: str | None, seen: PodPhase) -> None:
    assert pod_view(pod({"phase": phase})).view.phase is seen


def test_a_pod_that_only_wears_our_labels_is_nobodys() -> None:
    assert pod_view(pod({}, ownerReferences=[])).job_uid == ""
    assert pod_view(pod({}, ownerReferences=[{**OWNER, "kind": "ReplicaSet"}])).job_uid == ""
    assert pod_view(pod({}, ownerReferences=[{**OWNER, "controller": False}])).job_uid == ""


@pytest.mark.parametrize(
    ("name", "index", "attempt"),
    [("j-1-2", 1, 2), ("j-0-0", 0, 0), ("j-10999-7", 10999, 7), ("j-rendezvous-3", None, 3)],
)
def test_a_pods_place_is_that_of_its_name(name: str, index: int | None, attempt: int) -> None:
    labels = {"concertina.dev/replica-index": "4000000000", "concertina.dev/attempt": "²", "concertina.dev/round": "x"}
    owned = pod_view(pod({}, name=name, labels=labels))
    assert (owned.job_uid, owned.view.index, owned.view.attempt, owned.view.round) == ("u", index, attempt, None)


@pytest.mark.parametrize("name", ["j-11000-0", "j-1-9999999999", "j-1", "j-x-0", "j-0-1-2", "k-0-0", "j-²-0", "j--1-0"])
def test_a_pod_of_no_such_name_is_nobodys(name: str) -> None:
    assert pod_view(pod({}, name=name)).job_uid == ""


def test_a_pod_that_was_told_to_end() -> None:
    long = pod({"phase": "Running"})
    long["spec"]["activeDeadlineSeconds"] = 3600  # of the template
    assert not pod_view(long).view.ending
    long["spec"] |= END_POD
    assert pod_view(long).view.ending


def test_deleting() -> None:
    assert pod_view(pod({}, deletionTimestamp="2026-01-01T00:00:00Z")).view.deleting


@pytest.mark.parametrize(
    ("metadata", "spec", "grace"),
    [
        ({}, {}, 30.0),
        ({}, {"terminationGracePeriodSeconds": 0}, 0.0),
        ({"deletionGracePeriodSeconds": 5}, {"terminationGracePeriodSeconds": 60}, 5.0),
    ],
)
def test_grace(metadata: dict[str, Any], spec: dict[str, Any], grace: float) -> None:
    assert pod_view({**pod({}, **metadata), "spec": spec}).view.grace == grace


def test_disruption() -> None:
    condition = {"type": "DisruptionTarget", "status": "True", "reason": "PreemptionByScheduler"}
    assert pod_view(pod({"conditions": [condition]})).view.disruption == "PreemptionByScheduler"
    assert pod_view(pod({"conditions": [{**condition, "status": "False"}]})).view.disruption == ""


def tainted(key: str, value: str = "") -> dict[str, Any]:
    taint = {"key": key, "effect": "NoSchedule", **({"value": value} if value else {})}
    return {"metadata": {"name": "n"}, "spec": {"taints": [{"key": "other", "effect": "NoSchedule"}, taint]}}


@pytest.mark.parametrize(
    ("key", "value", "notice"),
    [
        *((taint, "some-event-id", taint) for taint in NOTICE_TAINTS if "=" not in taint),
        ("karpenter.sh/disruption", "disrupting", "karpenter.sh/disruption=disrupting"),
        ("karpenter.sh/disruption", "candidate", ""),
        ("DeletionCandidateOfClusterAutoscaler", "1", ""),
        ("kubernetes.azure.com/scalesetpriority", "spot", ""),
        ("node.kubernetes.io/not-ready", "", ""),
        ("node.kubernetes.io/out-of-service", "nodeshutdown", ""),
    ],
)
def test_taints_that_announce_the_end_of_a_node(key: str, value: str, notice: str) -> None:
    assert node_view(tainted(key, value)).notice == notice


def test_a_list_of_ones_own_takes_the_place_of_the_well_known_taints() -> None:
    assert node_view(tainted("mine/going"), ("mine/going",)).notice == "mine/going"
    assert node_view(tainted(NOTICE_TAINTS[0]), ("mine/going",)).notice == ""


def conditioned(kind: str, status: str) -> dict[str, Any]:
    condition = {"type": kind, "status": status, "reason": "Why", "message": "7 of 8 GPUs"}
    return {"metadata": {"name": "n"}, "status": {"conditions": [{"type": "Ready", "status": "True"}, condition]}}


@pytest.mark.parametrize(
    ("kind", "status", "is_fault"),
    [
        ("GPUMissing", "True", True),
        ("GPUMissing", "False", False),
        ("GPUMissing", "Unknown", False),
        ("AcceleratedHardwareReady", "False", True),
        ("AcceleratedHardwareReady", "True", False),
        ("MemoryPressure", "True", False),
    ],
)
def test_conditions_that_say_that_a_node_is_faulty(kind: str, status: str, is_fault: bool) -> None:
    said = f"the node has the condition {kind}={status} (7 of 8 GPUs)" if is_fault else ""
    assert node_view(conditioned(kind, status)).fault == said


def test_the_time_since_which_a_node_is_faulty_is_that_of_its_oldest_fault() -> None:
    conditions = [
        {"type": kind, "status": "True", "lastTransitionTime": f"2026-01-01T00:00:{second}Z"}
        for kind, second in (("Ready", "01"), ("XIDErrors", "09"), ("GPUMissing", "05"))
    ]
    view = node_view({"metadata": {"name": "n"}, "status": {"conditions": conditions}})
    assert view.fault.startswith("the node has the condition GPUMissing=True")
    assert view.fault_since == unix_seconds("2026-01-01T00:00:05Z")
    assert node_view(conditioned("GPUMissing", "True")).fault_since == 0


def test_the_condition_of_a_drill_names_its_job() -> None:
    view = node_view(conditioned("ConcertinaDrill", "True"))
    assert (view.fault, view.drilled_job) == ("", "7 of 8 GPUs")


def test_a_list_of_ones_own_takes_the_place_of_the_well_known_conditions() -> None:
    assert node_view(conditioned("Mine", "True"), fault_conditions=("Mine",)).fault
    assert not node_view(conditioned("GPUMissing", "True"), fault_conditions=("Mine",)).fault


def test_the_zone_of_a_node() -> None:
    labels = {"topology.kubernetes.io/zone": "eu-1a"}
    assert node_view({"metadata": {"name": "n", "labels": labels}}).zone == "eu-1a"
    assert node_view({"metadata": {"name": "n"}}).zone == ""


def test_a_cordon() -> None:
    assert node_view({"metadata": {"name": "n"}, "spec": {"unschedulable": True}}).cordoned
    assert not node_view({"metadata": {"name": "n"}}).cordoned


def waiting(reason: str, message: str = "m", init: bool = False) -> dict[str, Any]:
    key = "initContainerStatuses" if init else "containerStatuses"
    return {key: [{"name": "x", "state": {"waiting": {"reason": reason, "message": message}}}]}


UNSCHEDULED = {"conditions": [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "no"}]}


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        ({}, ("", "")),
        (waiting("ContainerCreating"), ("", "")),
        (waiting("PodInitializing"), ("", "")),
        (waiting("ErrImagePull", "pull"), ("ErrImagePull", "pull")),
        (waiting("CrashLoopBackOff", init=True), ("CrashLoopBackOff", "m")),
        (UNSCHEDULED, ("Unschedulable", "no")),
    ],
)
def test_why_a_pod_waits(status: dict[str, Any], expected: tuple[str, str]) -> None:
    view = pod_view(pod(status)).view
    assert (view.waiting, view.waiting_message) == expected


def ended(code: int, reason: str, name: str = "trainer", init: bool = False, message: str = "") -> dict[str, Any]:
    key = "initContainerStatuses" if init else "containerStatuses"
    terminated = {"exitCode": code, "reason": reason, "message": message}
    return {key: [{"name": name, "state": {"terminated": terminated}}]}


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        (ended(137, "OOMKilled", message="big\n"), (137, "OOMKilled", "big")),
        (ended(0, "Completed"), (0, "Completed", "")),
        (ended(1, "Error", name="sidecar"), (1, "Error", "")),
        (ended(0, "Completed", name="sidecar"), (None, "", "")),
        (ended(2, "Error", name="concertina-agent", init=True), (2, "Error", "")),
        (ended(0, "Completed", name="concertina-agent", init=True), (None, "", "")),
        ({"phase": "Failed", "reason": "Evicted", "message": "low on disk"}, (None, "Evicted", "low on disk")),
        ({**ended(137, "Error"), "reason": "Evicted", "message": "low"}, (137, "Evicted", "low")),
    ],
)
def test_how_a_pod_ended(status: dict[str, Any], expected: tuple[int | None, str, str]) -> None:
    view = pod_view(pod(status)).view
    assert (view.exit_code, view.exit_reason, view.exit_message) == expected


def node(status: str, *taints: str) -> dict[str, Any]:
    condition = {"type": "Ready", "status": status, "lastTransitionTime": "2026-01-01T00:00:00Z"}
    return {
        "metadata": {"name": "a"},
        "spec": {"taints": [{"key": taint, "effect": "NoExecute"} for taint in taints]},
        "status": {"conditions": [condition]},
    }


def test_nodes() -> None:
    assert node_view(node("True")).ready
    for status in ("False", "Unknown"):
        assert not node_view(node(status)).ready
    assert node_view(node("Unknown", "node.kubernetes.io/out-of-service")).out_of_service
    assert not node_view({"metadata": {"name": "new"}}).ready


def test_a_job_whose_spec_is_wrong_has_a_sentence_and_keeps_its_status() -> None:
    view = job_view({**JOB, "spec": {**JOB["spec"], "replicas": "three"}, "status": {"rounds": 4}})
    assert view.spec is None
    assert "replicas" in view.spec_error
    assert view.status.rounds == 4


def test_whatever_goes_wrong_with_a_spec_is_that_jobs_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(obj: dict[str, Any]) -> None:
        raise AttributeError("nobody has foreseen this")

    monkeypatch.setattr(views, "parse_stored", broken)
    view = job_view(JOB)
    assert view.spec is None
    assert "AttributeError: nobody has foreseen this" in view.spec_error


def test_a_spec_is_parsed_once_for_each_generation() -> None:
    first = job_view(JOB)
    again = job_view({**JOB, "status": {"rounds": 1}}, first)
    assert again.spec is first.spec
    changed = {**JOB, "metadata": {**JOB["metadata"], "generation": 2}, "spec": {**JOB["spec"], "replicas": 3}}
    assert job_view(changed, again).spec.replicas == 3  # type: ignore[union-attr]


def test_of_a_status_that_is_half_wrong_the_world_is_kept() -> None:
    world = {"round": 3, "claim": {"round": 4, "claimId": "c"}}
    view = job_view({**JOB, "status": {"rounds": "many", "world": world}})
    assert view.status.world.claim is not None
    assert view.status.world.claim.round == 4


NEWER: dict[str, Any] = {
    "conditions": [
        {"type": "Brilliant", "status": "Very", "reason": "r", "lastTransitionTime": "2026-01-01T00:00:00Z"},
        {"type": "Complete", "status": "True", "reason": "Succeeded", "lastTransitionTime": "2026-01-01T00:00:00Z"},
        {"type": "Odd"},
    ],
    "world": {
        "round": 3,
        "copies": "Galaxy",
        "claim": {"round": 4, "claimId": "c"},
        "members": [{"replica": "j-0-0", "uid": "p", "instance": "i", "workers": 1}],
        "base": {"round": "three"},
    },
    "checkpointRequest": {"id": "x", "step": 1, "state": "Postponed", "at": "2026-01-01T00:00:00Z"},
    "rounds": 3,
}


def test_of_a_newer_versions_status_all_is_kept_that_can_be_read() -> None:
    status = job_view({**JOB, "status": NEWER}).status
    assert [(each.type, each.status) for each in status.conditions] == [("Complete", "True")]
    assert (status.world.round, [member.replica for member in status.world.members]) == (3, ["j-0-0"])
    assert status.world.claim is not None
    assert (status.world.claim.claim_id, status.world.copies, status.world.base) == ("c", "", None)
    assert (status.rounds, status.checkpoint_request) == (3, None)
    assert NEWER["world"]["copies"] == "Galaxy"  # The API server's object is unchanged.


@pytest.mark.parametrize("status", [{"conditions": "x"}, {"world": 7, "rounds": 2}, {"world": {"members": [{}, {}]}}])
def test_a_status_of_another_shape_is_read_as_far_as_it_goes(status: dict[str, Any]) -> None:
    assert job_view({**JOB, "status": status}).status.rounds == status.get("rounds", 0)


def test_what_a_node_offers() -> None:
    status = {"allocatable": {"cpu": "7910m", "memory": "16Gi", "pods": "110"}}
    view = node_view({"metadata": {"name": "n"}, "status": status})
    assert view.allocatable == {"cpu": Decimal("7.91"), "memory": 16 * 2**30, "pods": 110}
    assert node_view({"metadata": {"name": "n"}}).allocatable == {}


def test_what_a_pod_requests() -> None:
    def view(*containers: dict[str, Any]) -> dict[str, Decimal]:
        each = [{"name": "x", "resources": {"requests": requests}} for requests in containers]
        return dict(pod_view({**pod({}), "spec": {"containers": each}}).view.requests)

    assert view({"cpu": "100m", "nvidia.com/gpu": "2"}) == {"pods": 1, "cpu": Decimal("0.1"), "nvidia.com/gpu": 2}
    assert view({"cpu": "100m"}, {"cpu": "1", "memory": "1k"}) == {"pods": 1, "cpu": Decimal("1.1"), "memory": 1000}
    assert view({}) == {"pods": 1}


def test_a_pod_that_no_node_would_take() -> None:
    message = "0/1 nodes are available: 1 node(s) were unschedulable."
    condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}
    assert pod_view(pod({"conditions": [condition]})).view.excluded
    assert not pod_view(pod({"conditions": [{**condition, "status": "True"}]})).view.excluded
    assert not pod_view(pod({"conditions": [{**condition, "reason": "SchedulerError"}]})).view.excluded


def test_a_pod_names_its_scheduler_until_that_has_looked_at_it() -> None:
    unseen = {**pod({"phase": "Pending"}), "spec": {"schedulerName": "volcano"}}
    assert pod_view(unseen).view.awaited_scheduler == "volcano"
    assert pod_view({**unseen, "spec": {}}).view.awaited_scheduler == "default-scheduler"
    gated = {"type": "PodScheduled", "status": "False", "reason": "SchedulingGated"}
    assert pod_view({**unseen, "status": {"conditions": [gated]}}).view.awaited_scheduler == ""
    assert pod_view(pod({"phase": "Pending"})).view.awaited_scheduler == "", "it has a node"


@pytest.mark.parametrize("levels", [190, 250, 900, 5000])
def test_a_spec_that_is_nested_deeply_is_read_or_said_to_be(levels: int) -> None:
    nested: dict[str, Any] = {}
    for _ in range(levels):
        nested = {"a": nested}
    template = JOB["spec"]["template"]
    view = job_view({**JOB, "spec": {"template": {"spec": {**template["spec"], "more": nested}}}})
    assert "nested" in view.spec_error or view.template_hash
