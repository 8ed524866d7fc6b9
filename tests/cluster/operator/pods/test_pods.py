"""Fields of pods, on the real API server (strict about fields) and, if nodes here can provide them, in running pods."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from builders.cluster.operator_process import Jobs
from builders.until import until

pytestmark = pytest.mark.usefixtures("operator")
Object = dict[str, Any]
SAY = "import os; print('rank', os.environ['RANK'], 'of', os.environ['WORLD_SIZE'])"
STAY = SAY + "; import time; time.sleep(3600)"
IMAGE = "concertina/trainer:test"
RESTRICTED: Object = {
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
    "runAsNonRoot": True,
    "seccompProfile": {"type": "RuntimeDefault"},
}
GOOD_POD: Object = {"securityContext": {"runAsNonRoot": True, "runAsUser": 65532}}
FOREVER = ["python3", "-c", "import time; time.sleep(3600)"]


ELASTIC = {"minReplicas": 1, "scaleUp": {"stabilizationWindowSeconds": 1}}


def trainer(script: str = STAY, **fields: Any) -> Object:
    return {"name": "trainer", "image": IMAGE, "command": ["python3", "-uc", script], **fields}


ASKED: dict[str, Object] = {
    "host network": {"hostNetwork": True, "dnsPolicy": "ClusterFirstWithHostNet"},
    "host IPC": {"hostIPC": True},
    "RDMA": {
        "hostNetwork": True,
        "containers": [
            trainer(
                securityContext={"capabilities": {"add": ["IPC_LOCK"]}},
                resources={"limits": {"rdma/hca_shared_devices_a": "1", "memory": "1Gi"}},
                env=[{"name": "NCCL_IB_HCA", "value": "mlx5"}, {"name": "NCCL_SOCKET_IFNAME", "value": "eth0"}],
            )
        ],
    },
    "native sidecar": {
        "initContainers": [{"name": "s", "image": IMAGE, "restartPolicy": "Always", "command": FOREVER}]
    },
    "pull secrets": {"imagePullSecrets": [{"name": "registry"}]},
    "tolerations": {"tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}]},
    "node selector": {"nodeSelector": {"pool": "gpu"}},
    "affinity": {
        "affinity": {
            "podAffinity": {
                "preferredDuringSchedulingIgnoredDuringExecution": [
                    {"weight": 1, "podAffinityTerm": {"topologyKey": "rack", "labelSelector": {}}}
                ]
            }
        }
    },
    "volumes": {
        "volumes": [
            {"name": "claim", "persistentVolumeClaim": {"claimName": "data"}},
            {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "1Gi"}},
        ],
        "containers": [
            trainer(
                volumeMounts=[{"name": "claim", "mountPath": "/data"}, {"name": "shm", "mountPath": "/dev/shm"}],
                ports=[{"name": "metrics", "containerPort": 9000}],
            )
        ],
    },
    "service account": {"serviceAccountName": "default", "automountServiceAccountToken": False},
    "scheduling gate": {"schedulingGates": [{"name": "example.com/quota"}]},
    "resource claims": {"resourceClaims": [{"name": "gpu", "resourceClaimTemplateName": "one"}]},
    "runtime class": {"runtimeClassName": "given"},
    "priority class": {"priorityClassName": "given-{}"},
}


@pytest.fixture
def classes(jobs: Jobs) -> str:
    """Create a priority class and the runtime class `given`. Return the priority class's name, unique to the test."""
    name = f"given-{jobs.namespace}"
    priority = {"apiVersion": "scheduling.k8s.io/v1", "kind": "PriorityClass", "metadata": {"name": name}, "value": 7}
    runtime = {"apiVersion": "node.k8s.io/v1", "kind": "RuntimeClass", "metadata": {"name": "given"}, "handler": "runc"}
    for each in (priority, runtime):
        jobs.cluster.kubectl("apply", "-f", "-", stdin=json.dumps(each))
    return name


def test_all_that_templates_ask_for_reaches_the_pods(jobs: Jobs, classes: str) -> None:
    """No node has the label that the pods ask for, so that none of them runs."""
    wanted = {f"p{number}": {"nodeSelector": {"pool": "gpu"}, **pod} for number, pod in enumerate(ASKED.values())}
    wanted = json.loads(json.dumps(wanted).replace("given-{}", classes))
    for name, pod in wanted.items():
        jobs.create(name, STAY, pod=pod)
    for name, pod in wanted.items():
        until(lambda name=name: jobs.pods(name), f"a pod of {name}", lambda name=name: jobs.describe(name))
        (made,) = jobs.pods(name)
        for field, value in pod.items():
            assert contains(made["spec"][field], value), f"{name}: {field} is {made['spec'][field]}"
        container = next(each for each in made["spec"]["containers"] if each["name"] == "trainer")
        mounts = [mount["mountPath"] for mount in container["volumeMounts"]]
        assert mounts.count("/dev/shm") == ("hostIPC" not in pod)


