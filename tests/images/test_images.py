"""The images, built by the project's own Dockerfiles with buildah, and run as in a pod: `make test-images`.

A command runs as the image's user, with the image's variables and a read-only root. /tmp and /concertina are writable.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
DRIVER = os.environ.get("STORAGE_DRIVER", "overlay")
IMAGES = os.environ.get("CONCERTINA_IMAGES", "operator agent").split()
TRAINER_BYTES = 31 * 10**9
"""Disk that buildah uses at its peak for the trainer's image (notebook/packages.md)."""
OWN = {
    "operator": {"concertina-config", "concertina-core", "concertina-operator", "concertina-sdk"},
    "agent": {"concertina-agent", "concertina-sdk"},
    "trainer": {"concertina-agent", "concertina-config", "concertina-sdk", "concertina-trainer"},
}
IN_POD = """
mount --bind "$ROOT" "$ROOT"
mount -o remount,bind,ro "$ROOT"
for folder in dev proc; do mount --rbind "/$folder" "$ROOT/$folder"; done
for folder in tmp concertina; do mount -t tmpfs -o mode=1777 tmpfs "$ROOT/$folder"; done
cp "$UV" "$ROOT/tmp/uv"
exec chroot --userspec="$RUN_AS" "$ROOT" "$@"
"""
pytestmark = [
    pytest.mark.timeout(3600),
    pytest.mark.skipif(not os.environ.get("CONCERTINA_IMAGES_RUN"), reason="`make test-images` builds the images"),
]


def needs_free_disk(folder: Path) -> None:
    """Fail at once instead of after minutes, when the disk is full."""
    free = shutil.disk_usage(folder).free
    if free < TRAINER_BYTES:
        pytest.fail(
            f"the trainer's image needs {TRAINER_BYTES / 1e9:.0f} GB of disk while it is built, and {folder} has "
            f"{free / 1e9:.0f} GB: set CONCERTINA_IMAGES_FOLDER to a folder on a larger disk"
        )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the images. CONCERTINA_IMAGES_FOLDER names a folder that is kept, with the base in it."""
    folder = Path(os.environ.get("CONCERTINA_IMAGES_FOLDER") or tmp_path_factory.mktemp("images"))
    if "trainer" in IMAGES and not (folder / "storage").exists():  # a kept folder may have the layers already
        needs_free_disk(folder)
    prefix = os.environ["CONCERTINA_IMAGES_PYTHON"]
    subprocess.run([ROOT / "tools/build-images.sh", folder, prefix, *IMAGES], check=True)
    return folder


class Container:
    """A container of one image."""

    def __init__(self, folder: Path, image: str) -> None:
        """Make the container, with the mount points that a kubelet would make."""
        self._command = ["buildah", "--root", folder / "storage", "--runroot", folder / "run"]
        tag = f"localhost/concertina/{image}:test"
        config: dict[str, Any] = json.loads(self._buildah("inspect", "--type", "image", tag))["OCIv1"]["config"]
        self.labels: dict[str, str] = config["Labels"]
        self._container = self._buildah("from", "--pull=never", tag)
        root = self._buildah("mount", self._container)
        Path(root, "concertina").mkdir()
        self._environment = {
            **dict(variable.split("=", 1) for variable in config["Env"]),
            "HOME": "/tmp",
            "ROOT": root,
            "RUN_AS": config["User"],
            "UV": str(Path(sys.executable).with_name("uv")),
            "UV_NO_CACHE": "1",
        }

    def _buildah(self, *arguments: str) -> str:
        environment = os.environ | {"STORAGE_DRIVER": DRIVER}
        done = subprocess.run([*self._command, *arguments], env=environment, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    def run(self, *command: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run a command as in a pod."""
        unshared = ["unshare", "--mount", "sh", "-euc", IN_POD, "-", *command]
        return subprocess.run(unshared, env=self._environment | variables, capture_output=True, text=True, check=False)

    def ran(self, *command: str) -> str:
        """Run a command that must succeed, and return what it prints."""
        done = self.run(*command)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def remove(self) -> None:
        """Remove the container."""
        self._buildah("rm", self._container)


