"""Tensors by name: how they are filled by a plan of byte ranges, and copied into a shard's file. With torch."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from mmap import mmap

import torch
from torch import Tensor

from concertina_state import filling
from concertina_state.filling import Place, ShardReader
from concertina_state.format.read_plan import Box, ReadItem, ReadPlan
from concertina_state.format.shardfile import Layout

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "I64": torch.int64, "BF16": torch.bfloat16, "F16": torch.float16,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip
NAMES = {dtype: name for name, dtype in DTYPES.items()}


class Tensors:
    """What a shard holds: places in a file, and the tensor that belongs into each."""

    def __init__(self, layout: Layout, tensors: Sequence[Tensor]) -> None:
        """`tensors`: live, in the layout's order."""
        self.layout, self.tensors = layout, tensors

    def views(self, file: mmap) -> list[Tensor]:
        """Of the places."""
        whole = torch.frombuffer(file, dtype=torch.uint8)
        return [
            whole[begin : begin + chunk.size].view(DTYPES[chunk.dtype]).view(chunk.shape)
            for chunk, begin in zip(self.layout.chunks, self.layout.begins, strict=True)
        ]

    @torch.no_grad()
    def copy_to(self, views: Sequence[Tensor]) -> None:
        """What the tensors hold now."""
        for view, tensor in zip(views, self.tensors, strict=True):
            view.copy_(tensor)


def execute(plan: ReadPlan, shards: Mapping[int, ShardReader], tensors: Mapping[str, Tensor]) -> None:
    """Read what was planned into the wanted chunks' tensors."""
    filling.execute(plan, shards, lambda item: _place(item, tensors[item.target.name]))


@torch.no_grad()
def _place(item: ReadItem, whole: Tensor) -> Place:
    dtype, target = DTYPES[item.dtype], whole[item.box.within(Box.of(item.target))]
    if item.rows == item.box and target.dtype == dtype and target.is_cpu and target.is_contiguous():
        return memory(target), None
    source = torch.empty(item.rows.shape, dtype=dtype)
    part = source[item.box.within(item.rows)]

    @torch.no_grad()
    def take() -> None:
        target.copy_(part)

    return memory(source), take


def memory(tensor: Tensor) -> memoryview:
    """A contiguous CPU tensor's bytes, as they are: without numpy, which an image with torch need not have."""
    size = tensor.numel() * tensor.element_size()
    if not size:
        return memoryview(b"")
    return memoryview((ctypes.c_ubyte * size).from_address(tensor.data_ptr())).cast("B")
