"""Expert parallelism (GShard, arXiv 2006.16668): the experts of a layer are distributed over the ranks of a group.

Each rank has tokens of its own. All-to-all sends the tokens to their experts, and the results back.

The group is a part of the ranks of a stage that shard one copy. No other part of the model depends on it, because each
rank has tokens of its own in a context or tensor group too. FSDP cuts the experts further over the ranks that have the
same ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

from concertina_protocol import StepPart
from concertina_trainer.model.decoder import Decoder
from concertina_trainer.model.experts import Experts
from concertina_trainer.parallel.step_times import StepTimes


def cut(model: Decoder, mesh: DeviceMesh, times: StepTimes) -> None:
    """Distribute the experts, before FSDP cuts the other weights."""
    for moe in model.mixtures():
        for name, parameter in list(moe.experts.named_parameters()):
            sharded = distribute_tensor(parameter, mesh, [Shard(0)], src_data_rank=None)
            moe.experts.register_parameter(name, nn.Parameter(sharded))
        moe.dispatch = AllToAll(mesh, times)


def share_sequences(model: Decoder, mesh: DeviceMesh) -> None:
    """Make ranks with tokens of the same sequences balance the loads of these together."""
    group = mesh.get_group()

    def over_sequences(counts: Tensor) -> Tensor:
        dist.all_reduce(counts, group=group)
        return counts

    for moe in model.mixtures():
        moe.over_sequences = over_sequences


class AllToAll:
    """Exchange of tokens with the ranks of their experts."""

    def __init__(self, mesh: DeviceMesh, times: StepTimes) -> None:
        self._group, self._size, self._times = mesh.get_group(), mesh.size(), times

    def __call__(self, rows: Tensor, counts: Tensor, experts: Experts) -> Tensor:
        """Send rows to their experts and return the results; see Dispatch."""
        received = torch.empty_like(counts)
        with self._times.measured(StepPart.ALL_TO_ALL):
            dist.all_to_all_single(received, counts, group=self._group)
        by_rank = received.view(self._size, -1)  # [sending ranks, experts of this rank]
        sent_counts, received_counts = rows_by_rank(counts.view(self._size, -1), by_rank, len(rows))
        arrived = _Exchange.apply(rows, received_counts, sent_counts, self)
        # Rows arrive by rank, and within a rank by expert.
        numbers = torch.arange(by_rank.size(1), device=rows.device).repeat(self._size)
        order = numbers.repeat_interleave(received, output_size=len(arrived)).argsort(stable=True)
        results = experts(arrived.index_select(0, order), by_rank.sum(0))
        back: Tensor = _Exchange.apply(results.index_select(0, order.argsort()), sent_counts, received_counts, self)
        return back

    def exchange(self, rows: Tensor, received_counts: Sequence[int], sent_counts: Sequence[int]) -> Tensor:
        """Send sent_counts[r] of the rows `[sum(sent_counts), dim]` to rank r of the group, and return those received.

        The result is `[sum(received_counts), dim]`, with received_counts[r] rows from rank r.
        """
        received = rows.new_empty(sum(received_counts), *rows.shape[1:])
        with self._times.measured(StepPart.ALL_TO_ALL):
            dist.all_to_all_single(
                received, rows.contiguous(), list(received_counts), list(sent_counts), group=self._group
            )
        return received


def rows_by_rank(sent_by_expert: Tensor, received: Tensor, rows: int) -> tuple[list[int], list[int]]:
    """Return how many of this rank's `rows` go to each rank, and how many come from it.

    The host waits for the device once.
    """
    to, of = torch.stack([sent_by_expert.sum(1), received.sum(1)]).tolist()
    return to, of


class _Exchange(torch.autograd.Function):
    """Differentiable `AllToAll.exchange`; gradients go in the opposite direction.

    torch's own (all_to_all_single_autograd) can't be timed.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, received_counts: list[int], sent_counts: list[int], way: AllToAll) -> Tensor:
        ctx.received_counts, ctx.sent_counts, ctx.way = received_counts, sent_counts, way
        return way.exchange(rows, received_counts, sent_counts)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.way.exchange(gradients[0], ctx.sent_counts, ctx.received_counts), None, None, None
