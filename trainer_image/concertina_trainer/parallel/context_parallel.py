"""Context parallelism: the ranks of a context group split each sequence, and gather the sequence's keys and values.

Each rank computes the queries of length / size tokens. Llama 3 was trained like this (arXiv 2407.21783 section 3.3).
Any document mask works, and gathering keys and values takes little time compared with attention.

In causal attention a token attends to all tokens before it, so the last tokens of a sequence cost the most. Each rank
has one chunk from the front of the sequence and the mirrored chunk from the back, so that all ranks have the same cost.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from concertina_protocol import StepPart
from concertina_trainer.parallel.mesh import group_name
from concertina_trainer.parallel.step_times import StepTimes

GATHER = torch.ops._c10d_functional.all_gather_into_tensor
REDUCE = torch.ops._c10d_functional.reduce_scatter_tensor
WAIT = torch.ops._c10d_functional.wait_tensor


class ContextParallel:
    """Division of each sequence among the ranks of a context group (implements `model.attention.Context`)."""

    def __init__(self, mesh: DeviceMesh, times: StepTimes) -> None:
        self._group, self._times = group_name(mesh), times
        self.size, self._rank = mesh.size(), mesh.get_local_rank()
        self._rows = functools.lru_cache(maxsize=8)(self._rows_of)

    def queries(self, length: int, device: torch.device) -> Tensor:
        """Return the positions in a sequence of `length` tokens that this rank computes, int64 `[length / size]`."""
        return self._rows(length, device)[self._rank]

    def keys(self, length: int, device: torch.device) -> Tensor:
        """Return the position in the sequence of each gathered key, as int64 `[length]`.

        The gathered keys are in the order of ranks, which is not the order of the sequence.
        """
        return self._rows(length, device).flatten()

    def _rows_of(self, length: int, device: torch.device) -> Tensor:
        chunks = torch.arange(length, device=device).view(2 * self.size, -1)
        return torch.cat([chunks[: self.size], chunks[self.size :].flip(0)], dim=1)

    def take(self, tokens: Tensor) -> Tensor:
        """Return the columns of `tokens` `[batch, length]` that this rank computes, `[batch, length / size]`."""
        return tokens.index_select(1, self.queries(tokens.size(1), tokens.device))

    def gather(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Return the keys and values of all tokens, each `[batch, heads, length, head_dim]`.

        `key` and `value` are those of this rank's tokens, `[batch, heads, length / size, head_dim]`. In the backward
        pass, a reduce-scatter over the context group gives the gradient of each token to the rank that has the token.
        """
        parts: Tensor = _Gather.apply(torch.stack([key, value]), self)
        gathered_key, gathered_value = torch.cat(parts.unbind(0), dim=3).unbind(0)
        return gathered_key, gathered_value

    def gathered(self, part: Tensor) -> Tensor:
        """All-gather `part` over the context group, and return the parts of all ranks as `[ranks, ...]`."""
        with self._times.measured(StepPart.CONTEXT):
            whole: Tensor = WAIT(GATHER(part.contiguous(), self.size, self._group))
        return whole.view(self.size, *part.shape)

    def reduced(self, parts: Tensor) -> Tensor:
        """Return this rank's entry of `parts` `[ranks, ...]`, summed over the context group by a reduce-scatter."""
        with self._times.measured(StepPart.CONTEXT):
            part: Tensor = WAIT(REDUCE(parts.flatten(0, 1).contiguous(), "sum", self.size, self._group))
        return part


class _Gather(torch.autograd.Function):
    """Differentiable all-gather over the context group.

    torch's own function (all_gather_single_autograd) is not used, because StepTimes can't measure its waits.
    """

    @staticmethod
    def forward(ctx: Any, part: Tensor, context: ContextParallel) -> Tensor:
        ctx.context = context
        return context.gathered(part)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return ctx.context.reduced(gradients[0]), None
