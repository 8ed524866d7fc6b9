"""Requirements of pods: ports, shared memory, no service mesh, the image's Python, an unprivileged init container."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from builders.manifests import container, environment, job, made
from concertina.api.quantity_fields import bytes_of
from concertina.kube.manifests.agent_container import HOST_PORTS
from concertina.kube.parse.views import pod_view
from concertina.kube.resources import Raw
from concertina.plan.actions import CreatePod

TEMPLATE: Raw = {"containers": [{"name": "trainer", "image": "i", "command": ["x"]}]}


def pod_of(create: CreatePod = CreatePod(0, 0), trainer: Raw | None = None, **fields: Any) -> Raw:  # noqa: B008
    changed = {**TEMPLATE["containers"][0], **(trainer or {})}
    return made(job({"template": {"spec": {**TEMPLATE, "containers": [changed], **fields}}}), create)


def seen(pod: Raw) -> Any:
    """Return the view of the pod as the operator reads it once it is stored."""
    metadata = {**pod["metadata"], "uid": "u", "creationTimestamp": "2026-01-01T00:00:00Z", "namespace": "n"}
    return pod_view({**pod, "metadata": metadata}).view


def test_a_pod_of_its_own_network_has_the_usual_port_and_takes_none_of_the_host() -> None:
    pod = pod_of()
    assert environment(pod)["CONCERTINA_PORT"] == "29400"
    assert container(pod)["ports"] == [{"name": "concertina", "containerPort": 29400, "protocol": "TCP"}]
    assert seen(pod).port == 29400


@given(st.lists(st.tuples(st.integers(0, 6999), st.integers(0, 50)), min_size=2, max_size=2, unique=True))
def test_in_the_hosts_network_no_two_replicas_of_an_attempt_share_a_port(two: list[tuple[int, int]]) -> None:
    ports = []
    for index, attempt in two:
        pod = pod_of(CreatePod(index, attempt), hostNetwork=True)
        (declared,) = container(pod)["ports"]
        assert declared["hostPort"] == declared["containerPort"] == seen(pod).port
        assert environment(pod)["CONCERTINA_PORT"] == str(seen(pod).port)
        assert seen(pod).port in HOST_PORTS
        ports.append(seen(pod).port)
    (first, attempt), (second, other) = two
    if attempt == other or first == second:  # Several replicas of one attempt, or several attempts of one replica.
        assert ports[0] != ports[1]


@pytest.mark.parametrize(
    ("trainer", "fields", "expected"),
    [
        ({}, {}, {"medium": "Memory"}),
        ({"resources": {"limits": {"memory": "8Gi"}}}, {}, {"medium": "Memory", "sizeLimit": str(4 << 30)}),
        ({"resources": {"limits": {"memory": "100Mi"}}}, {}, {"medium": "Memory", "sizeLimit": str(64 << 20)}),
        ({"volumeMounts": [{"name": "mine", "mountPath": "/dev/shm/"}]}, {}, None),
        ({}, {"hostIPC": True}, None),
    ],
    ids=["no limit", "half of the memory", "never less than runtimes give", "one's own", "the host's"],
)
def test_shared_memory(trainer: Raw, fields: Raw, expected: Raw | None) -> None:
    pod = pod_of(trainer=trainer, **fields)
    volumes = {volume["name"]: volume.get("emptyDir") for volume in pod["spec"]["volumes"]}
    mounts = {mount["name"]: mount["mountPath"] for mount in container(pod)["volumeMounts"]}
    assert volumes.get("concertina-shm") == expected
    assert mounts.get("concertina-shm") == (expected and "/dev/shm")


def test_the_templates_own_words_about_the_mesh_win() -> None:
    key = "config.linkerd.io/skip-inbound-ports"
    spec = {"metadata": {"annotations": {key: "29400"}}, "spec": TEMPLATE}
    annotations = made(job({"template": spec}))["metadata"]["annotations"]
    assert annotations[key] == "29400"
    assert annotations["traffic.sidecar.istio.io/includeInboundPorts"] == ""


def test_a_python_of_the_images_own() -> None:
    pod = pod_of(trainer={"env": [{"name": "CONCERTINA_PYTHON", "value": "/opt/python/bin/python"}]})
    assert container(pod)["command"][:2] == ["/opt/python/bin/python", "/concertina/agent.pyz"]


def test_the_init_container_has_the_trainers_user_and_none_of_its_rights() -> None:
    theirs = {"runAsUser": 1000, "privileged": True, "capabilities": {"add": ["IPC_LOCK"]}}
    pod = pod_of(trainer={"securityContext": theirs})
    assert pod["spec"]["initContainers"][0]["securityContext"] == {
        "runAsUser": 1000,
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "readOnlyRootFilesystem": True,
    }
    assert container(pod)["securityContext"] == theirs


@pytest.mark.parametrize(
    ("quantity", "expected"),
    [("8Gi", 8 << 30), ("1.5Ki", 1536), ("500M", 500_000_000), (1024, 1024), ("1e3", 1000), ("1500m", 1),
     ("1E", 10**18), (None, 0), ("", 0), ("lots", 0)],
)  # fmt: skip
def test_quantities(quantity: object, expected: int) -> None:
    assert bytes_of(quantity) == expected


@pytest.mark.parametrize(
    ("policy", "trainer", "expected"),
    [
        ("Never", {"terminated": {"exitCode": 0}}, ("Succeeded", True)),
        ("Never", {"terminated": {"exitCode": 9}}, ("Failed", True)),
        ("OnFailure", {"terminated": {"exitCode": 9}}, ("Running", False)),
        ("OnFailure", {"terminated": {"exitCode": 0}}, ("Succeeded", True)),
        ("OnFailure", {"waiting": {"reason": "CrashLoopBackOff"}}, ("Failed", True)),
        ("OnFailure", {"waiting": {"reason": "ContainerCreating"}}, ("Running", False)),
        ("Never", {"running": {}}, ("Running", False)),
    ],
)
def test_a_pod_ends_with_its_trainer_whatever_sidecars_do(
    policy: str, trainer: Raw, expected: tuple[str, bool]
) -> None:
    pod = pod_of(restartPolicy=policy)
    states = [
        {"name": "side", "state": {"running": {}}},
        {"name": "trainer", "state": trainer, "lastState": {"terminated": {"exitCode": 69, "message": "too old"}}},
    ]
    view = seen({**pod, "status": {"phase": "Running", "containerStatuses": states}})
    assert (view.phase, view.lingers) == expected


@pytest.mark.parametrize(("kind", "phase"), [({}, "Failed"), ({"restartPolicy": "Always"}, "Pending")])
def test_an_init_container_that_fails_again_and_again_ends_the_pod_and_a_sidecar_does_not(
    kind: Raw, phase: str
) -> None:
    pod = pod_of(initContainers=[{"name": "first", "image": "i", **kind}])
    held = {"waiting": {"reason": "CrashLoopBackOff"}}
    last = {"terminated": {"exitCode": 3, "reason": "Error"}}
    status = {"phase": "Pending", "initContainerStatuses": [{"name": "first", "state": held, "lastState": last}]}
    view = seen({**pod, "status": status})
    assert view.phase == phase
    assert phase == "Pending" or (view.exit_code, view.exit_reason) == (3, "Error")
