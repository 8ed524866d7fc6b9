"""Pods on the nodes of the local cluster: the view from inside a container, through the API server."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from builders.cluster.pods import Pods, condition, state, status_of
from concertina.local.errors import LocalClusterError

SERVE = """
import http.server, os
http.server.HTTPServer((os.environ["IP"], {port}), http.server.SimpleHTTPRequestHandler).serve_forever()
"""


def test_a_pod_runs_to_its_end(pods: Pods) -> None:
    pods.create("a", "import os; print(os.uname().nodename, os.getpid(), os.getcwd())", {"workingDir": "/usr/lib"})
    pod = pods.wait_phase("a", "Succeeded", "Failed")
    assert pod["status"]["phase"] == "Succeeded"
    ended = state(pod)["terminated"]
    assert (ended["exitCode"], ended["reason"]) == (0, "Completed")
    assert ended["startedAt"] <= ended["finishedAt"]
    assert ended["containerID"] == status_of(pod)["containerID"]
    conditions = {each["type"]: (each["status"], each.get("reason")) for each in pod["status"]["conditions"]}
    assert conditions["Ready"] == ("False", "PodCompleted")
    assert conditions["Initialized"] == ("True", "PodCompleted")
    assert conditions["PodScheduled"][0] == "True"
    assert pods.logs("a") == "a 1 /usr/lib\n"


def test_a_running_pod_is_ready_and_has_an_address_of_its_own(pods: Pods) -> None:
    for name in ("one", "two"):
        pods.create(name, "import time; time.sleep(600)")
    ready = [pods.wait(name, lambda pod: condition(pod, "Ready") == "True") for name in ("one", "two")]
    addresses = {pod["status"]["podIP"] for pod in ready}
    assert len(addresses) == 2
    assert all(address.startswith("127.") for address in addresses)
    for pod in ready:
        assert pod["status"]["podIPs"] == [{"ip": pod["status"]["podIP"]}]
        assert pod["status"]["hostIP"] != pod["status"]["podIP"]
        assert status_of(pod)["started"] is True
        assert "running" in state(pod)
        assert condition(pod, "PodReadyToStartContainers") == "True"
        assert pod["status"]["startTime"]


def test_environment(pods: Pods) -> None:
    pods.put("configmaps", "settings", {"LEVEL": "high", "other": "x"})
    pods.put("secrets", "login", {"user": "ada", "password": "s3cret"})
    env = [
        {"name": "NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
        {"name": "IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
        {"name": "NODE", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}},
        {"name": "APP", "valueFrom": {"fieldRef": {"fieldPath": "metadata.labels['app']"}}},
        {"name": "CPUS", "valueFrom": {"resourceFieldRef": {"resource": "limits.cpu", "divisor": "1m"}}},
        {"name": "MEMORY", "valueFrom": {"resourceFieldRef": {"resource": "requests.memory", "divisor": "1Mi"}}},
        {"name": "LEVEL_AGAIN", "valueFrom": {"configMapKeyRef": {"name": "settings", "key": "LEVEL"}}},
        {"name": "USER", "valueFrom": {"secretKeyRef": {"name": "login", "key": "user"}}},
        {"name": "ABSENT", "valueFrom": {"secretKeyRef": {"name": "nothing", "key": "user", "optional": True}}},
        {"name": "URL", "value": "http://$(IP):80/$(USER)$$(USER)$(UNKNOWN)"},
    ]
    container: dict[str, Any] = {
        "env": env,
        "envFrom": [{"configMapRef": {"name": "settings"}}, {"prefix": "LOGIN_", "secretRef": {"name": "login"}}],
        "resources": {"limits": {"cpu": "500m", "memory": "64Mi"}},
        "args": ["$(NAME)-$(LEVEL)"],
    }
    script = "import os, sys, json; print(json.dumps(dict(os.environ) | {'argument': sys.argv[1]}))"
    environment = json.loads(pods.run("a", script, container))
    pod = pods.get("a")
    address = pod["status"]["podIP"]
    expected = {
        "NAME": "a",
        "IP": address,
        "NODE": pod["spec"]["nodeName"],
        "APP": "a",
        "CPUS": "500",
        "MEMORY": "64",
        "LEVEL": "high",
        "LEVEL_AGAIN": "high",
        "other": "x",
        "USER": "ada",
        "LOGIN_password": "s3cret",
        "URL": f"http://{address}:80/ada$(USER)$(UNKNOWN)",
        "argument": "a-high",
        "HOSTNAME": "a",
    }
    assert {key: environment.get(key) for key in expected} == expected
    assert "ABSENT" not in environment


def test_the_callers_environment_stays_outside(pods: Pods) -> None:
    names = set(json.loads(pods.run("a", "import os, json; print(json.dumps(list(os.environ)))")))
    kubernetes = {
        "KUBERNETES_SERVICE_HOST",
        "KUBERNETES_SERVICE_PORT",
        "KUBERNETES_SERVICE_PORT_HTTPS",
        "KUBERNETES_PORT",
    }
    assert names - {"LC_CTYPE"} == {"PATH", "HOME", "LANG", "HOSTNAME", "VIRTUAL_ENV"} | kubernetes


def test_a_client_in_a_pod_reaches_the_api_server_with_its_own_rights(pods: Pods) -> None:
    script = """
