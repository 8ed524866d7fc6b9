"""Settings that the agent reads from its pod's environment."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from concertina_agent import settings

READ = """
import json, os
from concertina_agent import settings
print(json.dumps(settings.read(os.environ, ()).environment.get("TMPDIR")))
"""
UNLIMITED = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
NOTHING = (0, resource.RLIM_INFINITY)


@pytest.mark.parametrize(("writable", "expected"), [(UNLIMITED, None), (NOTHING, "tmp")], ids=["writable", "read-only"])
def test_workers_have_a_temporary_folder(tmp_path: Path, writable: tuple[int, int], expected: str | None) -> None:
    environment = {
        "CONCERTINA_UID": "u",
        "CONCERTINA_REPLICA": "r",
        "CONCERTINA_POD_IP": "127.0.0.1",
        "CONCERTINA_VOLUME": str(tmp_path),
    }
    done = subprocess.run(
        [sys.executable, "-c", READ],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, writable),  # no file can be written to
    )
    folder = json.loads(done.stdout)
    assert folder == (expected and str(tmp_path / expected))
    assert folder is None or Path(folder).is_dir()


@pytest.mark.parametrize(
    ("command", "variables", "counts"),
    [
        (("python", "train.py"), {}, True),
        (("python", "train.py"), {"CONCERTINA_STEP_DETECTION": "false"}, False),
        ((), {}, False),
    ],
    ids=["a script", "a script without detection", "the bundled trainer"],
)
def test_steps_are_counted_in_scripts_unless_that_is_off(
    tmp_path: Path, command: tuple[str, ...], variables: dict[str, str], counts: bool
) -> None:
    environment = {
        "CONCERTINA_UID": "u",
        "CONCERTINA_REPLICA": "r",
        "CONCERTINA_POD_IP": "127.0.0.1",
        "CONCERTINA_VOLUME": str(tmp_path),
        "PYTHONPATH": "/mine",
        **variables,
    }
    read = settings.read(environment, command)
    assert read.step_detection is counts
    assert read.environment["PYTHONPATH"].startswith(settings.HOOK if counts else "/mine")


ALLOCATOR = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}


@pytest.mark.parametrize(
    ("command", "variables", "expected"),
    [
        ((), {}, {"TORCHINDUCTOR_CACHE_DIR": "/volume/compiled", **ALLOCATOR}),
        ((), {"TORCHINDUCTOR_CACHE_DIR": "/shared"}, {"TORCHINDUCTOR_CACHE_DIR": "/shared", **ALLOCATOR}),
        (
            (),
            {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"},
            {"TORCHINDUCTOR_CACHE_DIR": "/volume/compiled", "PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"},
        ),
        (("python", "train.py"), {}, {}),
    ],
    ids=["the bundled trainer", "with a shared cache", "with settings of the allocator", "a script"],
)
def test_the_bundled_trainer_has_a_cache_and_settings_of_the_allocator(
    command: tuple[str, ...], variables: dict[str, str], expected: dict[str, str]
) -> None:
    pod = {"CONCERTINA_UID": "u", "CONCERTINA_REPLICA": "r", "CONCERTINA_POD_IP": "127.0.0.1"}
    read = settings.read({**pod, "CONCERTINA_VOLUME": "/volume", **variables}, command)
    found = {name: value for name, value in read.environment.items() if name.startswith(("TORCHINDUCTOR", "PYTORCH"))}
    assert found == expected
