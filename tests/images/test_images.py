"""The images, built by the project's own Dockerfiles with buildah: `make test-images`. It needs root and about 6 GB."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
IMAGES = ("operator", "agent")
"""The trainer's is left out: it holds torch with CUDA, and each layer of this storage is a whole copy."""
pytestmark = [
    pytest.mark.timeout(1800),
    pytest.mark.skipif(not os.environ.get("CONCERTINA_IMAGES_RUN"), reason="`make test-images` builds the images"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the images. CONCERTINA_IMAGES names a folder that is kept, with the base in it."""
    folder = Path(os.environ.get("CONCERTINA_IMAGES") or tmp_path_factory.mktemp("images"))
    prefix = os.environ["CONCERTINA_IMAGES_PYTHON"]
    subprocess.run([ROOT / "tools/build-images.sh", folder, prefix, *IMAGES], check=True)
    return folder


class Container:
    """A container of one image, as its user."""

    def __init__(self, folder: Path, image: str) -> None:
        """Make the container."""
        self._command = ["buildah", "--root", folder / "storage", "--runroot", folder / "run"]
        self._name = self.told("from", "--pull=never", f"localhost/concertina/{image}:test").strip()

    def told(self, *arguments: str) -> str:
        """Return what buildah prints."""
        environment = os.environ | {"STORAGE_DRIVER": "vfs", "BUILDAH_ISOLATION": "chroot"}
        done = subprocess.run(
            [*self._command, *arguments], env=environment, capture_output=True, text=True, check=False
        )
        return done.stdout + done.stderr

    def ran(self, *command: str) -> str:
        """Return what a command in the container prints."""
        return self.told("run", self._name, "--", *command)

    def remove(self) -> None:
        """Remove the container."""
        self.told("rm", self._name)


@pytest.fixture(params=IMAGES)
def image(request: pytest.FixtureRequest, folder: Path) -> Iterator[tuple[str, Container]]:
    container = Container(folder, request.param)
    yield request.param, container
    container.remove()


def test_an_image_runs_its_command_as_nobody_and_holds_no_installer(image: tuple[str, Container]) -> None:
    name, container = image
    assert container.ran("id", "-u").strip() == "65532"
    said = container.ran("concertina-operator") if name == "operator" else container.ran("concertina-agent", "--help")
    assert ("CONCERTINA_NAMESPACE is not set" if name == "operator" else "usage: concertina-agent") in said
    for program in ("pip", "pip3", "uv"):
        assert container.ran("sh", "-c", f"command -v {program} || echo none").strip() == "none"
    find = (
        "import importlib.util as u; print([name for name in ('pip', 'setuptools', 'ensurepip') if u.find_spec(name)])"
    )
    for python in ("python3", "/usr/local/bin/python3"):
        assert container.ran(python, "-c", find).strip() == "[]"
    assert container.ran("sh", "-c", "touch /opt/concertina/x /usr/local/x 2>/dev/null || echo no").strip() == "no"
