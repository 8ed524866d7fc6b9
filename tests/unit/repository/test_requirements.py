"""The locks hold what pyproject.toml asks for, with hashes and no index; the scripts of set-up explain themselves."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[3]
SPEC = importlib.util.spec_from_file_location("lock", ROOT / "tools" / "lock.py")
assert SPEC
assert SPEC.loader
lock = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(lock)
PIN = re.compile(r"^([a-z0-9-]+)==([^ ;]+)(?: ; .*)? \\\n((?:    --hash=sha256:[0-9a-f]{64}(?: \\)?\n)+)", re.MULTILINE)


@pytest.mark.parametrize("environment", lock.environments())
def test_what_is_asked_for_is_pinned(environment: str) -> None:
    text = (ROOT / "requirements" / f"{environment}.txt").read_text()
    pins: dict[str, set[str]] = {}
    for name, version, _ in PIN.findall(text):
        pins.setdefault(name, set()).add(version)
    for line in lock.environments()[environment]:
        wanted = Requirement(line)
        name = wanted.name.lower().replace("_", "-")
        assert pins.get(name), f"{name} is not in requirements/{environment}.txt: run `make lock`"
        assert all(wanted.specifier.contains(version) for version in pins[name]), f"{line}: run `make lock`"


@pytest.mark.parametrize("path", sorted((ROOT / "requirements").glob("*.txt")), ids=lambda path: path.stem)
def test_a_lock_is_pins_with_hashes_and_nothing_else(path: Path) -> None:
    assert PIN.sub("", path.read_text()).strip() == ""


@pytest.mark.parametrize("environment", ["operator", "trainer", "agent", "cli"])
def test_images_hold_the_versions_that_were_tested(environment: str) -> None:
    tested = {(name, version) for name, version, _ in PIN.findall((ROOT / "requirements" / "dev.txt").read_text())}
    shipped = {(n, v) for n, v, _ in PIN.findall((ROOT / "requirements" / f"{environment}.txt").read_text())}
    assert shipped <= tested


def script(name: str, *arguments: str, path: str, python: Path | None = None) -> subprocess.CompletedProcess[str]:
    command = ["/bin/sh", str(ROOT / "tools" / name), *arguments]
    environment = {key: value for key, value in os.environ.items() if key != "PYTHON"} | {"PATH": path}
    if python is not None:
        environment["PYTHON"] = str(python)
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_without_a_python_there_is_a_sentence(tmp_path: Path) -> None:
    old = tmp_path / "python3"
    old.write_text("#!/bin/sh\nexit 1\n")  # as one that is too old answers
    old.chmod(0o755)
    for name in ("sh", "which"):
        (tmp_path / name).symlink_to(f"/usr/bin/{name}")
    done = script("find-python.sh", path=str(tmp_path))
    assert done.returncode == 1
    assert "No Python 3.11, 3.12 or 3.13" in done.stderr
    assert "PYTHON=/path/to/python" in done.stderr


def test_an_environment_that_there_is_not(tmp_path: Path) -> None:
    done = script("install-environment.sh", str(tmp_path), "nothing", path=os.environ["PATH"])
    assert done.returncode == 2
    assert "choose dev, operator, agent, trainer, cli, docs or build" in done.stderr


@pytest.mark.parametrize(
    ("there", "anew"),
    [(None, True), ("#!/bin/sh\nexit 1", True), ("#!/bin/sh\necho 3.10", True), ("#!/bin/sh\necho 3.12", False)],
    ids=["none", "one without pip", "one of another Python", "one that does"],
)
def test_an_environment_is_made_anew_where_the_one_there_does_not_do(
    tmp_path: Path, there: str | None, anew: bool
) -> None:
    python, asked = tmp_path / "python3.12", tmp_path / "asked"
    python.write_text(f"""#!/bin/sh
echo "$@" >> {asked}
case "$*" in *venv*) exit 3;; esac
echo 3.12
""")
    python.chmod(0o755)
    folder = tmp_path / "environment"
    (folder / "bin").mkdir(parents=True)
    if there is not None:
        (folder / "bin/python").write_text(f"{there}\n")
        (folder / "bin/python").chmod(0o755)
    script("install-environment.sh", str(folder), "dev", path=os.environ["PATH"], python=python)
    assert (f"-m venv --clear {folder}" in asked.read_text()) == anew