def contains(found: Any, wanted: Any) -> bool:
    """Return whether the object contains all of `wanted`, except for the command, which the agent replaces.

    The operator and the API server may have added more.
    """
    if isinstance(wanted, dict):
        return all(key == "command" or (key in found and contains(found[key], wanted[key])) for key in wanted)
    if isinstance(wanted, list) and wanted and isinstance(wanted[0], dict):
        return all(any(contains(each, one) for each in found) for one in wanted)
    return bool(found == wanted)


@pytest.mark.long(
    law="tests/unit/kube/manifests/test_pod_needs.py::test_in_the_hosts_network_no_two_replicas_of_an_attempt_share_a_port"
)
def test_two_jobs_in_the_network_of_one_host(jobs: Jobs) -> None:
    node = {"nodeName": "node-1"}
    for name in ("a", "b"):
        jobs.create(
            name, STAY, replicas=2, pod={"hostNetwork": True, "nodeSelector": {"kubernetes.io/hostname": "node-1"}}
        )
    for name in ("a", "b"):
        jobs.wait_training(name, 2)
    made = [pod for name in ("a", "b") for pod in jobs.pods(name)]
    assert {pod["spec"]["nodeName"] for pod in made} == set(node.values())
    ports = [pod["spec"]["containers"][0]["ports"][0]["hostPort"] for pod in made]
    assert len(set(ports)) == 4
    assert len({pod["status"]["podIP"] for pod in made}) == 1


def test_a_namespace_that_enforces_restricted_pod_security(jobs: Jobs) -> None:
    jobs.cluster.kubectl("label", "ns", jobs.namespace, "pod-security.kubernetes.io/enforce=restricted")
    jobs.create("a", pod={"containers": [trainer(SAY, securityContext=RESTRICTED)]})
    jobs.wait_true("a", "Complete")


def test_a_sidecar_that_never_ends_holds_up_neither_success_nor_replacement(jobs: Jobs) -> None:
    sidecar = {"name": "side", "image": IMAGE, "command": FOREVER}
    jobs.create("a", pod={"containers": [trainer(SAY), sidecar]})
    never_again = {"containers": [trainer(STAY), sidecar], "restartPolicy": "Never"}
    jobs.create("b", pod=never_again, replicas=2, elastic=ELASTIC)
    jobs.wait_true("a", "Complete")
    jobs.wait_training("b", 2)
    coordinator = jobs.get("b")["status"]["world"]["coordinator"]
    os.kill(jobs.process("b", coordinator), signal.SIGKILL)
    jobs.wait("b", lambda job: coordinator not in jobs.members(job) and len(jobs.members(job)) == 2)
    jobs.wait_gone(f"pod/{coordinator}")
    jobs.wait("a", lambda _: all(pod["status"]["phase"] != "Running" for pod in jobs.pods("a")))


def env(name: str, value: str) -> Object:
    return {"env": [{"name": name, "value": value}]}


def test_images_that_cannot_run_the_agent_are_refused_in_a_sentence(jobs: Jobs, tmp_path: Path) -> None:
    jobs.create("none", pod={"containers": [trainer(SAY, **env("CONCERTINA_PYTHON", "/nowhere/python3"))]})
    old = tmp_path / "python3.8"
    old.write_text(f"#!{sys.executable}\n{OLD}")
    old.chmod(0o755)
    jobs.create("old", pod={"containers": [trainer(SAY, **env("CONCERTINA_PYTHON", str(old)))]})
    jobs.create("found", pod={"containers": [trainer(SAY, **env("CONCERTINA_PYTHON", sys.executable))]})
    stalled = jobs.wait_true("none", "Stalled")
    message = jobs.condition(stalled, "Stalled")["message"]
    assert "can't start /nowhere/python3" in message
    assert "CONCERTINA_PYTHON" in message
    stalled = jobs.wait_true("old", "Stalled")
    assert "needs Python 3.9 or newer" in jobs.condition(stalled, "Stalled")["message"]
    assert len(jobs.pods("old")) == 1, "no second try"
    jobs.wait_true("found", "Complete")
    jobs.patch("none", {"suspend": True})
    jobs.wait_true("none", "Suspended")
    jobs.patch("none", {"suspend": False, "template": {"spec": {"containers": [trainer(SAY)]}}})
    jobs.wait_true("none", "Complete")


OLD = """import runpy, sys
sys.version_info = (3, 8, 18)
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_what_is_missing_is_named_and_waited_for(jobs: Jobs) -> None:
    source = {"env": [{"name": "TOKEN", "valueFrom": {"secretKeyRef": {"name": "token", "key": "t"}}}]}
    jobs.create("a", pod={"containers": [trainer(SAY, **source)]})
    stalled = jobs.wait_true("a", "Stalled")
    assert 'secret "token" not found' in jobs.condition(stalled, "Stalled")["message"]
    jobs.cluster.kubectl("create", "secret", "generic", "token", "-n", jobs.namespace, "--from-literal=t=x")
    jobs.wait_true("a", "Complete")
