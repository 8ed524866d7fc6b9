"""Times of the parts of a step on this rank: computation, and waiting for other ranks in collectives.

All ranks take the same time for a synchronous step. They differ in how much of it they spend waiting: the slowest rank
waits least. On a GPU, the host only queues work, so the times come from CUDA events on the GPU's stream. An event is
read after it has happened, so that reading an event never blocks.

On a GPU, FSDP's collectives run concurrently with the computation, on streams of their own. Their duration is known,
but not how much of it the computation hides. So on a GPU, FSDP's collectives are not reported as parts of the step.
"""

from __future__ import annotations

import collections
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from concertina_protocol import COMMUNICATION, StepPart


class StepTimes:
    """Times of the parts of a step on this rank, added up over the steps of a round."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._seconds: dict[StepPart, float] = dict.fromkeys(StepPart, 0.0)
        self._waiting = 0.0
        self._within: StepPart | None = None
        self._pending: collections.deque[tuple[StepPart, StepPart | None, torch.cuda.Event, torch.cuda.Event]] = (
            collections.deque()
        )

    @property
    def waiting(self) -> float:
        """Seconds that this rank has waited for other ranks in this round, without waits in evaluations.

        On a GPU, waits that are still queued or running are not included.
        """
        self._settle()
        return self._waiting

    @property
    def parts(self) -> Mapping[StepPart, float]:
        """Seconds of this round so far, by part of a step. Each second counts in one part only."""
        self._settle()
        return dict(self._seconds)

    @contextmanager
    def measured(self, part: StepPart) -> Iterator[None]:
        """Measure a part of a step, which may be within another part.

        The time of an inner part does not count in the outer one, except that all time within an evaluation counts as
        evaluation.
        """
        outer = self._within
        if outer is StepPart.EVALUATION or torch.compiler.is_compiling():  # compiled code can't read the clock
            yield
            return
        self._within = part
        if self._cuda:
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            yield
            end.record()
            self._pending.append((part, outer, begin, end))
        else:
            started = time.perf_counter()
            yield
            seconds = time.perf_counter() - started
            self._add(part, outer, seconds)
        self._within = outer

    def _settle(self) -> None:
        while self._pending and self._pending[0][3].query():
            part, outer, begin, end = self._pending.popleft()
            self._add(part, outer, begin.elapsed_time(end) / 1000)

    def _add(self, part: StepPart, outer: StepPart | None, seconds: float) -> None:
        if part in COMMUNICATION:
            self._waiting += seconds
        if outer is StepPart.PIPELINE and part not in COMMUNICATION:
            self._waiting -= seconds
        if not (self._cuda and part in (StepPart.ALL_GATHER, StepPart.REDUCE_SCATTER)):
            self._seconds[part] += seconds
            if outer is not None:
                self._seconds[outer] -= seconds


class Allocating:
    """Allocation of buffers for FSDP2's collectives, in the same way as FSDP2 itself allocates them."""

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class MeasuredAllGather(Allocating):
    """FSDP2's own all-gather, with its time measured (AllGather protocol of torch.distributed.fsdp)."""

    def __init__(self, times: StepTimes) -> None:
        self._times = times

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> Any:
        with self._times.measured(StepPart.ALL_GATHER):
            return dist.all_gather_single(output_tensor, input_tensor, group=group, async_op=async_op)


class MeasuredReduceScatter(Allocating):
    """FSDP2's own reduce-scatter, with its time measured (ReduceScatter protocol of torch.distributed.fsdp)."""

    def __init__(self, times: StepTimes) -> None:
        self._times = times

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> Any:
        with self._times.measured(StepPart.REDUCE_SCATTER):
            return dist.reduce_scatter_single(
                output=output_tensor, input=input_tensor, group=group, op=op, async_op=async_op
            )  # fmt: skip


def measure(module: FSDPModule, times: StepTimes) -> None:
    """Measure the time of this FSDP module's collectives. FSDP modules within this module are measured separately."""
    # torch annotates these arguments with classes of a private module, but uses only the methods that these classes
    # have.
    module.set_custom_all_gather(MeasuredAllGather(times))  # type: ignore[arg-type]
    module.set_custom_reduce_scatter(MeasuredReduceScatter(times))  # type: ignore[arg-type]
