"""Local cluster of a user without root, whose pods are in a user namespace."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from builders.cluster import as_nobody
from concertina.local.binaries import programs
from concertina.local.host import linux_namespaces

CLUSTER = """
import json, sys
from pathlib import Path
from concertina.local import cluster
from concertina.local.state.record import Options
with cluster.owned("rootless", Options(nodes=1)) as up:
    node = up.running()["node-1"]
    assert node
    up.kubectl("apply", "-f", "-", stdin=json.dumps(json.load(sys.stdin)))
    up.kubectl("wait", "pod/a", "--for=jsonpath={.status.phase}=Succeeded", "--timeout=60s")
    outside = Path(f"/proc/{node.pid}/status").read_text().partition("Uid:")[2].split()[0]
    print(json.dumps({"pod": json.loads(up.kubectl("logs", "a")), "uid outside": int(outside)}))
"""
POD = """
import json, os
open("/data/x", "w").write("x")
print(json.dumps({"pid": os.getpid(), "uid": os.getuid(), "memory": os.path.ismount("/memory/inner"),
                  "shared": open("/etc/shared/x").read(), "machine": os.path.exists("/etc/passwd"),
                  "token": os.path.exists("/var/run/secrets/kubernetes.io/serviceaccount/token")}))
"""


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    """Yield a cache folder for that user, outside of pytest's private folders, with the programs beside it."""
    folder = Path("/tmp") / f"concertina-rootless-{os.getpid()}"
    (folder / "cache").mkdir(parents=True)
    (folder / "bin").mkdir()
    for name, path in programs.control_plane(print).items():
        try:
            os.link(path.resolve(), folder / "bin" / name)
        except OSError:
            shutil.copy(path, folder / "bin" / name)
    if os.geteuid() == 0:
        os.chown(folder / "cache", as_nobody.NOBODY, as_nobody.NOBODY)
    yield folder
    shutil.rmtree(folder)


def run_unprivileged(home: Path, script: str, stdin: str) -> "subprocess.CompletedProcess[str]":
    """Run a Python script as an ordinary user: this user, or nobody if this one is root."""
    command = [sys.executable, "-c", script]
    if os.geteuid() == 0:
        checkout = str(Path(__file__).parents[3])
        command = [sys.executable, as_nobody.__file__, checkout, "--", *command]
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": str(home / "cache"),
        "XDG_CACHE_HOME": str(home / "cache"),
        "KUBEBUILDER_ASSETS": str(home / "bin"),
    }
    return subprocess.run(
        command, input=stdin, env=environment, cwd="/", capture_output=True, text=True, timeout=120, check=False
    )


@pytest.mark.long(law="tests/cluster/local/test_nodes.py::test_nodes_are_registered_as_a_kubelet_does")
def test_a_cluster_without_root(home: Path) -> None:
    volumes = [{"name": "m", "emptyDir": {"medium": "Memory"}}, {"name": "d", "emptyDir": {}}]
    mounts = [
        {"name": "m", "mountPath": "/memory/inner"},
        {"name": "d", "mountPath": "/data"},
        {"name": "d", "mountPath": "/etc/shared"},
    ]
    container = {
        "name": "a",
        "image": "concertina/trainer:1",
        "command": ["python3", "-c", POD],
        "volumeMounts": mounts,
    }
    spec = {"restartPolicy": "Never", "volumes": volumes, "containers": [container]}
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "a"}, "spec": spec}
    done = run_unprivileged(home, CLUSTER, json.dumps(pod))
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["pod"] == {"pid": 1, "uid": 0, "memory": True, "shared": "x", "machine": True, "token": True}
    assert result["uid outside"] == (as_nobody.NOBODY if os.geteuid() == 0 else os.geteuid())
    left = [path.name for path in (home / "cache" / "concertina" / "clusters" / "rootless").iterdir()]
    assert left == ["logs"]


# A machine may forbid user namespaces: the test sets the kernel's own limit within a user namespace.
LIMITED = """
import os, sys
from pathlib import Path
from concertina.local.host import linux_namespaces
user, group = os.geteuid(), os.getegid()
linux_namespaces.unshare(linux_namespaces.CLONE_NEWUSER)
Path("/proc/self/setgroups").write_text("deny")
Path("/proc/self/uid_map").write_text(f"1000 {user} 1")
Path("/proc/self/gid_map").write_text(f"1000 {group} 1")
Path("/proc/sys/user/max_user_namespaces").write_text("0")
from concertina.local import cluster, errors
from concertina.local.state.record import Options
try:
    cluster.up("rootless", Options(nodes=1))
except errors.LocalClusterError as error:
    print(error)
"""


def test_a_machine_that_forbids_namespaces_says_how_to_allow_them(home: Path) -> None:
    done = run_unprivileged(home, LIMITED, "")
    assert "does not let concertina make the namespaces" in done.stdout, done.stderr
    assert "user.max_user_namespaces" in done.stdout
    assert linux_namespaces.FORBIDDEN.splitlines()[-1] in done.stdout
