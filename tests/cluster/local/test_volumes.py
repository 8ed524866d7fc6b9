"""Volumes of pods on the nodes of the local cluster."""

import json
from pathlib import Path
from typing import Any

import pytest

from builders.cluster.pods import Pods, state, status_of

Object = dict[str, Any]
TOKEN: Object = {"serviceAccountToken": {"path": "token", "audience": "somebody", "expirationSeconds": 600}}
LABEL: Object = {"downwardAPI": {"items": [{"path": "labels", "fieldRef": {"fieldPath": "metadata.labels"}}]}}
MOUNTS = [
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
LOOK = """
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


def volumes(host: Path) -> list[Object]:
    return [
        {
            "name": "map",
            "configMap": {"name": "settings", "items": [{"key": "a.txt", "path": "deep/a"}], "defaultMode": 0o440},
        },
        {"name": "secret", "secret": {"secretName": "login"}},
        {"name": "both", "projected": {"sources": [TOKEN, LABEL, {"configMap": {"name": "settings"}}]}},
        {"name": "disk", "emptyDir": {}},
        {"name": "memory", "emptyDir": {"medium": "Memory", "sizeLimit": "4Mi"}},
        {"name": "host", "hostPath": {"path": str(host), "type": "Directory"}},
        {"name": "absent", "configMap": {"name": "nothing", "optional": True}},
    ]


def test_volumes(pods: Pods, tmp_path_factory: pytest.TempPathFactory) -> None:
    host = tmp_path_factory.mktemp("host")
    (host / "file").write_text("from the machine")
    pods.put("configmaps", "settings", {"a.txt": "A", "b.txt": "B"})
    pods.put("secrets", "login", {"user": "ada"})
    seen = json.loads(pods.run("a", LOOK, {"volumeMounts": MOUNTS}, volumes=volumes(host)))
    assert seen == {
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


def test_a_folder_that_cannot_be_made_is_waited_for(pods: Pods, tmp_path_factory: pytest.TempPathFactory) -> None:
    above = tmp_path_factory.mktemp("host") / "above"
    above.write_text("a file")
    volumes = [{"name": "host", "hostPath": {"path": str(above / "below"), "type": "DirectoryOrCreate"}}]
    mounts = [{"name": "host", "mountPath": "/host"}]
    pods.create("a", "open('/host/x', 'w')", {"volumeMounts": mounts}, volumes=volumes)
    pod = pods.wait("a", lambda pod: "Not a directory" in str(status_of(pod)))
    assert state(pod)["waiting"]["reason"] == "ContainerCreating"
    above.unlink()
    pods.wait_phase("a", "Succeeded")
    assert (above / "below" / "x").exists()


def test_a_container_whose_files_cannot_be_made_is_waited_for(
    pods: Pods, tmp_path_factory: pytest.TempPathFactory
) -> None:
    host = tmp_path_factory.mktemp("host")
    (host / "part").write_text("a file")
    volumes = [{"name": "host", "hostPath": {"path": str(host)}}]
    mounts = [{"name": "host", "mountPath": "/host", "subPath": "part/below"}]
    pods.create("a", "open('/host/x', 'w')", {"volumeMounts": mounts}, volumes=volumes)
    pod = pods.wait("a", lambda pod: "Not a directory" in str(status_of(pod)))
    assert state(pod)["waiting"]["reason"] == "CreateContainerError"
    (host / "part").unlink()
    pods.wait_phase("a", "Succeeded")
    assert (host / "part" / "below" / "x").exists()
