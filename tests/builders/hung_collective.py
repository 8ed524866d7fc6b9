"""Two real ranks that hang in a collective, and the collectives that they list."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from builders.programs import PROGRAMS, SEARCH_PATH


def listed(backend: str, store: Path, variables: Callable[[int], Mapping[str, str]]) -> list[dict[str, Any]]:
    """Return the collectives that ranks 0 and 1 list, each by the title of the process group.

    Args:
        backend: Backend of the process groups.
        store: File through which the ranks meet.
        variables: Function that returns additional environment variables of a rank.
    """
    ranks = [
        subprocess.Popen(
            [sys.executable, str(PROGRAMS / "hung_collective.py"), backend, str(store)],
            env={**os.environ, "PYTHONPATH": str(SEARCH_PATH), "RANK": str(rank), **variables(rank)},
            stdout=subprocess.PIPE,
        )
        for rank in range(2)
    ]
    lists = dict(json.loads(process.communicate(timeout=120)[0].splitlines()[-1]) for process in ranks)
    return [{calls["title"]: calls for calls in lists[rank]} for rank in range(2)]


def check(waiting: Mapping[str, Any], other: Mapping[str, Any]) -> None:
    """Check the lists of `hung_collective.py`: rank 0 waits in the pair, and rank 1 has not called that collective."""
    assert (waiting["pair"]["called"], waiting["pair"]["waits_for"]) == (2, 2)
    assert waiting["pair"]["operations"] == {"1": "broadcast", "2": "all_reduce"}
    assert waiting["pair"]["ranks"] == [0, 1, 1]
    assert (other["pair"]["called"], other["pair"]["waits_for"]) == (1, 0), "0 stands for None"
    assert waiting["pair"]["group"] == other["pair"]["group"]
    assert waiting["default_pg"]["called"] == other["default_pg"]["called"] == 3
    assert waiting["default_pg"]["waits_for"] == other["default_pg"]["waits_for"] == 0
