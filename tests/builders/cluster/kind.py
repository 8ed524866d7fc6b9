"""Run a tour (builders.cluster.tour) on a kind cluster of two nodes with the images built here: `make kind`.

The tour needs a container engine (docker or podman), and says so if none runs. KEEP=1 keeps the cluster. With less than
40 GB of free disk, the trainer's image, which contains torch with CUDA, is left out, and the tour's script trains
instead.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import yaml

from builders.cluster import images
from concertina.local.binaries import programs

ROOT = Path(__file__).resolve().parents[3]
NAME, TAG = "concertina", "kind"
ENGINES = ("docker", "podman")
NO_ENGINE = 3
"""Exit status if no container engine runs."""
TRAINER_BYTES = 40 * 10**9
"""Disk space in bytes for the trainer's image: once in the engine, once in its build cache, and once on each node."""
IMAGES = {
    "operator": ("--target", "operator"),
    "agent": ("--target", "agent"),
    "trainer": ("--file", "trainer_image/Dockerfile"),
}
"""Options of the build, by the image's name."""


def engine() -> str:
    """Return the first container engine that answers, or an empty string."""
    for name in ENGINES:
        if shutil.which(name) and subprocess.run([name, "info"], capture_output=True, check=False).returncode == 0:
            return name
    return ""


def configuration(shared: str) -> str:
    """Return kind's configuration: pods run on both nodes, and both see the folder `shared` of this machine."""
    mounts = [{"hostPath": shared, "containerPath": shared}]
    untainted = yaml.safe_dump({"kind": "InitConfiguration", "nodeRegistration": {"taints": []}})
    nodes = [
        {"role": "control-plane", "extraMounts": mounts, "kubeadmConfigPatches": [untainted]},
        {"role": "worker", "extraMounts": mounts},
    ]
    return yaml.safe_dump({"kind": "Cluster", "apiVersion": "kind.x-k8s.io/v1alpha4", "nodes": nodes})


def image(name: str) -> str:
    return f"localhost/concertina/{name}:{TAG}"


def built(engine: str, names: list[str]) -> None:
    for name in names:
        subprocess.run([engine, "build", *IMAGES[name], "--tag", image(name), "."], cwd=ROOT, check=True)


def tour(kubeconfig: Path, shared: str, kind: str, names: list[str]) -> int:
    """Play the tour with the images, and return its exit status."""
    settings = {
        "KUBECONFIG": str(kubeconfig),
        images.VARIABLE: f"{kind} load docker-image --name {NAME} {{image}}",
        "CONCERTINA_E2E_NAMESPACE": "concertina-tour",
        "CONCERTINA_E2E_IMAGE": image("operator").rpartition(":")[0],
        "CONCERTINA_E2E_AGENT_IMAGE": image("agent").rpartition(":")[0],
        "CONCERTINA_E2E_TAG": TAG,
        "CONCERTINA_E2E_SHARED": shared,
    }
    if "trainer" in names:
        settings["CONCERTINA_E2E_TRAINER_IMAGE"] = image("trainer")
    command = [sys.executable, "-m", "builders.cluster.tour"]
    return subprocess.run(command, env=os.environ | settings, check=False).returncode


def main() -> int:
    container_engine = engine()
    if not container_engine:
        print(f"make kind needs a container engine that runs: none of {', '.join(ENGINES)} answers `info` here")
        return NO_ENGINE
    kind = str(programs.find(programs.KIND, print)["kind"])
    os.environ["KIND_EXPERIMENTAL_PROVIDER"] = container_engine
    names = list(IMAGES)
    if shutil.disk_usage(ROOT).free < TRAINER_BYTES:
        print(f"less than {TRAINER_BYTES // 10**9} GB of disk are free: the trainer's image is left out")
        names.remove("trainer")
    built(container_engine, names)
    with tempfile.TemporaryDirectory() as folder:
        shared, kubeconfig = f"{folder}/shared", Path(folder) / "kubeconfig"
        Path(folder).chmod(0o755)
        Path(shared).mkdir()
        create = [kind, "create", "cluster", "--name", NAME, "--kubeconfig", str(kubeconfig), "--wait", "3m"]
        try:
            subprocess.run([*create, "--config", "-"], input=configuration(shared), text=True, check=True)
            return tour(kubeconfig, shared, kind, names)
        finally:
            if not os.environ.get("KEEP"):
                subprocess.run([kind, "delete", "cluster", "--name", NAME], check=False)


if __name__ == "__main__":
    sys.exit(main())
