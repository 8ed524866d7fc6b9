"""Pods on the nodes of the local cluster: what a container sees, and what becomes of it, through the API server."""

import json
import time
from pathlib import Path
from typing import Any

import pytest

from builders.pods import Pods, condition, state, status_of
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
    found = [pods.wait(name, lambda pod: condition(pod, "Ready") == "True") for name in ("one", "two")]
    addresses = {pod["status"]["podIP"] for pod in found}
    assert len(addresses) == 2
    assert all(address.startswith("127.") for address in addresses)
    for pod in found:
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
    found = json.loads(pods.run("a", script, container))
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
    assert {key: found.get(key) for key in expected} == expected
    assert "ABSENT" not in found


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
    said = pods.run("a", script)
    assert said.startswith("403 ")
    assert f"system:serviceaccount:{pods.namespace}:default" in said


def test_volumes(pods: Pods, tmp_path_factory: pytest.TempPathFactory) -> None:
    host = tmp_path_factory.mktemp("host")
    (host / "file").write_text("from the machine")
    pods.put("configmaps", "settings", {"a.txt": "A", "b.txt": "B"})
    pods.put("secrets", "login", {"user": "ada"})
    token = {"serviceAccountToken": {"path": "token", "audience": "somebody", "expirationSeconds": 600}}
    label = {"downwardAPI": {"items": [{"path": "labels", "fieldRef": {"fieldPath": "metadata.labels"}}]}}
    volumes = [
        {
            "name": "map",
            "configMap": {"name": "settings", "items": [{"key": "a.txt", "path": "deep/a"}], "defaultMode": 0o440},
        },
        {"name": "secret", "secret": {"secretName": "login"}},
        {"name": "both", "projected": {"sources": [token, label, {"configMap": {"name": "settings"}}]}},
        {"name": "disk", "emptyDir": {}},
        {"name": "memory", "emptyDir": {"medium": "Memory", "sizeLimit": "4Mi"}},
        {"name": "host", "hostPath": {"path": str(host), "type": "Directory"}},
        {"name": "absent", "configMap": {"name": "nothing", "optional": True}},
    ]
    mounts = [
        {"name": "map", "mountPath": "/etc/settings"},
        {"name": "secret", "mountPath": "/run/login"},
        {"name": "both", "mountPath": "/both"},
        {"name": "disk", "mountPath": "/data"},
        {"name": "disk", "mountPath": "/data-part", "subPath": "part"},
        {"name": "map", "mountPath": "/one-file", "subPath": "deep/a"},
        {"name": "memory", "mountPath": "/memory/inner"},
        {"name": "host", "mountPath": "/host", "readOnly": True},
        {"name": "absent", "mountPath": "/absent"},
    ]
    script = """
import errno, json, os
read = lambda path: open(path).read()
shown = lambda folder: sorted(name for name in os.listdir(folder) if name[0] != ".")
memory = os.statvfs("/memory/inner")
def attempt(action):
    try:
        action()
    except OSError as error:
        return errno.errorcode[error.errno]
open("/data/x", "w").write("x")
open("/data-part/y", "w").write("y")
print(json.dumps({
    "map": [read("/etc/settings/deep/a"), shown("/etc/settings"), oct(os.stat("/etc/settings/deep/a").st_mode)[-3:]],
    "one file": read("/one-file"),
    "secret": read("/run/login/user"),
    "both": [shown("/both"), read("/both/labels"), read("/both/token").count(".")],
    "disk": sorted(os.listdir("/data")) + os.listdir("/data/part"),
    "memory": [memory.f_blocks * memory.f_frsize, os.path.ismount("/memory/inner"),
               attempt(lambda: open("/memory/inner/big", "wb").write(bytes(5 << 20)))],
    "host": [read("/host/file"), attempt(lambda: open("/host/new", "w"))],
    "absent": shown("/absent"),
    "read only": attempt(lambda: open("/etc/settings/new", "w")),
    "machine": os.path.exists("/etc/passwd") and os.path.isdir("/usr/bin"),
    "shm": os.path.ismount("/dev/shm"),
}))
"""
    found = json.loads(pods.run("a", script, {"volumeMounts": mounts}, volumes=volumes))
    assert found == {
        "map": ["A", ["deep"], "440"],
        "one file": "A",
        "secret": "ada",
        "both": [["a.txt", "b.txt", "labels", "token"], 'app="a"', 2],
        "disk": ["part", "x", "y"],
        "memory": [4 << 20, True, "ENOSPC"],
        "host": ["from the machine", "EROFS"],
        "absent": [],
        "read only": "EROFS",
        "machine": True,
        "shm": True,
    }
    assert sorted(path.name for path in host.iterdir()) == ["file"]


def test_volumes_leave_no_trace_on_the_machine(pods: Pods) -> None:
    volumes = [{"name": "memory", "emptyDir": {"medium": "Memory"}}]
    mounts = [{"name": "memory", "mountPath": "/no-such-folder/inner"}]
    pods.run("a", "open('/no-such-folder/inner/x', 'w')", {"volumeMounts": mounts}, volumes=volumes)
    with open("/proc/self/mountinfo") as file:
        assert str(pods.cluster.directory) not in file.read()
    assert not Path("/no-such-folder").exists()