import os, ssl, urllib.error, urllib.request
folder = "/var/run/secrets/kubernetes.io/serviceaccount/"
token, namespace = open(folder + "token").read(), open(folder + "namespace").read()
server = f"https://{os.environ['KUBERNETES_SERVICE_HOST']}:{os.environ['KUBERNETES_SERVICE_PORT']}"
url = f"{server}/api/v1/namespaces/{namespace}/pods"
request = urllib.request.Request(url, headers={"Authorization": "Bearer " + token})
try:
    urllib.request.urlopen(request, context=ssl.create_default_context(cafile=folder + "ca.crt"))
except urllib.error.HTTPError as error:
    print(error.code, error.read().decode())
"""
    output = pods.run("a", script)
    assert output.startswith("403 ")
    assert f"system:serviceaccount:{pods.namespace}:default" in output


def test_init_containers_run_first_one_after_another_and_share_volumes(pods: Pods) -> None:
    mount = {"volumeMounts": [{"name": "disk", "mountPath": "/disk"}], "image": "concertina/agent:1"}
    inits = [
        {"name": name, "command": ["python3", "-c", f"open('/disk/log', 'a').write('{name} ')"]} | mount
        for name in ("first", "second")
    ]
    script = "print(open('/disk/log').read())"
    volumes = [{"name": "disk", "emptyDir": {}}]
    assert pods.run("a", script, mount, volumes=volumes, initContainers=inits) == "first second \n"
    codes = [each["state"]["terminated"]["exitCode"] for each in pods.get("a")["status"]["initContainerStatuses"]]
    assert codes == [0, 0]


def test_an_init_container_that_fails_fails_the_pod(pods: Pods) -> None:
    inits = [{"name": "first", "image": "concertina/agent:1", "command": ["sh", "-c", "exit 3"]}]
    pods.create("a", "print('never')", initContainers=inits)
    pod = pods.wait_phase("a", "Failed")
    assert state(pod, "initContainerStatuses")["terminated"]["exitCode"] == 3
    assert state(pod)["waiting"]["reason"] == "PodInitializing"
    assert condition(pod, "Initialized") == "False"


def test_a_sidecar_serves_the_containers_and_ends_after_them(pods: Pods) -> None:
    serve = SERVE.format(port=8765)
    ip = {"name": "IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}
    sidecar = {
        "name": "side",
        "image": "concertina/agent:1",
        "command": ["python3", "-c", serve],
        "env": [ip],
        "restartPolicy": "Always",
        "startupProbe": {"tcpSocket": {"port": 8765}, "periodSeconds": 1, "failureThreshold": 30},
    }
    script = "import os, urllib.request as u; print(u.urlopen(f'http://{os.environ[\"IP\"]}:8765/').status)"
    output = pods.run("a", script, {"env": [ip]}, initContainers=[sidecar])
    assert output == "200\n"


def test_an_http_probe_asks_the_pods_own_address(pods: Pods) -> None:
    serve = SERVE.format(port=8080)
    container = {
        "env": [{"name": "IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}],
        "ports": [{"name": "web", "containerPort": 8080}],
        "readinessProbe": {"httpGet": {"path": "/", "port": "web"}, "periodSeconds": 1},
    }
    for name in ("one", "two"):  # Both containers use the same port, at different addresses.
        pods.create(name, serve, container)
    for name in ("one", "two"):
        pods.wait(name, lambda pod: condition(pod, "Ready") == "True")


def test_logs(pods: Pods) -> None:
    pods.create("a", "import time\nfor i in range(5): print(i); time.sleep(0.2)")
    pods.wait("a", lambda pod: condition(pod, "Ready") == "True")
    assert pods.logs("a", "-f") == "0\n1\n2\n3\n4\n"
    assert pods.logs("a", "--tail=2") == "3\n4\n"
    stamped = pods.logs("a", "--timestamps", "--tail=1")
    assert stamped.endswith("Z 4\n")
    assert pods.logs("a", "--since=1h") == "0\n1\n2\n3\n4\n"
    assert pods.logs("a", "--since-time=2999-01-01T00:00:00Z") == ""
    with pytest.raises(LocalClusterError, match="previous terminated container"):
        pods.logs("a", "--previous")


@pytest.fixture
def device() -> Iterator[Path]:
    """Yield the path of a file that stands for a GPU of this machine."""
    path = Path("/dev/nvidia-of-a-test")
    try:
        path.touch()
    except OSError:
        pytest.skip("nothing can be put into this machine's /dev: who sees its GPUs was not tried")
    yield path
    path.unlink()


def test_gpus_are_seen_by_who_asks_for_one(pods: Pods, device: Path) -> None:
    """If every container saw the GPU, all workers of the machine would share it, which NCCL refuses."""
    script = f"import os; print(os.path.exists('{device}'))"
    assert pods.run("without", script) == "False\n"
    assert pods.run("with", script, {"resources": {"limits": {"nvidia.com/gpu": "1"}}}) == "True\n"


def test_simulated_gpus_are_counted(pods: Pods) -> None:
    limits = {"resources": {"limits": {"nvidia.com/gpu": "2"}}}
    script = "import time; time.sleep(600)"
    for index in range(3):
        pods.create(f"gpu-{index}", script, limits)
    nodes = {pods.wait_phase(f"gpu-{index}", "Running")["spec"]["nodeName"] for index in range(3)}
    assert len(nodes) == 3
    pods.create("one-more", script, limits)
    pod = pods.wait("one-more", lambda pod: condition(pod, "PodScheduled") == "False")
    assert "nvidia.com/gpu" in str(pod["status"]["conditions"])
