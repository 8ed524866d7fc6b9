"""How long this rank waits for others, in collectives.

All ranks of a synchronous step take the same time; what tells them apart is how much of it each spends waiting: who
waits least is the one that the others wait for. On a GPU, where a collective is only queued, events on its stream tell;
they are read when they have happened, so nothing waits for them.
"""

from __future__ import annotations

import collections
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule


class Waits:
    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._seconds = 0.0
        self._pending: collections.deque[tuple[torch.cuda.Event, torch.cuda.Event]] = collections.deque()

    @property
    def seconds(self) -> float:
        """In all so far, as far as is known."""
        while self._pending and self._pending[0][1].query():
            begin, end = self._pending.popleft()
            self._seconds += begin.elapsed_time(end) / 1000
        return self._seconds

    @contextmanager
    def measured(self) -> Iterator[None]:
        """Around one collective."""
        if self._cuda:
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            yield
            end.record()
            self._pending.append((begin, end))
        else:
            started = time.perf_counter()
            yield
            self._seconds += time.perf_counter() - started


class Allocating:
    """The memory of FSDP2's collectives, as FSDP2 itself gets it."""

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class MeasuredAllGather(Allocating):
    """FSDP's own, with a clock (torch.distributed.fsdp's AllGather protocol)."""

    def __init__(self, waits: Waits) -> None:
        self._waits = waits

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> Any:
        with self._waits.measured():
            return dist.all_gather_single(output_tensor, input_tensor, group=group, async_op=async_op)


class MeasuredReduceScatter(Allocating):
    """FSDP's own, with a clock (its ReduceScatter protocol)."""

    def __init__(self, waits: Waits) -> None:
        self._waits = waits

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> Any:
        with self._waits.measured():
            return dist.reduce_scatter_single(
                output=output_tensor, input=input_tensor, group=group, op=op, async_op=async_op
            )  # fmt: skip


def measure(module: FSDPModule, waits: Waits) -> None:
    """The collectives of this module (not of those within it)."""
    # The classes that torch names here stand in a private module; it asks for no more than what these do.
    module.set_custom_all_gather(MeasuredAllGather(waits))  # type: ignore[arg-type]
    module.set_custom_reduce_scatter(MeasuredReduceScatter(waits))  # type: ignore[arg-type]