def test_a_volume_that_cannot_be_had_is_waited_for(pods: Pods) -> None:
    volumes = [{"name": "map", "configMap": {"name": "late"}}]
    pods.create(
        "a", "print(open('/map/key').read())", {"volumeMounts": [{"name": "map", "mountPath": "/map"}]}, volumes=volumes
    )
    pod = pods.wait("a", lambda pod: 'configmap "late" not found' in str(status_of(pod)))
    assert state(pod)["waiting"]["reason"] == "ContainerCreating"
    assert pod["status"]["phase"] == "Pending"
    pods.put("configmaps", "late", {"key": "at last"})
    pods.wait_phase("a", "Succeeded")
    assert pods.logs("a") == "at last\n"


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
    said = pods.run("a", script, {"env": [ip]}, initContainers=[sidecar])
    assert said == "200\n"


@pytest.mark.parametrize(
    ("script", "code", "reason"),
    [("raise SystemExit(7)", 7, "Error"), ("import os, ctypes; ctypes.string_at(0)", 139, "Error")],
)
def test_exit_codes(pods: Pods, script: str, code: int, reason: str) -> None:
    pods.create("a", script)
    ended = state(pods.wait_phase("a", "Failed"))["terminated"]
    assert (ended["exitCode"], ended["reason"]) == (code, reason)


def test_a_command_that_is_not_there(pods: Pods) -> None:
    pods.create("a", "", {"command": ["no-such-program"]})
    ended = state(pods.wait_phase("a", "Failed"))["terminated"]
    assert (ended["exitCode"], ended["reason"]) == (128, "StartError")
    assert '"no-such-program": executable file not found in $PATH' in ended["message"]


def test_termination_messages(pods: Pods) -> None:
    pods.create("file", "open('/dev/termination-log', 'w').write('why it ended')")
    fallback = {"terminationMessagePolicy": "FallbackToLogsOnError"}
    pods.create("logs", "print('last words'); raise SystemExit(1)", fallback)
    assert state(pods.wait_phase("file", "Succeeded"))["terminated"]["message"] == "why it ended"
    assert state(pods.wait_phase("logs", "Failed"))["terminated"]["message"] == "last words\n"


def test_an_image_that_is_not_mapped(pods: Pods) -> None:
    pods.create("a", "", {"image": "somewhere.else/image:1"})
    pod = pods.wait(
        "a", lambda pod: state(pod).get("waiting", {}).get("reason") == "ErrImagePull" if status_of(pod) else False
    )
    assert "--image somewhere.else/image=/path/to/venv" in state(pod)["waiting"]["message"]
    pod = pods.wait("a", lambda pod: state(pod)["waiting"]["reason"] == "ImagePullBackOff")
    assert "--image somewhere.else/image=" in state(pod)["waiting"]["message"]
    assert pod["status"]["phase"] == "Pending"


def test_a_container_without_a_command(pods: Pods) -> None:
    pods.create("a", "", {"command": []})
    pod = pods.wait("a", lambda pod: "CreateContainerConfigError" in str(status_of(pod)))
    assert "has no command" in state(pod)["waiting"]["message"]


def test_a_missing_secret_is_waited_for(pods: Pods) -> None:
    pods.create("a", "import os; print(os.environ['user'])", {"envFrom": [{"secretRef": {"name": "late"}}]})
    pod = pods.wait("a", lambda pod: "CreateContainerConfigError" in str(status_of(pod)))
    assert state(pod)["waiting"]["message"] == 'secret "late" not found'
    pods.put("secrets", "late", {"user": "ada"})
    pods.wait_phase("a", "Succeeded")
    assert pods.logs("a") == "ada\n"


def test_restarts_back_off(pods: Pods) -> None:
    pods.create("a", "raise SystemExit(1)", restartPolicy="OnFailure")
    pod = pods.wait(
        "a", lambda pod: state(pod).get("waiting", {}).get("reason") == "CrashLoopBackOff" if status_of(pod) else False
    )
    assert pod["status"]["phase"] == "Running"
    assert status_of(pod)["restartCount"] == 1  # the first restart waits for nothing, the next 10 s
    assert status_of(pod)["lastState"]["terminated"]["exitCode"] == 1
    assert "back-off 10s" in state(pod)["waiting"]["message"]
    assert condition(pod, "Ready") == "False"


def test_on_failure_ends_with_success_and_keeps_its_volumes_in_between(pods: Pods) -> None:
    script = """
import os, sys
first = not os.path.exists("/disk/x")
open("/disk/x", "w")
print("first" if first else "second")
sys.exit(first)
"""
    mount = {"volumeMounts": [{"name": "disk", "mountPath": "/disk"}]}
    volumes = [{"name": "disk", "emptyDir": {"medium": "Memory"}}]
    pods.create("a", script, mount, volumes=volumes, restartPolicy="OnFailure")
    pod = pods.wait_phase("a", "Succeeded")
    assert status_of(pod)["restartCount"] == 1
    assert pods.logs("a") == "second\n"
    assert pods.logs("a", "--previous") == "first\n"


