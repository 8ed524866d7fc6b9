"""What the agent makes of its pod's environment."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from pathlib import Path

import pytest

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
