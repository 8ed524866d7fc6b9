"""Tensor parallelism, with the sequence split between layers.

Source: Korthikanti et al. 2022, Reducing Activation Recomputation in Large Transformer Models.

Within attention and feed-forward, a tensor group splits the heads, the feed-forward's width and the vocabulary. For
norms and the residual stream, the group splits each sequence: a rank has `[batch, length / ranks, dim]`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.distributed import _functional_collectives as functional
from torch.distributed._functional_collectives import wait_tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from concertina_protocol import StepPart
from concertina_trainer.model.decoder import Attention, Decoder, FeedForward, HeadNorm
from concertina_trainer.model.experts import MixtureOfExperts
from concertina_trainer.model.lora import LoraLinear
from concertina_trainer.parallel.async_tensor import overlap
from concertina_trainer.parallel.group import DistContext

POST_NORMS = ("attention_post_norm", "feed_forward_post_norm")
"""Norms of a layer's result before it is added to the residual stream, which is a plain tensor on each rank."""


def cut(model: Decoder, mesh: DeviceMesh, overlapped: bool) -> None:
    """Split the model's weights over the tensor group `mesh`. Call this before FSDP shards the parts.

    Each rank cuts its part from a whole weight, so the ranks do not communicate. If `overlapped` is True, the group's
    collectives overlap with matrix products (see `async_tensor`).
    """
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    ends: dict[str, Any] = {"norm": SequenceParallel(), "head": ColwiseParallel()}
    ends["embedding"] = RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1))
    parallelize_module(model, mesh, {name: plan for name, plan in ends.items() if getattr(model, name) is not None},
                       src_data_rank=None)  # fmt: skip
    if model.norm is not None:
        # The output layer (or the tied embedding) takes all tokens of a sequence, and computes the logits of this
        # rank's part of the vocabulary.
        model.norm.register_forward_hook(_whole_sequences)
    if model.embedding is not None:
        model.embedding.register_forward_hook(_arrived)
    model.tensor_degree = mesh.size()
    for block in model.blocks.values():
        plans: dict[str, Any] = {"attention_norm": SequenceParallel(), "feed_forward_norm": SequenceParallel()}
        if block.attention_post_norm is not None:
            plans |= {name: SequenceParallel(use_local_output=True) for name in POST_NORMS}
        if not overlapped:
            plans |= _layers(block.feed_forward)
        parallelize_module(block, mesh, plans, src_data_rank=None)
    for layer in model.modules():
        if isinstance(layer, LoraLinear):
            _cut_adapter(layer, mesh)
        if isinstance(layer, HeadNorm):
            layer.weight = nn.Parameter(distribute_tensor(layer.weight, mesh, [Replicate()], src_data_rank=None))
        if isinstance(layer, Attention) and layer.sinks is not None:
            layer.sinks = nn.Parameter(distribute_tensor(layer.sinks, mesh, [Shard(0)], src_data_rank=None))
        if overlapped and isinstance(layer, Attention | FeedForward):
            overlap(layer, mesh)
    for moe in model.mixtures():
        _route_own_tokens(moe, mesh)
    for name, parameter in model.named_parameters():
        parameter.requires_grad = name in trained  # torch replaces parameters of norms, which would unfreeze them


def _cut_adapter(module: LoraLinear, mesh: DeviceMesh) -> None:
    """Split the matrices A and B of an adapter over the tensor group, on the meta device.

    If the layer's weight is split by outputs, B `[outputs, rank]` is split by outputs too, and A stays whole. If the
    weight is split by inputs, A `[rank, inputs]` is split by inputs too, and B stays whole. In this case, each rank has
    a part of the input's columns.
    """
    weight = module.weight
    assert isinstance(weight, DTensor)
    rowwise = weight.placements == (Shard(1),)
    if rowwise:
        width = len(module.columns) // mesh.size()
        module.columns = module.columns[width * mesh.get_local_rank() :][:width]
    cuts = {"lora_a": Shard(1) if rowwise else Replicate(), "lora_b": Replicate() if rowwise else Shard(0)}
    for name, placement in cuts.items():
        whole = torch.empty(getattr(module, name).shape, device="meta")
        module.register_parameter(name, nn.Parameter(distribute_tensor(whole, mesh, [placement], src_data_rank=None)))


def _layers(feed_forward: Any) -> dict[str, Any]:
    plans: dict[str, Any] = {
        "attention": PrepareModuleInput(
            input_layouts=(Shard(1), None, None, None), desired_input_layouts=(Replicate(), None, None, None)
        ),
        "attention.query": ColwiseParallel(),
        "attention.key": ColwiseParallel(),
        "attention.value": ColwiseParallel(),
        "attention.output": RowwiseParallel(output_layouts=Shard(1)),
    }
    if not isinstance(feed_forward, MixtureOfExperts):
        plans |= _feed_forward("feed_forward")
    elif feed_forward.shared is not None:
        plans |= _feed_forward("feed_forward.shared")
    return plans


def _feed_forward(name: str) -> dict[str, Any]:
    return {
        name: PrepareModuleInput(input_layouts=(Shard(1), None), desired_input_layouts=(Replicate(), None)),
        f"{name}.gate": ColwiseParallel(),
        f"{name}.up": ColwiseParallel(),
        f"{name}.down": RowwiseParallel(output_layouts=Shard(1)),
    }


def _route_own_tokens(moe: MixtureOfExperts, mesh: DeviceMesh) -> None:
    """Make each rank of a tensor group route only the tokens that it has between layers.

    Tensor parallelism does not split experts. Expert parallelism and FSDP distribute the experts over ranks, including
    the ranks of the tensor group.
    """
    for module in (moe.router, moe):
        for name, parameter in list(module.named_parameters(recurse=False)):
            whole = distribute_tensor(parameter, mesh, [Replicate()], src_data_rank=None)
            module.register_parameter(name, nn.Parameter(whole))

    def own(module: nn.Module, arguments: tuple[DTensor, *tuple[Tensor | None, ...]]) -> tuple[Tensor | None, ...]:
        x, *of_tokens = arguments
        return x.to_local(), *of_tokens

    moe.register_forward_pre_hook(own)
    moe.own_tokens = lambda values: values.chunk(mesh.size(), 1)[mesh.get_local_rank()]


def _arrived(embedding: nn.Module, arguments: Any, output: Tensor) -> Tensor:
    """Wait for the embedding's collective, so that the embedding's output is a plain tensor.

    Otherwise, the output would be an AsyncCollectiveTensor. torch.compile takes such an input of a block as a plain
    tensor, and the block's gradient does not reach the embedding.
    """
    arrived: Tensor = torch.ops._c10d_functional.wait_tensor(output)
    return arrived


def _whole_sequences(norm: nn.Module, arguments: Any, output: DTensor) -> DTensor:
    return output.redistribute(placements=[Replicate()])


@contextmanager
def measured_waits(world: DistContext) -> Iterator[None]:
    """Return a context that measures the time that the ranks of a tensor group wait for each other.

    The context replaces a function of torch for the whole process, so do not nest it.
    """
    if world.meshes.tensor is None:
        yield
        return

    def wait(tensor: Tensor) -> Any:
        with world.times.measured(StepPart.TENSOR):
            return wait_tensor(tensor)

    # The wait is the part of a functional collective that does not overlap with computation. Only DTensors and
    # `async_tensor` call the function through Python.
    with mock.patch.object(functional, "wait_tensor", wait):
        yield
