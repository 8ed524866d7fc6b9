"""Life of pods on the nodes of the local cluster: how they end, wait, restart, and are deleted."""

import time
from contextlib import suppress
from pathlib import Path

import pytest

from builders.cluster.pods import Pods, condition, state, status_of
from builders.until import until


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
    assert status_of(pod)["restartCount"] == 1  # The first restart is immediate, the next one after 10 s.
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


def test_a_deadline_that_is_set_later_ends_a_pod_that_would_restart_and_keeps_its_log(pods: Pods) -> None:
    script = "import time; print('said', flush=True); time.sleep(600)"
    pods.create("a", script, restartPolicy="OnFailure")
    pods.wait_phase("a", "Running")
    patch = '{"spec": {"activeDeadlineSeconds": 1}}'
    pods.cluster.kubectl("patch", "pod", "a", "-n", pods.namespace, "-p", patch)
    pod = pods.wait_phase("a", "Failed")
    assert pod["status"]["reason"] == "DeadlineExceeded"
    assert (state(pod)["terminated"]["exitCode"], state(pod)["terminated"]["reason"]) == (137, "Error")
    assert pods.logs("a") == "said\n"
    pods.delete("a")
    pods.wait_gone("a")


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
    pods.create("b", "print(1)")  # The pod is gone from the API at once, and from the machine soon.
    pods.wait("b", lambda _: not _comes_back(alive))


def test_pods_that_are_deleted_as_they_start_leave_no_process(pods: Pods) -> None:
    names = [f"p{number}" for number in range(16)]
    for number, name in enumerate(names):
        pods.create(name, f"import time; time.sleep(600)  # {pods.namespace}")
        time.sleep(number % 8 * 0.01)
        pods.delete(name)
    for name in names:
        pods.wait_gone(name)
    until(lambda: not _processes(pods.namespace), "the end of all processes", lambda: _processes(pods.namespace), 10)


def _processes(word: str) -> list[str]:
    """Return the processes of this machine whose command contains a word, without the tests' own."""
    pids = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):  # gone
            command = path.read_bytes().decode(errors="replace")
            if word in command and "kubectl" not in command:
                pids.append(f"{path.parent.name}: {command}")
    return pids


def _comes_back(path: Path) -> bool:
    path.unlink(missing_ok=True)
    time.sleep(0.3)
    return path.exists()
