"""Rank of a simulated world, for planning.

The process group does not communicate, and tensors have shapes but no values.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import FakeStore
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    FakeTensor,
    FakeTensorMode,
    unset_fake_temporarily,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage
from torch.distributed.tensor import DTensor, Partial, _sharding_prop
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.testing._internal.distributed.fake_pg import FakeProcessGroup  # noqa: F401  # registers the backend

from concertina_trainer.config.parallelism import ParallelismConfig
from concertina_trainer.data.read.batches import Microbatch
from concertina_trainer.model import decoder, positions
from concertina_trainer.model.own import OwnModel, OwnSpec
from concertina_trainer.parallel import expert
from concertina_trainer.parallel.group import DistContext

_OF_MESHES = (
    "__init__", "__getitem__", "_flatten", "_unflatten", "_concatenate", "_compute_coordinates_from_mesh",
    "_get_mesh_tensor_from_full_mesh",
)  # fmt: skip
"""Methods of DeviceMesh that need real tensors, because they compute with the values of tensors of ranks."""


@contextmanager
def fake_rank(rank: int, size: int, parallelism: ParallelismConfig, routed: bool) -> Iterator[DistContext]:
    """Return a context in which this process is one rank of a fake process group.

    `routed` says whether the model has experts. While the context is active, no other process group may exist in the
    process.

    Raises:
        InvalidInput: When the number of ranks is not a multiple of the layout's block (`ParallelismConfig.block`).
    """
    _forget()
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    device = torch.device("cpu")  # a backward pass on a fake GPU would call the GPU's driver
    try:
        yield DistContext.of(rank, size, device, parallelism, routed)
    finally:
        dist.destroy_process_group()
        _forget()


def _forget() -> None:
    """Clear caches that would carry values from one process group, or from fake tensors, to the next use."""
    _clear_sharding_prop_cache()  # meshes of another rank are equal to this one's
    positions.rotary_table.cache_clear()


@contextmanager
def fake_tensors(own: OwnSpec | None = None) -> Iterator[FakeTensorMode]:
    """Return a context in which all new tensors are fake.

    `own` is a custom model to run. The model may also use real tensors that were created when its module was imported.
    """
    with ExitStack() as stack:
        for name in _OF_MESHES:
            method = inspect.getattr_static(DeviceMesh, name)
            real = staticmethod(_really(method.__func__)) if isinstance(method, staticmethod) else _really(method)
            stack.enter_context(mock.patch.object(DeviceMesh, name, real))
        # DTensor runs each operation with fake tensors of the global size. In this mode they would be counted as
        # allocated memory.
        stack.enter_context(mock.patch.object(_sharding_prop, "detect_fake_mode", return_value=None))
        # On GPUs, masks consist of blocks and take little memory. FlexAttention keeps the same activations as causal
        # attention without a mask.
        stack.enter_context(mock.patch.object(decoder, "causal_mask", return_value=None))
        stack.enter_context(mock.patch.object(expert, "rows_by_rank", _even_loads))
        stack.enter_context(mock.patch.object(PipelineStage, "_output_slot_is_releasable", _released))
        stack.enter_context(mock.patch.object(OwnModel, "fill_buffers"))
        stack.enter_context(mock.patch.object(OwnModel, "prove", _unproved))
        if own is not None and own.config.model.hf and not own.config.data.separates_documents:
            # transformers reads positions to see that sequences need no mask, which it does not do with fake tensors.
            from transformers import masking_utils

            stack.enter_context(mock.patch.object(masking_utils, "find_packed_sequence_indices", return_value=None))
        yield stack.enter_context(FakeTensorMode(allow_non_fake_inputs=own is not None))


@contextmanager
def norms_of_cuda() -> Iterator[None]:
    """Return a context in which `rms_norm` allocates and keeps the same memory as CUDA's fused kernel.

    On a CPU, torch composes this norm of operations that keep copies in float32 for the backward pass.
    """
    with mock.patch.object(nn.functional, "rms_norm", _fused_norm):
        yield


def _fused_norm(x: Tensor, shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None) -> Tensor:
    if weight is not None and weight.dtype is not x.dtype:
        return _composed_norm(x, shape, weight, eps)  # CUDA has no kernel for two dtypes
    if not isinstance(x, DTensor):
        return FusedNorm.apply(x, len(shape), weight)  # type: ignore[no-any-return]
    if isinstance(weight, DTensor):
        weight = weight.to_local(grad_placements=[Partial()] * weight.device_mesh.ndim)
    normalized = FusedNorm.apply(x.to_local(), len(shape), weight)
    return DTensor.from_local(normalized, x.device_mesh, x.placements, run_check=False)


_composed_norm = nn.functional.rms_norm


class FusedNorm(torch.autograd.Function):
    """Shapes and dtypes of CUDA's fused norm, without values.

    For the backward pass, it keeps its input and one number for each norm.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, dims: int, weight: Tensor | None) -> Tensor:
        scales = x.new_empty((*x.shape[:-dims], *[1] * dims), dtype=torch.promote_types(x.dtype, torch.float32))
        ctx.save_for_backward(x, scales, weight)
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, None, Tensor | None]:
        x, _, weight = ctx.saved_tensors
        of_x, _, of_weight = ctx.needs_input_grad
        return torch.empty_like(x) if of_x else None, None, torch.empty_like(weight) if of_weight else None


@contextmanager
def zeros_where_looked_at() -> Iterator[None]:
    """Return a context in which code that reads values of fake tensors gets zeros, because fake tensors have no values.

    `tolist` always returns zeros. `item` returns zero if the value is not known.
    """
    real_item = Tensor.item

    def item(tensor: FakeTensor) -> object:
        try:
            return real_item(tensor)
        except DataDependentOutputException:
            return 0.0

    with (
        mock.patch.object(FakeTensor, "tolist", lambda tensor: [0] * len(tensor)),
        mock.patch.object(FakeTensor, "item", item),
    ):
        yield


def _even_loads(sent: Tensor, received: Tensor, rows: int) -> tuple[list[int], list[int]]:
    """Return how many rows to send to each rank and to receive from each rank, divided as equally as possible.

    This function replaces `expert.rows_by_rank` in planning, because the choices of the router are not known in
    planning.
    """
    rows_per_rank, remainder = divmod(rows, len(sent))
    loads = [rows_per_rank + (i < remainder) for i in range(len(sent))]
    return loads, loads


def _unproved(model: OwnModel, batch: Microbatch, loss: Tensor) -> None:
    """Do nothing, in place of `OwnModel.prove`, because fake tensors have no values to check."""
    model.proved = True


def _released(stage: PipelineStage, output: Tensor) -> tuple[bool, str]:
    """Return whether torch frees the memory of the tensors that a pipeline stage has sent.

    torch frees the memory only of real tensors, whose exact type it checks. This function replaces torch's, and treats
    fake tensors like real ones.
    """
    return (type(output) in (Tensor, FakeTensor) and not stage.is_last), ""


def _really(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def real(*arguments: Any, **keywords: Any) -> Any:
        with unset_fake_temporarily():
            return method(*arguments, **keywords)

    return real
