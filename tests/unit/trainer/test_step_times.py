"""Times of a step's parts: each second is in one part."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard

from concertina_protocol import StepPart
from concertina_trainer.parallel import step_times
from concertina_trainer.parallel.step_times import HIDDEN_ON_CUDA, StepTimes, measure


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


def test_on_a_gpu_collectives_of_fsdp_have_no_time_rather_than_none() -> None:
    assert set(StepPart) - set(StepTimes(torch.device("cuda")).parts) == set(HIDDEN_ON_CUDA)
    assert set(StepTimes(torch.device("cpu")).parts) == set(StepPart)


class Collective:
    """A collective of a module's own, as those in symmetric memory are."""

    def __init__(self) -> None:
        self.allocated: list[torch.Tensor] = []

    def allocate(self, size: tuple[int, ...], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        self.allocated.append(torch.zeros(*size, dtype=dtype, device=device))
        return self.allocated[-1]

    def __call__(self, output: torch.Tensor, source: torch.Tensor, group: object, async_op: bool = False) -> str:
        output.copy_(source)
        return "work"


@pytest.fixture
def sharded() -> Iterator[FSDPModule]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield fully_shard(nn.Linear(2, 2))
    dist.destroy_process_group()


def test_the_clock_wraps_the_collective_that_a_module_has(sharded: FSDPModule, times: StepTimes) -> None:
    own = Collective()
    sharded.set_custom_all_gather(own)  # type: ignore[arg-type]
    measure(sharded, times)
    measured = sharded._get_fsdp_state()._fsdp_param_groups[0]._all_gather_comm
    output = measured.allocate((2,), dtype=torch.float32, device=torch.device("cpu"))
    assert output is own.allocated[0]
    assert measured(output, torch.ones(2), None, async_op=True) == "work"
    assert output.tolist() == [1, 1]
    assert times.parts[StepPart.ALL_GATHER] == 1
