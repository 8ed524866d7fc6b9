"""Context parallelism: each rank of a group has some tokens of each sequence, and gathers keys and values of all of it.

Llama 3 was trained like this (arXiv 2407.21783 section 3.3). Any mask of documents works, and what is gathered is small
beside what is computed.

A causal token attends to those before it, so the last ones cost the most. Each rank has one chunk from the front and
its mirror image from the back, which makes the costs equal.
"""

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
    """Division of each sequence among the ranks of a context group."""

    def __init__(self, mesh: DeviceMesh, times: StepTimes) -> None:
        self._group, self._times = mesh.get_group(), times
        self.size, self._rank = mesh.size(), mesh.get_local_rank()
        self._rows = functools.lru_cache(maxsize=8)(self._rows_of)

    def queries(self, length: int, device: torch.device) -> Tensor:
        """Return which tokens of a sequence this rank computes, as int64 `[length / size]`."""
        return self._rows(length, device)[self._rank]

    def keys(self, length: int, device: torch.device) -> Tensor:
        """Return the token of each gathered key, as int64 `[length]`."""
        return self._rows(length, device).flatten()

    def _rows_of(self, length: int, device: torch.device) -> Tensor:
        chunks = torch.arange(length, device=device).view(2 * self.size, -1)
        return torch.cat([chunks[: self.size], chunks[self.size :].flip(0)], dim=1)

    def take(self, tokens: Tensor) -> Tensor:
        """Return this rank's part `[batch, length / size]` of tokens `[batch, length]`."""
        return tokens.index_select(1, self.queries(tokens.size(1), tokens.device))

    def gather(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Return the keys and values of all ranks, each `[batch, heads, length, head_dim]`.

        Gradients go back to the rank that has the token.
        """
        parts: Tensor = _Gather.apply(torch.stack([key, value]), self)
        gathered_key, gathered_value = torch.cat(parts.unbind(0), dim=3).unbind(0)
        return gathered_key, gathered_value

    def gathered(self, part: Tensor) -> Tensor:
        """Return the parts of all ranks, as `[ranks, ...]`."""
        with self._times.measured(StepPart.CONTEXT):
            whole: Tensor = WAIT(GATHER(part.contiguous(), self.size, self._group.group_name))
        return whole.view(self.size, *part.shape)

    def reduced(self, parts: Tensor) -> Tensor:
        """Return the sum over all ranks of this rank's part."""
        with self._times.measured(StepPart.CONTEXT):
            part: Tensor = WAIT(REDUCE(parts.flatten(0, 1).contiguous(), "sum", self.size, self._group.group_name))
        return part


class _Gather(torch.autograd.Function):
    """Differentiable all-gather. torch's own (all_gather_single_autograd) waits in a way that can't be timed."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, context: ContextParallel) -> Tensor:
        ctx.context = context
        return context.gathered(part)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return ctx.context.reduced(gradients[0]), None