def test_readiness_follows_the_probe(pods: Pods) -> None:
    script = """
import os, time
time.sleep(0.3)
open("/disk/ready", "w")
time.sleep(1.5)
os.remove("/disk/ready")
time.sleep(600)
"""
    probe = {"exec": {"command": ["test", "-e", "/disk/ready"]}, "periodSeconds": 1, "failureThreshold": 1}
    container = {"readinessProbe": probe, "volumeMounts": [{"name": "disk", "mountPath": "/disk"}]}
    pods.create("a", script, container, volumes=[{"name": "disk", "emptyDir": {}}])
    pods.wait(
        "a", lambda pod: "running" in state(pod) and condition(pod, "Ready") == "False" if status_of(pod) else False
    )
    pods.wait("a", lambda pod: condition(pod, "Ready") == "True" and status_of(pod)["ready"])
    pods.wait("a", lambda pod: condition(pod, "Ready") == "False" and condition(pod, "ContainersReady") == "False")


def test_an_http_probe_asks_the_pods_own_address(pods: Pods) -> None:
    serve = SERVE.format(port=8080)
    container = {
        "env": [{"name": "IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}],
        "ports": [{"name": "web", "containerPort": 8080}],
        "readinessProbe": {"httpGet": {"path": "/", "port": "web"}, "periodSeconds": 1},
    }
    for name in ("one", "two"):  # the same port twice: an address each
        pods.create(name, serve, container)
    for name in ("one", "two"):
        pods.wait(name, lambda pod: condition(pod, "Ready") == "True")


def test_a_failing_liveness_probe_restarts_the_container(pods: Pods) -> None:
    probe = {"exec": {"command": ["false"]}, "periodSeconds": 1, "failureThreshold": 1}
    script = "import time; time.sleep(600)"
    pods.create("a", script, {"livenessProbe": probe}, restartPolicy="Always")
    pod = pods.wait("a", lambda pod: status_of(pod).get("restartCount", 0) >= 1)
    assert status_of(pod)["lastState"]["terminated"]["exitCode"] == 137


def test_deletion_is_graceful(pods: Pods) -> None:
    script = """
import signal, sys, time
def stop(*_):
    open('/host/log', 'a').write('asked ')
    sys.exit(5)
signal.signal(signal.SIGTERM, stop)
print('ready')
time.sleep(600)
"""
    hook = {"preStop": {"exec": {"command": ["sh", "-c", "echo -n 'hook ' >> /host/log"]}}}
    container = {"lifecycle": hook, "volumeMounts": [{"name": "host", "mountPath": "/host"}]}
    folder = pods.cluster.directory / f"test-{pods.namespace}"
    folder.mkdir()
    pods.create("a", script, container, volumes=[{"name": "host", "hostPath": {"path": str(folder)}}])
    pods.wait("a", lambda pod: "ready" in pods.logs("a") if condition(pod, "Ready") == "True" else False)
    pods.delete("a")
    pods.wait_gone("a")
    assert (folder / "log").read_text() == "hook asked "


def test_a_deaf_process_is_killed_after_its_grace(pods: Pods) -> None:
    script = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('ready'); time.sleep(600)"
    pods.create("a", script)
    pods.wait("a", lambda pod: "ready" in pods.logs("a") if condition(pod, "Ready") == "True" else False)
    pods.cluster.kubectl("patch", "pod", "-n", pods.namespace, "a", "-p", '{"metadata":{"finalizers":["test/keep"]}}')
    pods.delete("a")
    pod = pods.wait_phase("a", "Failed")
    assert state(pod)["terminated"]["exitCode"] == 137
    pods.cluster.kubectl("patch", "pod", "-n", pods.namespace, "a", "-p", '{"metadata":{"finalizers":null}}')
    pods.wait_gone("a")


def test_a_forced_deletion_kills(pods: Pods) -> None:
    folder = pods.cluster.directory / f"test-{pods.namespace}"
    folder.mkdir()
    script = """
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
while True:
    open("/host/alive", "w")
    time.sleep(0.05)
"""
    mount = {"volumeMounts": [{"name": "host", "mountPath": "/host"}]}
    pods.create("a", script, mount, volumes=[{"name": "host", "hostPath": {"path": str(folder)}}])
    alive = folder / "alive"
    pods.wait("a", lambda _: alive.exists())
    pods.delete("a", gracePeriodSeconds=0)
    pods.create("b", "print(1)")  # gone from the API at once, from the machine soon
    pods.wait("b", lambda _: not _comes_back(alive))


def _comes_back(path: Path) -> bool:
    path.unlink(missing_ok=True)
    time.sleep(0.3)
    return path.exists()


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
