"""The script `tests/programs/stateful.py`: its command, and what it has printed."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping

import pytest

from builders.programs import PROGRAMS
from builders.train.replicas import Replica

SCRIPT = PROGRAMS / "stateful.py"
NEAR = 1e-4
"""Between losses of other worlds: their sums are of other order."""


def command(kind: str, *more: str) -> list[str]:
    return ["--", sys.executable, str(SCRIPT), kind, *more]


def losses(text: str) -> dict[int, float]:
    """By step, the last time it was trained."""
    return {int(step): float(loss) for step, loss in re.findall(r"step (\d+) loss (\S+)", text)}


def check_losses(replicas: Iterable[Replica], undisturbed: Mapping[int, float]) -> None:
    """Check that no step was left out, and that each has the loss of an undisturbed run."""
    seen = losses("\n".join(replica.log() for replica in replicas))
    assert sorted(seen) == list(range(max(seen) + 1)), "a step was left out"
    for step, loss in seen.items():
        assert loss == pytest.approx(undisturbed[step], rel=NEAR, abs=NEAR), step
