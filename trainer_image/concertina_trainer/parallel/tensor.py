"""Tensor parallelism, with the sequence cut between layers (Korthikanti et al. 2022, Reducing Activation
Recomputation): heads, the feed-forward's width and the vocabulary are dealt out to the ranks of a group; norms and the
residual stream hold some of the tokens each."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from torch import Tensor, nn
from torch.distributed import _functional_collectives as functional
from torch.distributed._functional_collectives import wait_tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

from concertina_protocol import StepPart
from concertina_trainer.model.decoder import Decoder
from concertina_trainer.parallel.group import DistContext


def cut(model: Decoder, mesh: DeviceMesh) -> None:
    """Before FSDP cuts what is left of each weight. Each rank cuts its own whole values, so nothing is sent."""
    plans: dict[str, Any] = {"norm": SequenceParallel(), "head": ColwiseParallel()}
    plans["embedding"] = RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1))
    parallelize_module(model, mesh, {name: plan for name, plan in plans.items() if getattr(model, name) is not None},
                       src_data_rank=None)  # fmt: skip
    if model.norm is not None:
        # The output layer, which may be the embedding's weight, takes whole sequences and gives some of the vocabulary.
        model.norm.register_forward_hook(_whole_sequences)
    model.tensor_degree = mesh.size()
    for block in model.blocks.values():
        parallelize_module(
            block,
            mesh,
            {
                "attention_norm": SequenceParallel(),
                "attention": PrepareModuleInput(
                    input_layouts=(Shard(1), None), desired_input_layouts=(Replicate(), None)
                ),
                "attention.query": ColwiseParallel(),
                "attention.key": ColwiseParallel(),
                "attention.value": ColwiseParallel(),
                "attention.output": RowwiseParallel(output_layouts=Shard(1)),
                "feed_forward_norm": SequenceParallel(),
                "feed_forward": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
                "feed_forward.gate": ColwiseParallel(),
                "feed_forward.up": ColwiseParallel(),
                "feed_forward.down": RowwiseParallel(output_layouts=Shard(1)),
            },
            src_data_rank=None,
        )


def _whole_sequences(norm: nn.Module, arguments: Any, output: DTensor) -> DTensor:
    return output.redistribute(placements=[Replicate()])


@contextmanager
def loss_context(world: DistContext) -> Iterator[None]:
    """In which the loss of logits that are cut by vocabulary is computed, and its gradient; and what DTensors wait for
    each other is timed. torch is changed for the whole process, so it is entered once."""
    if world.meshes.tensor is None:
        yield
        return

    def wait(tensor: Tensor) -> Any:
        with world.times.measured(StepPart.TENSOR):
            return wait_tensor(tensor)

    # All that nothing hides of a functional collective; none but DTensors use these through Python.
    with mock.patch.object(functional, "wait_tensor", wait), loss_parallel():
        yield
