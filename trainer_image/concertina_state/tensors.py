"""Tensors by name, and how a plan of byte ranges fills them. With torch."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import torch
from torch import Tensor

from concertina_state.format.read_plan import Box, ReadItem, ReadPlan
from concertina_state.format.shardfile import Header, Layout

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "I64": torch.int64, "BF16": torch.bfloat16, "F16": torch.float16,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip
NAMES = {dtype: name for name, dtype in DTYPES.items()}
THREADS = 4
"""That read: one alone does not fill a memory bus."""


class ShardReader(Protocol):
    """Something that holds one shard's file."""

    @property
    def header(self) -> Header: ...

    @property
    def batch_bytes(self) -> int:
        """So many are best asked for at once."""
        ...

    def read_into(self, parts: Sequence[tuple[int, memoryview]]) -> None:
        """Fill each with the file's bytes from that offset on. From several threads at a time."""
        ...


class Tensors(Protocol):
    """What a shard holds: places in a file, and the tensor that belongs into each."""

    @property
    def layout(self) -> Layout: ...

    @property
    def tensors(self) -> Sequence[Tensor]:
        """In the layout's order."""
        ...


def execute(plan: ReadPlan, shards: Mapping[int, ShardReader], tensors: Mapping[str, Tensor]) -> None:
    """Read what was planned into the wanted chunks' tensors. What is held meanwhile is a batch for each thread."""
    batches = [
        (shards[number], batch) for number in plan.shards for batch in plan.batches(number, shards[number].batch_bytes)
    ]
    with ThreadPoolExecutor(min(THREADS, len(os.sched_getaffinity(0))), "restore") as pool:
        for _ in pool.map(lambda each: _read(each[0], each[1], tensors), batches):
            pass


def _read(shard: ShardReader, batch: Sequence[ReadItem], tensors: Mapping[str, Tensor]) -> None:
    parts: list[tuple[int, memoryview]] = []
    copies: list[tuple[Tensor, Tensor]] = []
    for item in batch:
        dtype, target = DTYPES[item.dtype], tensors[item.target.name][item.box.within(Box.of(item.target))]
        source = target
        if item.rows != item.box or target.dtype != dtype or not target.is_cpu or not target.is_contiguous():
            source = torch.empty(item.rows.shape, dtype=dtype)
            copies.append((target, source[item.box.within(item.rows)]))
        parts.append((item.begin, memory(source)))
    shard.read_into(parts)
    with torch.no_grad():
        for target, part in copies:
            target.copy_(part)


def memory(tensor: Tensor) -> memoryview:
    """A contiguous CPU tensor's bytes, as they are: without numpy, which an image with torch need not have."""
    size = tensor.numel() * tensor.element_size()
    if not size:
        return memoryview(b"")
    return memoryview((ctypes.c_ubyte * size).from_address(tensor.data_ptr())).cast("B")
