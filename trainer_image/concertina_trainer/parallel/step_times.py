"""Times of the parts of a step on this rank: computation, and waiting for other ranks in collectives.

All ranks take the same time for a synchronous step, but they wait for different lengths of time. The slowest rank waits
least. On a GPU, the host only queues work, so the times come from CUDA events on the GPU's stream. An event is read
after it has happened, so that reading an event never blocks.

On a GPU, FSDP's collectives run concurrently with the computation, on streams of their own. The duration of these
collectives is known, but the share that overlaps with computation is not. On a GPU, FSDP's collectives are therefore
not reported as parts of the step. Their times are absent, because 0 would mean that all of their time overlaps.
"""

from __future__ import annotations

import collections
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from concertina_protocol import COMMUNICATION, StepPart

HIDDEN_ON_CUDA = (StepPart.ALL_GATHER, StepPart.REDUCE_SCATTER)
"""Parts of a step that overlap with the computation, by an unknown share, on a GPU."""


class StepTimes:
    """Times of the parts of a step on this rank, added up over the steps of a round.

    A round is a period in which a fixed set of replicas trains.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        hidden = HIDDEN_ON_CUDA if self._cuda else ()
        self._seconds: dict[StepPart, float] = {part: 0.0 for part in StepPart if part not in hidden}
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
        """Seconds of this round so far, keyed by part of a step. Each second counts in one part only.

        A part whose time is not known is absent.
        """
        self._settle()
        return dict(self._seconds)

    @contextmanager
    def measured(self, part: StepPart) -> Iterator[None]:
        """Measure a part of a step, which may be within another part.

        The time of an inner part does not count in the outer part. Evaluation is an exception: all time within an
        evaluation counts as evaluation.
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
        if part in self._seconds:
            self._seconds[part] += seconds
            if outer is not None:
                self._seconds[outer] -= seconds


class Allocating:
    """Allocation of buffers for FSDP2's collectives, in the same way as FSDP2 itself allocates them."""

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class MeasuredCollective:
    """A collective of FSDP2 with its time measured (protocols AllGather and ReduceScatter of torch.distributed.fsdp).

    This class uses the buffers and the communication of FSDP2's own collective, which can be in memory of the process
    group or in symmetric memory (decision "Clocks wrap the collectives of FSDP2").
    """

    def __init__(self, collective: Any, part: StepPart, times: StepTimes) -> None:
        self._collective, self._part, self._times = collective, part, times

    def allocate(self, *size: Any, **how: Any) -> Tensor:
        allocated: Tensor = self._collective.allocate(*size, **how)
        return allocated

    def __call__(self, *tensors: Any, **how: Any) -> Any:
        with self._times.measured(self._part):
            return self._collective(*tensors, **how)


def measure(module: FSDPModule, times: StepTimes) -> None:
    """Measure the time of this FSDP module's collectives, without those of FSDP modules within it.

    Choose the memory of the collectives (such as by `set_symm_mem_for_comm`) before this call, because torch refuses to
    change the memory afterwards.
    """
    state = module._get_fsdp_state()
    # torch has setters for collectives, but nothing that returns the present ones. torch 2.11 has one group.
    groups: Sequence[Any] = (
        state._fsdp_param_groups if hasattr(state, "_fsdp_param_groups") else [state._fsdp_param_group]
    )
    for group in filter(None, groups):
        group._all_gather_comm = MeasuredCollective(group._all_gather_comm, StepPart.ALL_GATHER, times)
        group._reduce_scatter_comm = MeasuredCollective(group._reduce_scatter_comm, StepPart.REDUCE_SCATTER, times)
