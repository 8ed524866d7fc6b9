"""Where the time of steps goes on this rank: computing, and how long it waits for others in collectives.

All ranks of a synchronous step take the same time; what tells them apart is how much of it each spends waiting: who
waits least is the one that the others wait for. On a GPU, where work is only queued, events on its stream tell; they
are read when they have happened, so nothing waits for them. There FSDP's collectives run beside the computation, on
streams of their own: what they take is known, but not which part of it nothing hides, so they are not told as a part.
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
        """Seconds in collectives so far, as far as is known, those of evaluations apart."""
        self._settle()
        return self._waiting

    @property
    def parts(self) -> Mapping[StepPart, float]:
        """Seconds so far by part; each is in one."""
        self._settle()
        return dict(self._seconds)

    @contextmanager
    def measured(self, part: StepPart) -> Iterator[None]:
        """Around a part of a step, or a collective within one, whose time is its own. All of an evaluation is it."""
        outer = self._within
        if outer is StepPart.EVALUATION:
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
    """The memory of FSDP2's collectives, as FSDP2 itself gets it."""

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class MeasuredAllGather(Allocating):
    """FSDP's own, with a clock (torch.distributed.fsdp's AllGather protocol)."""

    def __init__(self, times: StepTimes) -> None:
        self._times = times

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> Any:
        with self._times.measured(StepPart.ALL_GATHER):
            return dist.all_gather_single(output_tensor, input_tensor, group=group, async_op=async_op)


class MeasuredReduceScatter(Allocating):
    """FSDP's own, with a clock (its ReduceScatter protocol)."""

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
    """The collectives of this module (not of those within it)."""
    # The classes that torch names here stand in a private module; it asks for no more than what these do.
    module.set_custom_all_gather(MeasuredAllGather(times))  # type: ignore[arg-type]
    module.set_custom_reduce_scatter(MeasuredReduceScatter(times))  # type: ignore[arg-type]
