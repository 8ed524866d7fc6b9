"""Tensor parallelism, with the sequence cut between layers (Korthikanti et al. 2022, Reducing Activation
Recomputation): heads, the feed-forward's width and the vocabulary are dealt out to the ranks of a group; norms and the
residual stream hold some of the tokens each."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import nn
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

from concertina_trainer.model.decoder import Decoder


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


def loss_context(mesh: DeviceMesh | None) -> AbstractContextManager[Any]:
    """In which the loss of logits that are cut by vocabulary is computed, and its gradient. torch changes its dispatch
    for the whole process, so it is entered once."""
    return nullcontext() if mesh is None else loss_parallel()
