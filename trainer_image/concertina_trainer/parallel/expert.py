"""Expert parallelism (GShard, arXiv 2006.16668): the experts of a layer are distributed over the ranks of a group.

Each rank has different tokens. One all-to-all sends the tokens to the ranks of their experts, and another one sends the
results back.

The ranks of an expert group belong to one pipeline stage and to one copy of the weights. They may be ranks of the same
context or tensor group, because these also have different tokens. Expert parallelism therefore does not change the
layout of the model's other weights. FSDP shards the experts further, over the ranks that have the same experts.
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
from concertina_trainer.parallel.step_times import StepTimes


def cut(model: Decoder, mesh: DeviceMesh, times: StepTimes) -> None:
    """Distribute the experts of each layer over the ranks of `mesh`.

    Call this function before FSDP shards the other weights.
    """
    for moe in model.mixtures():
        for name, parameter in list(moe.experts.named_parameters()):
            sharded = distribute_tensor(parameter, mesh, [Shard(0)], src_data_rank=None)
            moe.experts.register_parameter(name, nn.Parameter(sharded, parameter.requires_grad))
        moe.dispatch = AllToAll(mesh, times)


def share_sequences(model: Decoder, mesh: DeviceMesh) -> None:
    """Make the ranks of `mesh`, which have different tokens of the same sequences, balance experts together.

    The balancing loss is defined for whole sequences, so these ranks sum their counts of tokens for each expert.
    """
    group = mesh.get_group()

    def over_sequences(counts: Tensor) -> Tensor:
        dist.all_reduce(counts, group=group)
        return counts

    for moe in model.mixtures():
        moe.over_sequences = over_sequences


class AllToAll:
    """Exchange of rows with the ranks of an expert group (implements `model.experts.Dispatch`)."""

    def __init__(self, mesh: DeviceMesh, times: StepTimes) -> None:
        self._group, self._size, self._times = mesh.get_group(), mesh.size(), times

    def __call__(self, rows: Tensor, counts: Tensor, experts: nn.Module, keys: Tensor | None) -> Tensor:
        """Send rows `[n, dim]` to the ranks of their experts, and return the results in the order of the rows.

        The rows are sorted by expert. `counts`, int64 `[all experts]`, is the number of rows of each expert of the
        layer. `keys` `[n]`, if given, travel with the rows.
        """
        received = torch.empty_like(counts)
        with self._times.measured(StepPart.ALL_TO_ALL):
            dist.all_to_all_single(received, counts, group=self._group)
        by_rank = received.view(self._size, -1)  # [sending ranks, experts of this rank]
        sent_counts, received_counts = rows_by_rank(counts.view(self._size, -1), by_rank, len(rows))
        arrived = _Exchange.apply(rows, received_counts, sent_counts, self)
        # Rows arrive sorted by sending rank, and then by expert. The experts take them sorted by expert.
        numbers = torch.arange(by_rank.size(1), device=rows.device).repeat(self._size)
        order = numbers.repeat_interleave(received, output_size=len(arrived)).argsort(stable=True)
        if keys is not None:
            keys = self.exchange(keys, received_counts, sent_counts).index_select(0, order)
        results = experts(arrived.index_select(0, order), by_rank.sum(0), keys)
        back: Tensor = _Exchange.apply(results.index_select(0, order.argsort()), sent_counts, received_counts, self)
        return back

    def exchange(self, rows: Tensor, received_counts: Sequence[int], sent_counts: Sequence[int]) -> Tensor:
        """Exchange rows, or their keys, with all ranks of the expert group, by an all-to-all.

        The first sent_counts[0] of the rows `[sum(sent_counts), ...]` go to rank 0, the next sent_counts[1] rows to
        rank 1, and so on. The result is `[sum(received_counts), ...]`, with received_counts[r] rows from rank r, in the
        order of ranks.
        """
        received = rows.new_empty(sum(received_counts), *rows.shape[1:])
        with self._times.measured(StepPart.ALL_TO_ALL):
            dist.all_to_all_single(
                received, rows.contiguous(), list(received_counts), list(sent_counts), group=self._group
            )
        return received


def rows_by_rank(sent_by_expert: Tensor, received: Tensor, rows: int) -> tuple[list[int], list[int]]:
    """Return how many rows this rank sends to each rank of the expert group, and how many it receives from each rank.

    `sent_by_expert` and `received` are the numbers of rows for each rank and each of the rank's experts, int64 `[ranks,
    experts of a rank]`. `rows` is the total number of rows to send. The host waits for the device once.
    """
    to, of = torch.stack([sent_by_expert.sum(1), received.sum(1)]).tolist()
    return to, of


class _Exchange(torch.autograd.Function):
    """Differentiable `AllToAll.exchange`. In the backward pass, gradients go in the opposite direction.

    torch's own function (all_to_all_single_autograd) is not used, because StepTimes can't measure its waits.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, received_counts: list[int], sent_counts: list[int], way: AllToAll) -> Tensor:
        ctx.received_counts, ctx.sent_counts, ctx.way = received_counts, sent_counts, way
        return way.exchange(rows, received_counts, sent_counts)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.way.exchange(gradients[0], ctx.sent_counts, ctx.received_counts), None, None, None
