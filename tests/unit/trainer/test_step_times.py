"""Times of a step's parts: each second is in one part."""

from __future__ import annotations

import time

import pytest
import torch

from concertina_protocol import StepPart
from concertina_trainer.parallel import step_times
from concertina_trainer.parallel.step_times import StepTimes


@pytest.fixture
def times(monkeypatch: pytest.MonkeyPatch) -> StepTimes:
    """Return times by a clock that advances by a second at each reading."""
    ticks = iter(range(1000))
    monkeypatch.setattr(step_times, "time", type("Clock", (), {"perf_counter": staticmethod(lambda: next(ticks))}))
    assert time.perf_counter() > 0, "everybody else's clock is as it was"
    return StepTimes(torch.device("cpu"))


def test_a_collective_within_a_part_is_its_own_and_no_part_of_it(times: StepTimes) -> None:
    with times.measured(StepPart.FORWARD):
        with times.measured(StepPart.ALL_GATHER):
            pass
        with times.measured(StepPart.ALL_GATHER):
            pass
    with times.measured(StepPart.ALL_REDUCE):
        pass
    parts = {part: seconds for part, seconds in times.parts.items() if seconds}
    assert parts == {StepPart.FORWARD: 5 - 2, StepPart.ALL_GATHER: 2, StepPart.ALL_REDUCE: 1}
    assert times.waiting == 3


def test_a_pipeline_waits_when_it_computes_nothing(times: StepTimes) -> None:
    with times.measured(StepPart.PIPELINE), times.measured(StepPart.FORWARD), times.measured(StepPart.ALL_GATHER):
        pass
    parts = {part: seconds for part, seconds in times.parts.items() if seconds}
    assert parts == {StepPart.PIPELINE: 5 - 3, StepPart.FORWARD: 3 - 1, StepPart.ALL_GATHER: 1}
    assert times.waiting == 2 + 1


def test_all_of_an_evaluation_is_evaluation_and_no_waiting_that_tells_ranks_apart(times: StepTimes) -> None:
    with times.measured(StepPart.EVALUATION), times.measured(StepPart.ALL_REDUCE):
        pass
    with times.measured(StepPart.OPTIMIZER):
        pass
    assert {part: s for part, s in times.parts.items() if s} == {StepPart.EVALUATION: 1, StepPart.OPTIMIZER: 1}
    assert times.waiting == 0
