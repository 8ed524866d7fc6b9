import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from builders.programs import SEARCH_PATH
from builders.train.node import Parents
from builders.train.stateful import SCRIPT, losses


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory) -> dict[int, float]:
    """Losses of `stateful.py` in one process."""
    folder = tmp_path_factory.mktemp("undisturbed")
    ran = subprocess.run(
        [sys.executable, str(SCRIPT), "plain", "--steps", "400", "--pause", "0", "--overhead", "0.01"],
        cwd=folder, env={"PATH": os.environ["PATH"], "PYTHONPATH": SEARCH_PATH}, capture_output=True, text=True,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    return losses(ran.stdout)


@pytest.fixture(scope="session")
def parents() -> Iterator[Parents]:
    """Yield the processes that scripts are forked from."""
    made = Parents()
    yield made
    made.close()
