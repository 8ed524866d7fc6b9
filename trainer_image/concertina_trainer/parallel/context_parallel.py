"""Context parallelism: the ranks of a group hold some tokens of each sequence, and gather keys and values of all of it
(as Llama 3 was trained, arXiv 2407.21783 section 3.3: any mask of documents works, and what is gathered is small beside
what is computed).

A causal token attends to those before it, so the last ones cost the most. Each rank has one chunk from the front and
its mirror image from the back, which makes all equal."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from concertina_protocol import StepPart
from concertina_trainer.parallel.step_times import StepTimes

GATHER = torch.ops._c10d_functional.all_gather_into_tensor
REDUCE = torch.ops._c10d_functional.reduce_scatter_tensor
WAIT = torch.ops._c10d_functional.wait_tensor


class ContextParallel:
    def __init__(self, mesh: DeviceMesh, times: StepTimes) -> None:
        self._group, self._times = mesh.get_group(), times
        self.size, self._rank = mesh.size(), mesh.get_local_rank()
        self._rows = functools.lru_cache(maxsize=8)(self._rows_of)

    def queries(self, length: int, device: torch.device) -> Tensor:
        """int64 [length / size]: which tokens of a sequence this rank computes."""
        return self._rows(length, device)[self._rank]

    def keys(self, length: int, device: torch.device) -> Tensor:
        """int64 [length]: which token each gathered key is of."""
        return self._rows(length, device).flatten()

    def _rows_of(self, length: int, device: torch.device) -> Tensor:
        chunks = torch.arange(length, device=device).view(2 * self.size, -1)
        return torch.cat([chunks[: self.size], chunks[self.size :].flip(0)], dim=1)

    def take(self, tokens: Tensor) -> Tensor:
        """Of [batch, length] this rank's [batch, length / size]."""
        return tokens.index_select(1, self.queries(tokens.size(1), tokens.device))

    def gather(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Those of all ranks, [batch, heads, length, head_dim]; gradients go back to whoever has the token."""
        parts: Tensor = _Gather.apply(torch.stack([key, value]), self)
        gathered_key, gathered_value = torch.cat(parts.unbind(0), dim=3).unbind(0)
        return gathered_key, gathered_value

    def gathered(self, part: Tensor) -> Tensor:
        """[ranks, ...]."""
        with self._times.measured(StepPart.CONTEXT):
            whole: Tensor = WAIT(GATHER(part.contiguous(), self.size, self._group.group_name))
        return whole.view(self.size, *part.shape)

    def reduced(self, parts: Tensor) -> Tensor:
        """The sum of what all ranks have of this rank's part."""
        with self._times.measured(StepPart.CONTEXT):
            part: Tensor = WAIT(REDUCE(parts.flatten(0, 1).contiguous(), "sum", self.size, self._group.group_name))
        return part


class _Gather(torch.autograd.Function):
    """torch's own (all_gather_single_autograd) waits where it can't be timed."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, context: ContextParallel) -> Tensor:
        ctx.context = context
        return context.gathered(part)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return ctx.context.reduced(gradients[0]), None
