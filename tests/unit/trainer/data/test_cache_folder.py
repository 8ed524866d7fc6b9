"""Cache of data, with a folder for each user of the machine."""

import os
import subprocess
import sys

import pytest

from builders.programs import SEARCH_PATH
from concertina_data.places import folder_on_node

UNSHARE = ["unshare", "--user", "--map-user", "4321"]


def test_a_user_has_one_folder_inside_and_outside_of_a_user_namespace(monkeypatch):
    monkeypatch.delenv("CONCERTINA_CACHE", raising=False)
    if subprocess.run([*UNSHARE, "true"], capture_output=True).returncode:
        pytest.skip("this machine lets nobody make a user namespace")
    script = "import os; from concertina_data.places import folder_on_node; print(os.getuid(), folder_on_node())"
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": SEARCH_PATH}
    if "TMPDIR" in os.environ:
        environment["TMPDIR"] = os.environ["TMPDIR"]
    inside = subprocess.run(
        [*UNSHARE, sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True
    )
    assert inside.stdout.split() == ["4321", str(folder_on_node())]
