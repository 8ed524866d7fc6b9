"""Every scenario of `concertina drill`, played with the real command on the local cluster, one after the other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from concertina.cli.drill.scenarios import SCENARIOS

PLAYED = [name for name, scenario in SCENARIOS.items() if not isinstance(scenario.local, str)]


@pytest.mark.parametrize("scenario", PLAYED)
def test_the_drill_passes(drill: Callable[[str], Any], scenario: str) -> None:
    verdict = drill(scenario)
    assert verdict["passed"], verdict["reasons"]
