"""Every scenario of `concertina drill` on a cluster with real kubelets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from concertina.drill.scenarios import SCENARIOS

PLAYED = [name for name, scenario in SCENARIOS.items() if not isinstance(scenario.elsewhere, str)]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("scenario", PLAYED)
def test_the_drill_passes(drill: Callable[[str], Any], scenario: str) -> None:
    verdict = drill(scenario)
    assert verdict["passed"], verdict["reasons"]