@pytest.fixture(scope="module")
def containers(folder: Path) -> Iterator[dict[str, Container]]:
    containers = {image: Container(folder, image) for image in IMAGES}
    yield containers
    for container in containers.values():
        container.remove()


def container_of(containers: dict[str, Container], image: str) -> Container:
    if image not in containers:
        pytest.skip(f"CONCERTINA_IMAGES does not name {image}")
    return containers[image]


@pytest.mark.parametrize("image", OWN)
def test_an_image_holds_its_own_distributions_and_no_installer(containers: dict[str, Container], image: str) -> None:
    container = container_of(containers, image)
    pip = ("/tmp/uv", "pip")
    container.ran(*pip, "check", "--python", "/opt/concertina")
    listed = json.loads(container.ran(*pip, "list", "--format", "json", "--python", "/opt/concertina"))
    assert {each["name"] for each in listed if each["name"].startswith("concertina")} == OWN[image]
    find = "import importlib.util as u; print([n for n in ('ensurepip', 'pip', 'setuptools', 'uv') if u.find_spec(n)])"
    assert container.ran("/usr/local/bin/python3", "-c", find) == "[]"
    required = ["setuptools"] if image == "trainer" else []  # by torch
    assert container.ran("python3", "-c", find) == str(required)
    for program in ("pip", "pip3", "uv"):
        assert container.run("sh", "-c", f"command -v {program}").stdout == ""


@pytest.mark.parametrize("image", OWN)
def test_an_image_says_what_it_is(containers: dict[str, Container], image: str) -> None:
    labels = container_of(containers, image).labels
    prefix = "org.opencontainers.image"
    assert labels[f"{prefix}.title"] == f"concertina {image}"
    assert (labels[f"{prefix}.licenses"], labels[f"{prefix}.version"]) == ("Apache-2.0", "test")


@pytest.mark.parametrize("image", OWN)
def test_an_image_runs_as_nobody_and_writes_nothing(containers: dict[str, Container], image: str) -> None:
    container = container_of(containers, image)
    assert container.ran("id", "-u") == "65532"
    for folder in ("/opt/concertina", "/usr/local", "/"):
        assert "Read-only file system" in container.run("touch", f"{folder}/x").stderr


@pytest.mark.parametrize("program", ["concertina-operator", "python3 -m concertina.controller.installation_check"])
def test_the_operator_asks_for_its_service_account(containers: dict[str, Container], program: str) -> None:
    """The program has read all settings by then, and imported all of its modules."""
    container = container_of(containers, "operator")
    settings = {
        "CONCERTINA_NAMESPACE": "system",
        "CONCERTINA_MASTER_KEY_SECRET": "key",
        "CONCERTINA_IMAGE_AGENT": "agent",
        "KUBERNETES_SERVICE_HOST": "127.0.0.1",
    }
    done = container.run(*program.split(), **settings)
    assert done.returncode == 1
    assert "This pod has no token of a service account" in done.stderr


def test_the_agent_equips_a_pod(containers: dict[str, Container]) -> None:
    """The trainer's container has a Python of its own, without any package."""
    container = container_of(containers, "agent")
    equip = "concertina-agent install --storage-client /concertina >&2"
    script = "import obstore, trainingjob; print(trainingjob.world().size, trainingjob.State.__name__)"
    agent = "/usr/local/bin/python3 -I /concertina/agent.pyz --help"
    search = "PYTHONPATH=/concertina/python:/concertina/storage"
    said = container.ran("sh", "-ec", f'{equip}; {agent}; {search} /usr/local/bin/python3 -s -c "{script}"')
    assert said.startswith("usage: ")
    assert said.endswith("1 State")


def test_the_trainer_has_torch_and_builds_data(containers: dict[str, Container]) -> None:
    container = container_of(containers, "trainer")
    build = "python3 -m concertina_trainer.cli data build /tmp/text.txt --out /tmp/data"
    said = container.ran("sh", "-ec", f"echo one two three > /tmp/text.txt; {build}")
    assert "/tmp/data: 15 tokens" in said
    training = "import torch, concertina_trainer.training.loop, concertina_tracking; print(torch.ones(2).sum().item())"
    assert container.ran("python3", "-c", training) == "2.0"
